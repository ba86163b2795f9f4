"""How fast environments are stepped, beside vectors in the process and other protocols."""
