"""The edition's clauses, and the suite that holds any server to them, in any language."""
