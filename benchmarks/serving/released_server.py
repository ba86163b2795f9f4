"""The released rlmesh with the same policy; runs in a virtual environment of its own.

``VENV/bin/python -I .../released_server.py``. It must not import this package, which is not
installed there.
"""

import os
import runpy
import socket
import threading
import time
from pathlib import Path
from typing import Any

# Read when torch is imported. It predicts in threads that torch.set_num_threads does not reach.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rlmesh.numpy import Model  # type: ignore[import-not-found]  # of the other environment

_WAIT_S = 30.0

_HERE = Path(__file__).parent
_NETWORK = runpy.run_path(str(_HERE / "mlp.py"))["mlp"]()
_STAY = runpy.run_path(str(_HERE.parent / "control.py"))["stay"]


class _Policy(Model):
    def predict(self, observation: Any) -> int:
        with torch.inference_mode():
            return int(_NETWORK(torch.from_numpy(observation[None])).argmax(1)[0])

    def predict_batch(self, observations: Any) -> Any:
        with torch.inference_mode():
            return _NETWORK(torch.from_numpy(observations)).argmax(1).numpy()


def _stay(port: int) -> None:
    """Send the parent the address once the server listens; the server does not report that."""
    end_s = time.monotonic() + _WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            if time.monotonic() > end_s:
                return
            time.sleep(0.02)
    _STAY(f"127.0.0.1:{port}")


def _main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = threading.Thread(target=_Policy().serve, args=(f"127.0.0.1:{port}",), daemon=True)
    serving.start()
    _stay(port)


if __name__ == "__main__":
    _main()
