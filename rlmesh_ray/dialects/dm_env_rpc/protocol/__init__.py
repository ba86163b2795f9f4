"""Worlds, sequences and requests of dm_env_rpc, without I/O."""
