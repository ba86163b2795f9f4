"""The generations of the protocol, which share their paths and no message."""

PROTOCOL_V1 = "rlmesh.protocol.v1"
"""That of the edition's text."""
WIRE_V1 = "rlmesh-wire-v1"
"""That of the released rlmesh 0.1.0."""
GENERATIONS = (PROTOCOL_V1, WIRE_V1)
EDITION_NAME = "2026.06"
"""Of the edition that both speak; peers of ``WIRE_V1`` compare it letter by letter."""
