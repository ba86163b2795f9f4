"""Limits of an endpoint's connections and calls.

Sizes of messages follow from the spaces (``wire.rlmesh_v1.limits``); ``session_limit`` has
``max_sessions``; RLlink's port has ``dialects.rllink.server.connection.RLlinkLimits``.
"""

MAX_STREAMS = 128
"""Calls at a time on one connection; further ones wait at the client."""
MAX_CALLS = 4096
"""Calls at a time at an endpoint without a number of sessions; further ones are refused."""
MAX_METADATA_BYTES = 8 * 1024
"""Of all metadata of a call; gRPC refuses a call with more."""
CONNECTION_SETUP_S = 20.0
"""How long a connection may take to become one (TLS, HTTP/2)."""
CONNECTION_IDLE_S = 300.0
"""How long a connection without a call is kept at most; clients open another one by themselves."""

_CALLS_BESIDES = 256
_CALLS_BESIDE_STREAMS = 3


def max_calls(num_sessions: int, num_streams: int = 1) -> int:
    """Return how many calls an endpoint with so many sessions takes at a time.

    Besides the streams of sessions there are handshakes, health checks, calls into lanes, and
    clients that wait.

    Args:
        num_sessions: At a time.
        num_streams: How many a session may have.
    """
    return (num_streams + _CALLS_BESIDE_STREAMS) * num_sessions + _CALLS_BESIDES


def connection_options() -> list[tuple[str, int]]:
    """Return gRPC's options for the limits of connections."""
    return [
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(CONNECTION_SETUP_S * 1000)),
        # gRPC checks a connection once per this period, and closes it if there was no call since
        # the check before: after one to two periods.
        ("grpc.max_connection_idle_ms", int(CONNECTION_IDLE_S * 500)),
    ]
