"""Test helpers: environments, strategies, a reference session, and frame mutation."""
