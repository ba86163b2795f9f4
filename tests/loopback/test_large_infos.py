"""Infos without measure: what reaches the endpoint is bounded, and no other session waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from google.protobuf.message import Message
from gymnasium import spaces
from gymnasium.wrappers.vector import DictInfoToList

from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.protocol.messages import EnvRequest, Reset, Step
from rlmesh_ray.spaces.vector_infos import LEFT_OUT_KEY
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values

ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a long list": lambda scale: {"x": list(range(100_000 * scale))},
    "long lists": lambda scale: {"x": [list(range(12_000 * scale)) for _ in range(20)]},
    "sets": lambda scale: {"x": [set(range(1000)) for _ in range(1000 * scale)]},
    "long integers": lambda scale: {"x": [10**4000 + n for n in range(4000 * scale)]},
    "a large dict": lambda scale: {"x": {str(n): n for n in range(20_000 * scale)}},
    "many keys": lambda scale: {str(n): n for n in range(20_000 * scale)},
    "small arrays": lambda scale: {str(n): np.zeros(2) for n in range(10_000 * scale)},
    "shared parts": lambda scale: {"x": [[10**4000] * 30] * (6000 * scale)},
    "large arrays": lambda scale: {"x": [np.zeros(100_000) for _ in range(20 * scale)]},
}
"""What breaks a bound, and several times as much."""
MAX_VALUES = 2**16
MAX_LATENCY_S = 15.0  # of a neighbour's step on a busy machine; it was up to a minute


class Talkative(gymnasium.Env[Any, Any]):
    """Gives the infos that the reset's options name, at every step."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._infos = ROWS[options["row"]](options["scale"]) if options else {}
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 1, 0.0, False, False, self._infos


class Raw:
    """A Join whose answers stay bytes: a stranger to the endpoint, without capabilities."""

    def __init__(self, server: EnvServer) -> None:
        assert server.contract is not None
        self._action = values.encode_batch(
            server.contract.action_space,
            [np.zeros(server.contract.num_envs, np.int64)],
            server.contract.num_envs,
        )
        self._channel = ConnectOptions(server.address).open()
        path = "/rlmesh.env.v1.EnvService/Join"
        self._stream = JoinStream(open_call(self._channel, path, ()), server.address)

    def ask(self, request: EnvRequest) -> bytes:
        self._stream.send(wire.pack_request(request))
        return self._stream.receive(100.0)

    def step(self) -> bytes:
        return self.ask(Step("step", self._action, 0))

    def close(self) -> None:
        self._stream.close()
        self._channel.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one lane", marks=pytest.mark.nightly),
        pytest.param(2, id="two lanes"),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[EnvServer]:
    with EnvServer(Talkative, num_envs=request.param) as server:
        yield server


def _num_values(message: Message) -> int:
    """Return how many messages are nested in ``message``."""
    count = 1
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            count += sum(map(_num_values, value.values()))
        else:
            count += sum(map(_num_values, value if field.is_repeated else [value]))
    return count


def _slowest_step_s(session: Raw, is_over: threading.Event) -> float:
    slowest_s = 0.0
    while not is_over.is_set():
        start_s = time.monotonic()
        session.step()
        slowest_s = max(slowest_s, time.monotonic() - start_s)
    return slowest_s


# Which of them are cut, and how, is tested with the cutting; here it is the time that counts.
SOON = ("long integers", "small arrays", "shared parts", "large arrays")


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        *(pytest.param(row, 1, marks=[] if row in SOON else [pytest.mark.slow]) for row in ROWS),
        *(pytest.param(row, 5, marks=pytest.mark.nightly) for row in ROWS),
    ],
)
def test_infos_without_measure_are_bounded_and_hold_no_neighbour_up(
    server: EnvServer, row: str, scale: int
) -> None:
    with closing(Raw(server)) as talkative, closing(Raw(server)) as neighbour:
        neighbour.ask(Reset("reset"))
        talkative.ask(Reset("reset", (), {"row": row, "scale": scale}))
        is_over, frames = threading.Event(), []

        def talk() -> None:
            try:
                frames.append(talkative.step())
            finally:
                is_over.set()

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        slowest_s = _slowest_step_s(neighbour, is_over)
        thread.join()

    (frame,) = frames
    response = pb.JoinResponse.FromString(frame)
    assert response.WhichOneof("kind") == "step", response.error.message
    assert len(response.step.infos.entries) > 0
    assert _num_values(response) < MAX_VALUES
    assert len(frame) < 2**25
    assert slowest_s < MAX_LATENCY_S


def test_what_was_left_out_is_reported_in_the_infos(server: EnvServer) -> None:
    with closing(Raw(server)) as talkative:
        talkative.ask(Reset("reset", (), {"row": "a long list", "scale": 1}))
        response = pb.JoinResponse.FromString(talkative.step())

    assert "entries of the infos were left out" in response.step.infos.entries[LEFT_OUT_KEY].str


@pytest.mark.parametrize("row", ["a long list", "a large dict"])
def test_what_remains_has_the_form_of_gymnasiums_infos(row: str) -> None:
    with EnvServer(Talkative, num_envs=2) as server:
        env = DictInfoToList(RemoteVectorEnv(server.address))
        env.reset(options={"row": row, "scale": 1})
        infos = env.step(np.zeros(2, np.int64))[4]
        env.close()

    for info in infos:
        assert "entries of the infos were left out" in info[LEFT_OUT_KEY]
        assert len(info) > 1
