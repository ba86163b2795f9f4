"""Messages of dm_env_rpc v1 to bytes and back."""
