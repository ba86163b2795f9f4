"""Evaluation: runs episodes of environment endpoints with a policy, and summarizes the returns."""
