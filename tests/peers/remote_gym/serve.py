"""Serves environments by remote-gym; runs in a virtual environment of its own.

``VENV/bin/python -I .../serve.py``: prints its address, and serves until its input ends. It must
not import this project, which is not installed there.
"""

import os
import socket
import sys
from pathlib import Path

from remote_gym import create_remote_environment_server  # type: ignore[import-not-found]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _main() -> None:
    os.chdir(Path(__file__).parent)
    port = _free_port()
    # Threads: its processes are forked from a server that has threads, and may hang.
    server = create_remote_environment_server(
        {"entrypoint": "entrypoint.py"}, "127.0.0.1", port, use_thread=True
    )
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0.0)
    os._exit(0)  # environments whose clients have not gone would keep it alive


if __name__ == "__main__":
    _main()
