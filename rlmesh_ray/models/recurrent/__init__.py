"""Policies with memory: one state for the running episode of each lane."""
