"""The RLlink port."""
