"""Clients and servers of openpi made of the library alone, and what they talk about."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import msgpack
import numpy as np
from gymnasium import spaces
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve

from rlmesh_ray.dialects.openpi.wire import pack, unpack

TIMEOUT_S = 30.0


class Arm(gymnasium.Env[Any, Any]):
    """An arm's spaces; its episodes have three steps, and the reward is the action's first part."""

    observation_space = spaces.Dict(
        {
            "observation/image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "observation/state": spaces.Box(-10, 10, (2,), np.float32),
            "prompt": spaces.Text(40),
        }
    )
    action_space = spaces.Box(-100, 100, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), float(action[0]), self._steps == 3, False, {}

    def _observation(self) -> dict[str, Any]:
        return {
            "observation/image": np.zeros((4, 4, 3), np.uint8),
            "observation/state": np.full(2, self._steps, np.float32),
            "prompt": "lift",
        }


def observation(state: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Return what a client sends."""
    return {
        "observation/image": np.zeros((4, 4, 3), np.uint8),
        "observation/state": np.full(2, state),
        "prompt": "lift",
        **changes,
    }


def batch(*states: float) -> dict[str, Any]:
    """Return the observations of some lanes, as ``RemoteModel.predict`` takes them."""
    return {
        "observation/image": np.zeros((len(states), 4, 4, 3), np.uint8),
        "observation/state": np.array([[state, state] for state in states], np.float32),
        "prompt": ["lift"] * len(states),
    }


def doubled(observations: Any) -> Any:
    """Act with twice the state."""
    return 2 * observations["observation/state"]


class Client:
    """Sends observations to a server, one after the other.

    Args:
        address: ``HOST:PORT``.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self._exit = contextlib.ExitStack()
        self.connection: ClientConnection = self._exit.enter_context(
            connect(f"ws://{address}", compression=None, max_size=None, **options)
        )
        self.metadata = unpack(self._received())

    def infer(self, message: Any) -> Any:
        """Return the result for an observation; text: the server's error."""
        self.connection.send(message if isinstance(message, bytes | str) else pack(message))
        answer = self._received()
        return answer if isinstance(answer, str) else unpack(answer)

    def close(self) -> None:
        """Close the connection."""
        self._exit.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _received(self) -> Any:
        return self.connection.recv(TIMEOUT_S)


@contextlib.contextmanager
def small_server(
    infer: Callable[[dict[str, Any]], Any],
    metadata: Any = None,
    process_request: Any = None,
) -> Iterator[str]:
    """Serve as the stock server does, without any code of ours; yield the address.

    Args:
        infer: Returns the result for an observation with its arrays; text is sent as an error, and
            bytes as they are.
        metadata: What is sent first; text and bytes as they are.
        process_request: See ``websockets``.
    """

    def handle(connection: ServerConnection) -> None:
        connection.send(metadata if isinstance(metadata, str | bytes) else packed(metadata or {}))
        for message in connection:
            result = infer(msgpack.unpackb(message, object_hook=array_of))
            if isinstance(result, str):
                connection.send(result)
                connection.close(1011)
            elif result is not None:
                connection.send(result if isinstance(result, bytes) else packed(result))

    with serve(handle, "127.0.0.1", 0, compression=None, process_request=process_request) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(TIMEOUT_S)


def packed(value: Any) -> bytes:
    """Return a message with arrays, by the rules of the protocol."""
    data: bytes = msgpack.packb(value, default=_map_of)
    return data


def _map_of(array: Any) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }


def array_of(found: dict[Any, Any]) -> Any:
    """Return the array that a map of a message is, or the map."""
    if b"__ndarray__" in found:
        return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])
    return found
