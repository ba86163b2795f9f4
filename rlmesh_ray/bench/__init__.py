"""Measurements that anybody can repeat: ratios inside one run, every number kept.

Each subject (``serving``, ...) measures in fresh processes, alternates between the sides that it
compares and yields what it found; ``report`` makes tables of it, the command line the JSON.
"""
