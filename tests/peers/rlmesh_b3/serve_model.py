"""Serves a policy for CartPole with rlmesh 0.1.0b3, until a client closes it.

``python -m tests.peers.rlmesh_b3.serve_model`` writes its address on one line.
"""

import contextlib
import socket
import sys
import threading
import time

from rlmesh.numpy import Model  # type: ignore[import-not-found]  # of another virtual environment

from tests.loopback.ports import free_address

_WAIT_S = 60.0


def act(observation: object) -> int:
    """Push towards where the pole falls; b3 takes the batch axis off where there is one row."""
    return int(observation[2] + observation[3] > 0)  # type: ignore[index]


def _tell_when_it_listens(port: int) -> None:
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            sys.stdout.write(f"127.0.0.1:{port}\n")
            sys.stdout.flush()
            return
        threading.Event().wait(0.02)


def main() -> None:
    # b3 says neither when it listens nor which free port it took.
    port = int(free_address().rpartition(":")[2])
    threading.Thread(target=_tell_when_it_listens, args=(port,), daemon=True).start()
    Model(act).serve(f"127.0.0.1:{port}")


main()
