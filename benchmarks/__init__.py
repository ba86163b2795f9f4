"""Measurements that anybody can repeat: ratios inside one run, with every number kept."""
