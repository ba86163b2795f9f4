"""Ports for servers that have to be found again at the port they had, and channels to any.

Peers' scripts take their ports from here, too, in environments without grpcio.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

# Below those that the system hands out, to programs that bind port 0: between two servers
# of a test no other program gets it by chance. Processes with neighbouring ids have a hundred each.
_numbers = itertools.count()
_first = 20_000 + os.getpid() % 100 * 100


def free_address(host: str = "127.0.0.1") -> str:
    """Return ``HOST:PORT`` at which nothing listens, and another one each time."""
    while True:
        port = _first + next(_numbers) % 100
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))  # free at every address
            except OSError:
                continue
        return f"{host}:{port}"


def plain_channel(
    address: str, options: Sequence[tuple[str, Any]] = (), **named: Any
) -> grpc.Channel:
    """Return a channel that shares nothing with the others of this process.

    Else it takes over a failed connection to a port at which another server listened before, and
    the time that gRPC waits until it tries again.
    """
    import grpc  # not at the top: see there

    own = [("grpc.use_local_subchannel_pool", 1), *options]
    return grpc.insecure_channel(address, options=own, **named)
