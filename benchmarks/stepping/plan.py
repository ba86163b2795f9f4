"""Plan of a measurement of steps: its rows and peers.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


class Peer(enum.StrEnum):
    """What one would use instead."""

    SYNC = "sync"
    """Gymnasium's SyncVectorEnv, in the process itself."""
    ASYNC = "async"
    """Its AsyncVectorEnv with shared memory: a process a lane."""
    RELEASED = "released"
    """The released rlmesh 0.1.0 with its own server."""
    DM_ENV_RPC = "dm-env-rpc"
    """dm_env_rpc's own client, with a server made of its own library, and with ours."""
    ENVPOOL = "envpool"
    """EnvPool, whose environments are C++, in the process itself."""
    GRPC = "grpc"
    """gRPC alone, the limit of what it can transfer: a server that sends back what it gets."""


class Row(enum.StrEnum):
    """What of stepping can be measured."""

    VECTOR = "vector"
    REMOTE = "remote"
    EVALUATION = "evaluation"
    FRAMES = "frames"
    ENVPOOL = "envpool"
    STRAGGLERS = "stragglers"
    CATCH = "catch"
    DM_ENV_RPC = "dm-env-rpc"


PEERS: Mapping[Row, Collection[Peer]] = MappingProxyType(
    {
        Row.VECTOR: (Peer.SYNC, Peer.ASYNC, Peer.GRPC),
        Row.REMOTE: (Peer.RELEASED, Peer.GRPC),
        Row.EVALUATION: (Peer.RELEASED, Peer.GRPC),
        Row.FRAMES: (Peer.SYNC, Peer.ASYNC),
        Row.ENVPOOL: (Peer.ENVPOOL,),
        Row.STRAGGLERS: (),
        Row.CATCH: (Peer.DM_ENV_RPC,),
        Row.DM_ENV_RPC: (Peer.DM_ENV_RPC,),
    }
)
"""Peers of each row; stragglers are compared with waiting for them."""


@dataclass(frozen=True, slots=True)
class SteppingPlan:
    """The cases, the peers, the repetitions and the durations."""

    rows: Sequence[Row] = tuple(Row)
    peers: Sequence[Peer] = tuple(Peer)
    repetitions: int = 5
    warm_up_s: float = 0.5
    """Before each measurement; not counted."""
    seconds: float = 2.0
    """Of each measurement."""


def rows_of(peers: Collection[Peer]) -> list[Row]:
    """Return the rows in which any of ``peers`` takes part, and those that need none."""
    return [row for row in Row if not PEERS[row] or set(PEERS[row]) & set(peers)]
