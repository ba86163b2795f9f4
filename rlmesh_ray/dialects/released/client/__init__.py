"""Client sessions in rlmesh-wire-v1."""
