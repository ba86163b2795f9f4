"""Environments behind servers of dm_env_rpc, DeepMind's protocol, as lanes."""
