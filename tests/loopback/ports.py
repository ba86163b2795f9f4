"""Ports for servers that have to be found again at the port they had."""

import itertools
import os
import socket

# Below those that the system hands out, to whoever binds port 0 or connects: between two servers
# of a test nobody else gets it by chance. Processes with neighbouring ids have a hundred each.
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
