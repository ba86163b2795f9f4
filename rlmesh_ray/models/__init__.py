"""Running policies: the Policy protocol, its implementations and the batcher."""
