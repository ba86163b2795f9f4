"""Sessions of generation ``rlmesh-wire-v1``, which the released rlmesh 0.1.0 speaks."""
