"""Array processing in the runner: all lanes of a slot at once, where that is equivalent."""
