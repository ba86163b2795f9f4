"""Policies from RLlib checkpoints."""
