"""Recurrent policies: one state for the running episode of each lane."""
