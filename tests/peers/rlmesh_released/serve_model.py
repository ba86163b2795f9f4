"""Serves a policy with the released rlmesh, until standard input ends.

``python -m tests.peers.rlmesh_released.serve_model MODEL [ADDRESS]`` writes its address on one
line; MODEL is a name in ``policies``.
"""

import contextlib
import socket
import sys
import threading
import time

from tests.loopback.ports import free_address
from tests.peers.rlmesh_released.policies import MODELS

_WAIT_S = 60.0


def _tell_when_it_listens(address: str) -> None:
    kind, to = (
        (socket.AF_UNIX, address.removeprefix("unix://"))
        if address.startswith("unix:")
        else (socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2])))
    )
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.socket(kind) as there:
            there.connect(to)
            sys.stdout.write(address + "\n")
            sys.stdout.flush()
            return
        threading.Event().wait(0.02)


def main() -> None:
    # It says neither when it listens nor which free port it took.
    name, *rest = sys.argv[1:]
    address = rest[0] if rest else free_address()
    threading.Thread(target=MODELS[name]().serve, args=(address,), daemon=True).start()
    _tell_when_it_listens(address)
    sys.stdin.read()


main()
