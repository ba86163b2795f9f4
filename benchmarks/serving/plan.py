"""Plan of a measurement of predictions: its workloads and peers.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Side(enum.StrEnum):
    """A kind of server."""

    OURS = "rlmesh-ray"
    NOOP = "noop"
    """The limit: grpc.aio sends back what it gets."""
    NOOP_UVLOOP = "noop-uvloop"
    """The same on uvloop in place of asyncio's own event loop."""
    RELEASED = "released"
    """The released rlmesh 0.1.0, on its own wire, from a virtual environment of its own."""
    RAY_SERVE = "ray-serve"
    """Ray Serve's gRPC ingress with one replica, for the frames of edition 2026.06."""


class ClientKind(enum.StrEnum):
    """A closed-loop client, written as a first program of its library would be."""

    BLOCKING = "blocking"
    """grpcio's blocking client: a queue of requests, an iterator of answers; threads."""
    ASYNCIO = "asyncio"
    """grpc.aio on asyncio's own event loop."""
    JAVASCRIPT = "JavaScript"
    """@grpc/grpc-js on Node.js; for a lone client."""


class Workload(enum.StrEnum):
    """What of serving can be measured."""

    MESSAGES = "messages"
    ROWS = "rows"
    LATENCY = "latency"
    CLIENTS = "clients"
    SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases, the peers and the repetitions."""

    workloads: Sequence[Workload] = tuple(Workload)
    rivals: Sequence[Side] = (Side.NOOP,)
    repetitions: int = 5
    latency_s: float = 60.0
    """How long requests arrive in the open loop."""
    client: ClientKind = ClientKind.ASYNCIO
    """Of messages."""
    lone_clients: Sequence[ClientKind] = (ClientKind.BLOCKING, ClientKind.ASYNCIO)
    """Of a single client, one after the other."""
