"""Compliance suite: the edition's clauses, and checks of each against a server in any language."""
