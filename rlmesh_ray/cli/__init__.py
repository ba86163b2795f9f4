"""The command line, `rlmesh-ray`."""
