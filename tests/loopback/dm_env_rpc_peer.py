"""A dm_env_rpc server that is not ours: generated messages, and dm_env_rpc's own library.

Its worlds are corridors: ``move`` goes -1, 0 or 1 steps from the middle, and after ``length`` moves
the sequence ends. What a ``Conduct`` says goes otherwise than in a well-behaved server.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc, spec_manager, tensor_spec_utils, tensor_utils
from google.rpc import status_pb2

RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3
SILENT, CUT, LATE = 0, -1, -2


def spec(
    name: str, dtype: Any, shape: Sequence[int] = (), low: Any = None, high: Any = None
) -> Any:
    """Return a TensorSpec."""
    kind = tensor_utils.np_type_to_data_type(np.dtype(dtype))
    made = pb.TensorSpec(name=name, shape=shape, dtype=kind)
    if low is not None or high is not None:
        low, high = (None if one is None else np.asarray(one, dtype) for one in (low, high))
        tensor_spec_utils.set_bounds(made, low, high)
    return made


def specs(actions: Mapping[int, Any], observations: Mapping[int, Any]) -> Any:
    """Return ActionObservationSpecs."""
    return pb.ActionObservationSpecs(actions=actions, observations=observations)


CORRIDOR = specs(
    {3: spec("move", np.int8, (), -1, 1)},
    {
        1: spec("place.at", np.float32, (2,), -9, 9),
        2: spec("place.seed", np.int64),
        7: spec("reward", np.float64),
        9: spec("rendering", np.uint8, (2, 2, 3)),
    },
)


@dataclass
class Conduct:
    """What a server does otherwise."""

    specs: Any = field(default_factory=lambda: CORRIDOR)
    specs_of_stream: dict[int, Any] = field(default_factory=dict)
    """By number of the stream, from 1, where they are others."""
    length: int = 3
    end_state: int = TERMINATED
    first_state: int = RUNNING
    discount: float | None = None
    specs_after_reset: Any = None
    refusals: dict[str, list[int]] = field(default_factory=dict)
    """By kind of request: codes for its first ones; CUT cuts the stream, SILENT answers nothing,
    LATE answers well, but not at once."""
    quorum: int = 1
    """How many joins are there before the first one is answered."""
    alter: Callable[[Any], None] = lambda response: None
    """What to do to each response to a step."""


class Peer(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """The server; ``with Peer(Conduct()) as peer: peer.address``."""

    def __init__(self, conduct: Conduct | None = None, port: int = 0) -> None:
        self.conduct = conduct or Conduct()
        self.requests: list[tuple[int, str, Any]] = []
        """Number of the stream, kind, message; in order of arrival."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._joins = threading.Barrier(self.conduct.quorum)
        self._num_streams = 0
        self.num_worlds = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def address(self) -> str:
        return f"dm_env_rpc://127.0.0.1:{self.port}"

    def __enter__(self) -> "Peer":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._server.stop(0.0).wait()

    def kinds(self, stream: int | None = None) -> list[str]:
        """Return what was asked, in order, without the question for the contract."""
        return [
            kind
            for number, kind, _ in self.requests
            if stream in (None, number) and kind != "extension"
        ]

    def settings(self, kind: str) -> list[dict[str, Any]]:
        """Return the settings of all requests of a kind, in order of arrival."""
        return [
            {name: tensor_utils.unpack_tensor(value) for name, value in message.settings.items()}
            for _, asked, message in self.requests
            if asked == kind
        ]

    def Process(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        with self._lock:
            self._num_streams += 1
            number = self._num_streams
        walk = _Walk(self.conduct, self.conduct.specs_of_stream.get(number, self.conduct.specs))
        for request in requests:
            kind = request.WhichOneof("payload")
            message = getattr(request, kind)
            code = self._note(number, kind, message)
            if code == CUT:
                context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
            if code == SILENT:
                self.ended.wait(30.0)
                return
            yield self._response(walk, kind, message, code)

    def _note(self, number: int, kind: str, message: Any) -> int | None:
        with self._lock:
            self.requests.append((number, kind, message))
            queue = self.conduct.refusals.get(kind, [])
            return queue.pop(0) if queue else None

    def _response(self, walk: "_Walk", kind: str, message: Any, code: int | None) -> Any:
        response = pb.EnvironmentResponse()
        if code == LATE:
            self.ended.wait(0.2)
        elif code is not None:
            response.error.CopyFrom(status_pb2.Status(code=code, message=f"no {kind} now"))
            return response
        if kind == "create_world":
            with self._lock:
                self.num_worlds += 1
                response.create_world.world_name = f"world-{self.num_worlds}"
        elif kind == "extension":
            response.error.CopyFrom(status_pb2.Status(code=12, message="no extensions"))
        else:
            if kind == "join_world":
                self._joins.wait(60.0)
            walk.answer(kind, message, response)
        return response


class _Walk:
    """One agent in its corridor."""

    def __init__(self, conduct: Conduct, specs: Any) -> None:
        self._conduct = conduct
        self._specs = specs
        self._actions = spec_manager.SpecManager(specs.actions)
        self._observations = spec_manager.SpecManager(specs.observations)
        self._is_running = False
        self._num_moves = 0
        self._place = 0.0
        self._seed = -1

    def answer(self, kind: str, message: Any, response: Any) -> None:
        if kind == "join_world":
            response.join_world.specs.CopyFrom(self._specs)
        elif kind == "reset":
            self._is_running = False
            if "seed" in message.settings:
                self._seed = int(tensor_utils.unpack_tensor(message.settings["seed"]))
            changed = self._conduct.specs_after_reset
            response.reset.specs.CopyFrom(self._specs if changed is None else changed)
        elif kind == "step":
            self._step(message, response.step)
            self._conduct.alter(response.step)
        else:
            getattr(response, kind).SetInParent()

    def _step(self, message: Any, response: Any) -> None:
        if self._is_running:
            self._num_moves += 1
            self._place += float(self._actions.unpack(message.actions).get("move", 0))
            is_over = self._num_moves >= self._conduct.length
            response.state = self._conduct.end_state if is_over else RUNNING
        else:
            self._num_moves, self._place = 0, 0.0
            response.state = self._conduct.first_state
        self._is_running = response.state == RUNNING
        values = {
            "place.at": np.array([self._place, self._num_moves], np.float32),
            "place.seed": np.int64(self._seed),
            # Also where a sequence begins: clients must not count it.
            "reward": np.float64(self._place + 100.0),
            "rendering": np.zeros((2, 2, 3), np.uint8),
            "discount": np.float32(self._conduct.discount or 0.0),
        }
        known = {one.name for one in self._specs.observations.values()}
        packed = self._observations.pack(
            {name: value for name, value in values.items() if name in known}
        )
        for uid in message.requested_observations:
            response.observations[uid].CopyFrom(packed[uid])
