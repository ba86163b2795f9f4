"""The dialects of a session with an EnvService: requests and answers, without I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.protocol.messages import (
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    Infos,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.batch_codec import BatchCodec
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values


@dataclass(frozen=True, slots=True)
class ResetResult:
    """First observations, over all lanes."""

    observation: list[Column]
    infos: Infos
    episode_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one vector step; every array has one entry per lane."""

    observation: list[Column]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]


class EnvClientFrames(Protocol):
    """Encodes requests and decodes responses, such as a module of ``wire``."""

    def pack_request(self, request: EnvRequest, *, tag_arrays: bool, max_bytes: int) -> bytes:
        """Return the frame of ``request``.

        Args:
            request: The request.
            tag_arrays: Whether the endpoint has the capability NDARRAY.
            max_bytes: The largest frame that the endpoint accepts.

        Raises:
            CodecError: Something in the request would not arrive as it is, or it is too large.
        """

    def parse_response(self, data: bytes) -> EnvResponse:
        """Return the response in ``data``; raises CodecError if it is malformed."""


class EnvClientDialect(Protocol):
    """Makes the requests of one session, and reads their answers, in the order of the requests."""

    @property
    def frames(self) -> EnvClientFrames:
        """The encoding of its messages."""

    @property
    def edition(self) -> str:
        """The edition for Configure, which comes first; empty: there is no Configure."""

    def reset(
        self,
        request_id: str,
        *,
        seeds: Sequence[int],
        options: Mapping[str, object],
        timeout_ms: int,
        lanes: Sequence[int],
    ) -> Reset:
        """Return the request to reset ``lanes``, or all where these are empty."""

    def step(self, request_id: str, action: Sequence[Column], timeout_ms: int) -> Step:
        """Return the request to step all lanes.

        Raises:
            CodecError: A column is not what its leaf declares.
        """

    def reset_result(self, done: ResetDone) -> ResetResult:
        """Return the result in ``done``, over all lanes.

        Raises:
            CodecError: It has other lanes, or no observations of this session.
        """

    def step_result(self, done: StepDone) -> StepResult:
        """Return the result in ``done``; raises as ``reset_result``."""


class EditionEnvClientDialect:
    """The dialect of ``rlmesh.protocol.v1``; its messages need no translation.

    Args:
        contract: Contract of the session.
        observations: Decodes observations; None: the edition's codec.
    """

    frames: EnvClientFrames = wire
    edition = ""

    def __init__(self, contract: EnvContract, observations: BatchCodec | None = None) -> None:
        self._observations = observations or values.codec(contract.observation_space)
        self._action_space = contract.action_space
        self._width = contract.num_envs

    def reset(
        self,
        request_id: str,
        *,
        seeds: Sequence[int],
        options: Mapping[str, object],
        timeout_ms: int,
        lanes: Sequence[int],
    ) -> Reset:
        """Return the request to reset ``lanes``, or all where these are empty."""
        return Reset(request_id, tuple(seeds), options, timeout_ms, tuple(lanes))

    def step(self, request_id: str, action: Sequence[Column], timeout_ms: int) -> Step:
        data = values.encode_batch(self._action_space, action, self._width)
        return Step(request_id, data, timeout_ms)

    def reset_result(self, done: ResetDone) -> ResetResult:
        columns = self._observations.decode(done.observation, self._width)
        return ResetResult(owned(columns), done.infos, done.episode_ids)

    def step_result(self, done: StepDone) -> StepResult:
        columns = self._observations.decode(done.observation, self._width)
        return StepResult(
            observation=owned(columns),
            rewards=np.asarray(done.rewards, np.float64),
            terminated=np.frombuffer(done.terminated, np.bool_).copy(),
            truncated=np.frombuffer(done.truncated, np.bool_).copy(),
            infos=done.infos,
            completed_episodes=done.completed_episodes,
            episode_ids=done.episode_ids,
        )


def owned(columns: Sequence[Column]) -> list[Column]:
    """Return copies: torch warns about read-only arrays, and callers keep and change them."""
    return [column if isinstance(column, tuple) else np.array(column) for column in columns]
