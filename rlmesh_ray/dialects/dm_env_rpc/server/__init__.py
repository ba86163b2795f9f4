"""Worlds of dm_env_rpc on an environment endpoint."""
