"""What an endpoint speaks besides the edition, and what if that is not installed."""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from gymnasium import spaces

from rlmesh_ray.dialects import registry
from rlmesh_ray.dialects.dm_env_rpc.server.service import EnvironmentService
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.enabled_dialects import (
    DM_ENV_RPC,
    ENV_DIALECT_NAMES,
    MODEL_DIALECT_NAMES,
    checked_dialects,
)
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

SPACE = from_gymnasium(spaces.Box(-1, 1, (1000, 1000), np.int16))
CONTRACT = EnvContract("x", SPACE, SPACE, 2, AutoresetMode.NEXT_STEP)
POOL = cast("WorkerPool", None)  # nobody joins


def test_an_endpoint_speaks_dm_env_rpc() -> None:
    languages = checked_dialects(None, ENV_DIALECT_NAMES)
    (handler,) = registry.additional_services(languages, POOL, CONTRACT, 1.0, Drain())

    assert languages == set(ENV_DIALECT_NAMES)
    assert handler.service_name() == "dm_env_rpc.v1.Environment"


class Stream:
    """One stream of a service, without gRPC: what it writes is kept."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = frames
        self.written: list[bytes] = []

    async def requests(self) -> AsyncIterator[bytes]:
        for frame in self._frames:
            yield frame

    async def send_initial_metadata(self, _: object) -> None:
        """Nobody reads it."""

    async def write(self, data: bytes) -> None:
        self.written.append(data)


def test_a_fault_of_our_own_is_answered_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    create = pb.EnvironmentRequest(create_world={}).SerializeToString()
    leave = pb.EnvironmentRequest(leave_world={}).SerializeToString()
    stream = Stream(create, leave)
    service = EnvironmentService(POOL, CONTRACT, 1.0, Drain())

    # Without a pool no world can be made.
    asyncio.run(service.process(stream.requests(), cast("Any", stream)))

    first, second = (pb.EnvironmentResponse.FromString(data) for data in stream.written)
    assert first.error.code == 13
    assert second.HasField("leave_world")
    assert "a dm_env_rpc request has failed" in caplog.text


def test_without_the_extra_an_endpoint_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *others: Any) -> Any:
        return None if name == "dm_env_rpc" else found(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setitem(sys.modules, "dm_env_rpc", None)

    languages = checked_dialects(None, ENV_DIALECT_NAMES)

    assert languages == set(MODEL_DIALECT_NAMES)
    assert registry.additional_services(languages, POOL, CONTRACT, 1.0, Drain()) == []
    with pytest.raises(ConfigurationError, match=r"not installed: pip install .*\[dm-env-rpc\]"):
        checked_dialects([DM_ENV_RPC], ENV_DIALECT_NAMES)


def test_a_request_may_be_as_large_as_its_integers_can_become() -> None:
    assert registry.max_dialect_request_bytes(CONTRACT) > 2 * 1000 * 1000 * 10
