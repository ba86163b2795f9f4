"""Name of the protocol's generation that the core implements, and of its edition.

The names of other generations stand in their dialects.
"""

PROTOCOL_V1 = "rlmesh.protocol.v1"
"""The generation of the edition's text."""
EDITION_NAME = "2026.06"
"""The edition that generation and ``rlmesh-wire-v1`` share; peers of the latter compare it letter
by letter."""
