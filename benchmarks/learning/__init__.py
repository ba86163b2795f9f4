"""Whether algorithms learn through endpoints in as many steps as with RLlib's own runner."""
