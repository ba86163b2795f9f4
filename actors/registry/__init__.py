"""The cluster's registry: leases of endpoints, and which session samples from which."""
