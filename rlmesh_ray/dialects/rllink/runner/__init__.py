"""RLlib EnvRunner that samples from RLlink simulators."""
