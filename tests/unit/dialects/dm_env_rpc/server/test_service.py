"""The service of dm_env_rpc without gRPC: faults, and what it needs of the endpoint's port."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from google.protobuf.message import DecodeError
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.dm_env_rpc.protocol import Code, WorldError
from rlmesh_ray.dialects.dm_env_rpc.server.service import EnvironmentService, pack_error
from rlmesh_ray.server.endpoint.gate import Drain
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

SPACE = from_gymnasium(spaces.Box(-1, 1, (1000, 1000), np.int16))
CONTRACT = EnvContract("x", SPACE, SPACE, 2, AutoresetMode.NEXT_STEP)
POOL = cast("WorkerPool", None)  # no client joins


class Stream:
    """One stream of a service, without gRPC: what it writes is kept."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = frames
        self.written: list[bytes] = []

    async def requests(self) -> AsyncIterator[bytes]:
        for frame in self._frames:
            yield frame

    async def send_initial_metadata(self, _: object) -> None:
        """Dropped."""

    async def write(self, data: bytes) -> None:
        self.written.append(data)


def test_a_fault_of_our_own_is_answered_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    create = pb.EnvironmentRequest(create_world={}).SerializeToString()
    leave = pb.EnvironmentRequest(leave_world={}).SerializeToString()
    stream = Stream(create, leave)
    service = EnvironmentService(POOL, CONTRACT, Drain())

    # Without a pool no world can be made.
    asyncio.run(service.process(stream.requests(), cast("Any", stream)))

    first, second = (pb.EnvironmentResponse.FromString(data) for data in stream.written)
    assert first.error.code == 13
    assert second.HasField("leave_world")
    assert "a dm_env_rpc request has failed" in caplog.text


def test_a_request_may_be_as_large_as_its_integers_can_become() -> None:
    service = EnvironmentService(POOL, CONTRACT, Drain())

    assert service.max_request_bytes > 2 * 1000 * 1000 * 10
    assert service.streams_per_session == 2


@given(st.binary(max_size=40))
def test_any_bytes_are_answered(data: bytes) -> None:
    stream = Stream(data)
    service = EnvironmentService(POOL, CONTRACT, Drain())

    asyncio.run(service.process(stream.requests(), cast("Any", stream)))

    [written] = stream.written
    response = pb.EnvironmentResponse.FromString(written)
    if pb_kind(data) not in ("create_world", "join_world"):  # those need the pool
        assert response.error.code != Code.INTERNAL


def pb_kind(data: bytes) -> str | None:
    try:
        kind: str | None = pb.EnvironmentRequest.FromString(data).WhichOneof("payload")
    except DecodeError:
        return None
    return kind


def test_a_refusal_with_odd_text_is_packed() -> None:
    data = pack_error(WorldError(Code.INTERNAL, "lone \ud800", "trace \ud800"))

    error = pb.EnvironmentResponse.FromString(data).error
    assert (error.code, error.message) == (13, "lone ?")
    assert error.details[0].type_url == "type.googleapis.com/google.rpc.DebugInfo"
