"""The cluster's registry: leases of endpoints, and the assignment of sessions to them."""
