"""``calls``: how many functions of the package a step and a prediction call."""
