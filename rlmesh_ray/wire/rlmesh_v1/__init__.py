"""The dialect of generation rlmesh.protocol.v1 (edition 2026.06)."""
