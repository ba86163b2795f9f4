"""Ask a policy for actions over openpi's protocol, with nothing of rlmesh-ray.

It needs websockets, msgpack and NumPy. The policy may be one of rlmesh-ray
(``rlmesh-ray serve-model CHECKPOINT --openpi 127.0.0.1:8000``), or that of any openpi server.
"""

import argparse
import os
from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import connect

DTYPES = ("|b1", "|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")


def packed(message: dict[str, Any]) -> bytes:
    """Return a message; arrays are maps with bytes as keys."""
    data: bytes = msgpack.packb(
        message,
        default=lambda array: {
            b"__ndarray__": True,
            b"data": array.tobytes(),
            b"dtype": array.dtype.str,
            b"shape": array.shape,
        },
    )
    return data


def unpacked(data: bytes | str) -> dict[str, Any]:
    """Return the map in a message; a text is the server's error."""
    if isinstance(data, str):
        raise RuntimeError(f"the server could not answer: {data}")
    message: dict[str, Any] = msgpack.unpackb(data, object_hook=array_of)
    return message


def array_of(found: dict[Any, Any]) -> Any:
    """Return the array that a map stands for, or the map."""
    if b"__ndarray__" not in found:
        return found
    if found[b"dtype"] not in DTYPES:
        raise RuntimeError(f"the server sends an array of {found[b'dtype']!r}")
    return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])


def main() -> None:
    """Ask for chunks of actions, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT of the server")
    parser.add_argument("--steps", type=int, default=3, help="how often to ask")
    arguments = parser.parse_args()
    token = os.environ.get("RLMESH_RAY_TOKEN")
    headers = {"Authorization": f"Api-Key {token}"} if token else {}

    with connect(
        f"ws://{arguments.address}", compression=None, max_size=None, additional_headers=headers
    ) as server:
        metadata = unpacked(server.recv())
        print(f"the policy takes {sorted(metadata.get('observation_space', {}))}")
        state = np.zeros(4, np.float32)
        for step in range(arguments.steps):
            server.send(packed({"observation": state + step}))
            result = unpacked(server.recv())
            milliseconds = result["server_timing"]["infer_ms"]
            print(f"{len(result['actions'])} actions in {milliseconds:.1f} ms: {result['actions']}")


if __name__ == "__main__":
    main()
