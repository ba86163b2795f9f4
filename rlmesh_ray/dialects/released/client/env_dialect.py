"""The generation ``rlmesh-wire-v1`` within a session with an EnvService; without I/O.

It differs from the edition's in what a session's holder is told. Here it is told the same:

* A partial reset is answered with the observations and infos of these lanes only: the other
  lanes' last observations are kept, to be told along.
* Answers carry no episode ids: the client mints them. An episode that an autoreset begins is one,
  too, and so is one that a reset cuts off; the records of both are dropped, since the edition
  knows episodes only from a Reset to their end.
* Infos come as plain values; ``infos`` says in which forms.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from rlmesh_ray import __version__
from rlmesh_ray.client.env_dialect import EnvClientFrames, owned
from rlmesh_ray.client.env_handshake import EnvDialectFactory
from rlmesh_ray.client.step_results import ResetResult, StepResult
from rlmesh_ray.client.version_negotiation import CLIENT_NAME, HandshakeVariant
from rlmesh_ray.dialects.released.client.episode_ids import EpisodeIds
from rlmesh_ray.dialects.released.client.vector_infos import as_vector_infos
from rlmesh_ray.dialects.released.protocol.handshake import (
    accept_released_answer,
    make_released_offer,
)
from rlmesh_ray.dialects.released.protocol.rules import WIRE_V1
from rlmesh_ray.dialects.released.wire import env as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import EpisodeRecord, Reset, ResetDone, Step, StepDone
from rlmesh_ray.protocol.versions import EDITION_NAME
from rlmesh_ray.spaces.batch import Column, empty_columns
from rlmesh_ray.spaces.contract import EnvContract

_SHOWN = 8


class ReleasedEnvClientDialect:
    """That of the released rlmesh.

    Args:
        contract: The session's.
    """

    frames: EnvClientFrames = wire
    edition = EDITION_NAME

    def __init__(self, contract: EnvContract) -> None:
        self._contract = contract
        self._all_lanes = range(contract.num_envs)
        # What was asked for and has not been answered.
        self._resets: deque[Reset] = deque()

    # What a contract of millions of lanes asks for is not made before somebody uses them.
    @cached_property
    def _episodes(self) -> EpisodeIds:
        return EpisodeIds(self._contract.num_envs)

    @cached_property
    def _latest(self) -> list[Column]:
        """The observations of all lanes, as they were told last; read-only."""
        return empty_columns(self._contract.observation_space, self._contract.num_envs)

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
        episode_ids = self._episodes.new_ids(lanes or self._all_lanes)
        request = Reset(request_id, tuple(seeds), options, timeout_ms, tuple(lanes), episode_ids)
        self._resets.append(request)
        return request

    def step(self, request_id: str, action: Sequence[Column], timeout_ms: int) -> Step:
        """Return the request to step all lanes."""
        contract = self._contract
        data = values.encode_batch(contract.action_space, action, contract.num_envs)
        return Step(request_id, data, timeout_ms, episode_ids=self._episodes.names)

    def reset_result(self, done: ResetDone) -> ResetResult:
        """Return what ``done`` says, over all lanes."""
        request = self._resets.popleft()
        while request.request_id != done.request_id:  # those before it were answered with errors
            request = self._resets.popleft()
        lanes = request.env_indices or self._all_lanes
        self._episodes.begin(lanes, request.episode_ids)
        self._learn(done.observation, lanes)
        infos = as_vector_infos(done.infos, lanes, self._contract.num_envs)
        return ResetResult(owned(self._latest), infos, self._episodes.tracked)

    def step_result(self, done: StepDone) -> StepResult:
        """Return what ``done`` says."""
        width = self._contract.num_envs
        if done.env_indices and done.env_indices != tuple(self._all_lanes):
            raise CodecError(
                f"it is of lanes {_some(done.env_indices)} and not of all {width} in order"
            )
        if not len(done.rewards) == len(done.terminated) == len(done.truncated) == width:
            raise CodecError(
                f"{len(done.rewards)} rewards and {len(done.terminated)} and {len(done.truncated)} "
                f"flags for {width} lanes"
            )
        terminated = np.frombuffer(done.terminated, np.bool_).copy()
        truncated = np.frombuffer(done.truncated, np.bool_).copy()
        self._learn(done.observation, self._all_lanes)
        completed: tuple[EpisodeRecord, ...] = ()
        has_ended = terminated | truncated
        if has_ended.any():
            lanes = np.flatnonzero(has_ended).tolist()
            completed = self._episodes.end(lanes, done.completed_episodes)
        return StepResult(
            observation=owned(self._latest),
            rewards=np.asarray(done.rewards, np.float64),
            terminated=terminated,
            truncated=truncated,
            infos=as_vector_infos(done.infos, self._all_lanes, width) if done.infos else {},
            completed_episodes=completed,
            episode_ids=self._episodes.tracked,
        )

    def _learn(self, data: bytes, lanes: Sequence[int]) -> None:
        spec = self._contract.observation_space
        told = values.decode_batch(spec, data, len(lanes))
        if lanes == self._all_lanes:
            self._latest = told
            return
        self._latest = _with_rows(owned(self._latest), told, lanes)


def _some(lanes: Sequence[int]) -> str:
    return f"{', '.join(map(str, lanes[:_SHOWN]))}{'…' * (len(lanes) > _SHOWN)}"


def _with_rows(columns: list[Column], rows: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
    """Put one row for each of ``lanes`` into ``columns``, whose arrays are written to."""
    merged: list[Column] = []
    for column, part in zip(columns, rows, strict=True):
        if isinstance(column, tuple):
            texts = dict(enumerate(column)) | dict(zip(lanes, part, strict=True))
            merged.append(tuple(texts.values()))
        else:
            column[list(lanes)] = part
            merged.append(column)
    return merged


def _accept(offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
    able = dict(accept_released_answer(offer, answer).capabilities)
    # In this generation these names promise nothing that the edition's client could use.
    for name in (
        capabilities.SHARED_MEMORY,
        capabilities.DIRECT_TCP,
        capabilities.NUMBERED_REQUESTS,
    ):
        able.pop(name, None)
    if able.get(capabilities.SUBSET_STEP) == capabilities.YES:
        able[capabilities.PARTIAL_RESET] = ""
    return replace(answer, capabilities=able)


DIALECT: HandshakeVariant[EnvDialectFactory] = HandshakeVariant(
    WIRE_V1,
    wire,
    make_released_offer(CLIENT_NAME, __version__, {}),
    _accept,
    ReleasedEnvClientDialect,
)
