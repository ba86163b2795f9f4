"""Repeatable measurements: ratios within one run, with every number kept."""
