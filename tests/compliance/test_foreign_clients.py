"""A Join without a session id is served by what its first message shows, and gets no extras."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from rlmesh_ray import EnvServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.compliance.subjects import EnvSubject
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import Close, EnvRequest, Reset, ResetDone, Step, StepDone
from rlmesh_ray.testing.envs import EchoEnv
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from tests.loopback.ports import plain_channel

REQUESTS: list[EnvRequest] = [
    Reset("1", seeds=(3,)),
    Step("2", np.zeros(1, np.int64).tobytes()),
    Close("3"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer(partial(EchoEnv, Discrete(4), max_length=40)) as running:
        yield running


def draws(address: str, metadata: tuple[tuple[str, str], ...]) -> Any:
    """Return an array of the infos, as a client sees it that opens Join with ``metadata``."""
    with plain_channel(address) as channel:
        call = channel.stream_stream("/rlmesh.env.v1.EnvService/Join")
        frames = map(wire.pack_request, REQUESTS)
        reset, step, _ = map(wire.parse_response, call(frames, metadata=metadata, timeout=10.0))
    assert isinstance(reset, ResetDone)
    assert isinstance(step, StepDone)
    return step.infos["draws"]


def test_a_stranger_gets_plain_lists(server: EnvServer) -> None:
    assert isinstance(draws(server.address, ()), list)


def test_a_made_up_session_id_gets_nothing_more(server: EnvServer) -> None:
    metadata = ((capabilities.SESSION_METADATA_KEY, "0" * 32),)

    assert isinstance(draws(server.address, metadata), list)


def test_what_a_handshake_offered_holds_for_who_has_its_session_id(server: EnvServer) -> None:
    offered = {capabilities.NDARRAY: ""}
    answer = EnvSubject(ConnectOptions(server.address)).shake_hands(capabilities=offered)
    metadata = ((capabilities.SESSION_METADATA_KEY, answer.capabilities[capabilities.SESSION]),)

    for _ in range(2):  # a client that comes back with the same id still has what it offered
        assert isinstance(draws(server.address, metadata), np.ndarray)
    assert isinstance(draws(server.address, ()), list)
