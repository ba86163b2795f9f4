"""How fast a runner samples, beside RLlib's own and the bare environment."""
