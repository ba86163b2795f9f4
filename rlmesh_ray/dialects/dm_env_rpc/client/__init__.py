"""Lanes of environments behind dm_env_rpc servers."""
