"""Protocol variants besides rlmesh.protocol.v1: one folder each, registered in registry.py."""
