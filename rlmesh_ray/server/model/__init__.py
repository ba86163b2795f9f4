"""Policies behind an address: routes, batches, the policy's thread."""
