"""The codec of dm_env_rpc v1: the messages of the published package to plain values and back."""
