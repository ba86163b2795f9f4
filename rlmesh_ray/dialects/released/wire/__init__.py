"""Messages of rlmesh-wire-v1 to bytes and back."""
