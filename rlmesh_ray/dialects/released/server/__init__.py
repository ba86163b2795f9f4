"""Server sessions in rlmesh-wire-v1."""
