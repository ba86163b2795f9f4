"""RLlink: external simulators that connect to the trainer."""
