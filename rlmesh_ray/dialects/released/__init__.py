"""The released rlmesh 0.1.0: generation rlmesh-wire-v1."""
