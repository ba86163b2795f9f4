"""The commands of rlmesh-ray, one a module."""
