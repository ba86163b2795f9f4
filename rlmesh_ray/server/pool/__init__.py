"""Several endpoints behind one address, and endpoints that join a pool."""
