"""dm_env_rpc v1, server and client. Needs the extra dm-env-rpc."""
