"""The endpoint's second language: dm_env_rpc v1. Needs the extra ``dm-env-rpc``."""
