"""The port at which a ModelServer serves clients of openpi."""
