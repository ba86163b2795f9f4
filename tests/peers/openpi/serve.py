"""Serve chunks of twice the state with openpi's published codec; print the port.

A small server by the rules of the protocol: the published package has a client alone.
"""

import sys

import numpy as np
from openpi_client import msgpack_numpy
from websockets.sync.server import ServerConnection, serve


def handle(connection: ServerConnection) -> None:
    """Answer each observation with three actions."""
    connection.send(msgpack_numpy.packb({"reset_pose": np.zeros(2), "server": "a test's"}))
    for message in connection:
        try:
            state = msgpack_numpy.unpackb(message)["observation"]["state"]
            actions = np.stack([2 * state + step for step in range(3)])
        except (KeyError, ValueError) as error:
            connection.send(repr(error))
            connection.close(1011)
            return
        connection.send(
            msgpack_numpy.packb({"actions": actions, "server_timing": {"infer_ms": 2.5}})
        )


if __name__ == "__main__":
    with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        sys.stdout.write(f"{server.socket.getsockname()[1]}\n")
        sys.stdout.flush()
        server.serve_forever()
