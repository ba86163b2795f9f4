"""Client dialect of ``rlmesh-wire-v1`` for sessions with an environment; without I/O.

It converts answers to the results of the edition's sessions:

* The answer to a partial reset has only these lanes: the last observations of the others are kept
  and added.
* Answers have no episode ids: the client mints them. The records of episodes that an autoreset has
  begun or a reset has ended are dropped: the edition's episodes last from a Reset to their end.
* Infos are plain values, with lists in place of arrays, in one of three forms: for one lane, in a
  session of any width, the environment's own info; for lanes that are single environments,
  ``final_info``, a list of their infos, one for each lane; for a vector environment, the form of
  gymnasium. They become the infos of gymnasium's vector environments.
"""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import CLIENT_NAME, HandshakeVariant
from rlmesh_ray.client.env.env_client import (
    EditionEnvClientDialect,
    ResetResult,
    StepResult,
    owned,
)
from rlmesh_ray.dialects.released.protocol import (
    WIRE_V1,
    accept_released_answer,
    make_released_offer,
)
from rlmesh_ray.dialects.released.wire import env as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, Reset, ResetDone, Step, StepDone
from rlmesh_ray.spaces.batch import Column, empty_columns
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.wire.rlmesh_v1.limits import max_request_bytes

_FINAL_INFO = "final_info"
_MAX_AXES = 32
_WARNING = "rlmesh.conformance.warning"


def as_vector_infos(lane_infos: Infos, lanes: Sequence[int], num_lanes: int) -> dict[str, object]:
    """Return infos as an endpoint of this package sends them: arrays by key, masks by ``_key``.

    The dtypes are those that gymnasium gives to Python's numbers, since the infos have none.

    Args:
        lane_infos: The infos of ``lanes``, in their order.
        lanes: Indices.
        num_lanes: Width of the session.
    """
    if not lane_infos:
        return {}
    warning = lane_infos.get(_WARNING)
    own = {key: value for key, value in lane_infos.items() if key != _WARNING}
    infos = _vector_infos(own, lanes, num_lanes)
    if warning is not None:
        texts = list(map(_warning_text, warning)) if isinstance(warning, list) else warning
        infos[_WARNING] = texts
    return infos


def _vector_infos(lane_infos: Infos, lanes: Sequence[int], num_lanes: int) -> dict[str, object]:
    final = lane_infos.get(_FINAL_INFO)
    if len(lanes) == 1:
        return _joined({lanes[0]: lane_infos}, num_lanes)
    if isinstance(final, list) and len(final) == len(lanes) and _are_mappings(final):
        parts = [{key: info[key] for key in info if key != _WARNING} for info in final]
        return _joined(dict(zip(lanes, parts, strict=True)), num_lanes)
    if tuple(lanes) == tuple(range(num_lanes)):
        return _with_arrays(lane_infos, num_lanes)
    return _joined({lane: lane_info(lane_infos, at) for at, lane in enumerate(lanes)}, num_lanes)


def _are_mappings(values: Sequence[object]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _joined(infos: Mapping[int, Infos], num_lanes: int) -> dict[str, object]:
    """Return the infos of lanes as those of a vector.

    Args:
        infos: By lane.
        num_lanes: Of the vector.
    """
    joined: dict[str, object] = {}
    for key in dict.fromkeys(key for info in infos.values() for key in info):
        values = {lane: info[key] for lane, info in infos.items() if key in info}
        mask = np.zeros(num_lanes, np.bool_)
        mask[list(values)] = True
        joined[key] = _entries(values, num_lanes)
        joined[f"_{key}"] = mask
    return joined


def _entries(values: Mapping[int, Any], num_lanes: int) -> object:
    if _are_mappings(list(values.values())):
        return _joined(values, num_lanes)
    found = _array([*values.values()])
    # The lists of single lanes stay as they are: they may not be arrays of one shape.
    is_plain = found.ndim == 1 and found.dtype != object
    entries: NDArray[Any] = (
        np.zeros(num_lanes, found.dtype) if is_plain else np.full(num_lanes, None, object)
    )
    for lane, value in values.items():
        entries[lane] = value
    return entries


def _with_arrays(infos: Infos, num_lanes: int, *, is_masked: bool = False) -> dict[str, object]:
    """Return infos in gymnasium's form with arrays where gymnasium has them.

    Args:
        infos: With lists.
        num_lanes: Of the vector.
        is_masked: Whether a mask outside tells which lanes have what is in here.
    """
    found: dict[str, object] = {}
    for key, value in infos.items():
        has_mask = _is_mask(infos.get(f"_{key}"), num_lanes)
        if isinstance(value, Mapping):
            found[key] = _with_arrays(value, num_lanes, is_masked=has_mask or is_masked)
        elif _is_mask(value, num_lanes) and key.startswith("_") and key[1:] in infos:
            found[key] = np.array(value, np.bool_)
        elif isinstance(value, list) and (has_mask or (is_masked and len(value) == num_lanes)):
            found[key] = _array(value)
        else:
            found[key] = value
    return found


def _is_mask(value: object, num_lanes: int) -> bool:
    return isinstance(value, list) and len(value) == num_lanes and set(map(type, value)) == {bool}


def _array(values: list[Any]) -> NDArray[Any]:
    """Return an array of numbers, or one of objects where the values are not numbers."""
    with contextlib.suppress(ValueError):  # of lists that have not all the same length
        array = np.array(values)
        if array.dtype.kind in "bif" and array.size and array.ndim <= _MAX_AXES:
            return array
    objects = np.empty(len(values), object)
    for lane, value in enumerate(values):
        objects[lane] = value
    return objects


def _warning_text(warning: object) -> str:
    if not isinstance(warning, Mapping):
        return str(warning)
    kind, path, detail = (str(warning.get(name, "")) for name in ("kind", "path", "detail"))
    return f"{kind}{path.removeprefix('$')}: {detail.removeprefix(f'{path}: ')}"


class EpisodeIds:
    """The ids of one session, of 32 hexadecimal digits.

    Args:
        num_lanes: Width of the session.
    """

    def __init__(self, num_lanes: int) -> None:
        # Of each id, so that no other session has it; a number is the rest of it.
        self._prefix = uuid4().hex[:20]
        self._num_named = 0
        self.names = self.new_ids(num_lanes)
        """The lanes' ids in a Step. In a lane whose episode has ended, it is the id of the episode
        that an autoreset begins."""
        self.tracked: tuple[str, ...] = ("",) * num_lanes
        """By lane: the episode that a Reset has begun and that has not ended; empty: none."""
        # By lane: the episode that runs according to the answers, or that begins next.
        self._running = self.names

    def new_ids(self, count: int) -> tuple[str, ...]:
        first, self._num_named = self._num_named, self._num_named + count
        return tuple(f"{self._prefix}{number:012x}" for number in range(first, first + count))

    def rename(self, lanes: Sequence[int], episode_ids: Sequence[str]) -> None:
        self.names = _replaced(self.names, lanes, episode_ids)

    def begin(self, lanes: Sequence[int], episode_ids: Sequence[str]) -> None:
        """Handle the answer to a Reset that has begun these episodes."""
        self.tracked = _replaced(self.tracked, lanes, episode_ids)
        self._running = _replaced(self._running, lanes, episode_ids)

    def end(
        self, lanes: Sequence[int], records: Sequence[EpisodeRecord]
    ) -> tuple[EpisodeRecord, ...]:
        """Handle the end of the episodes in ``lanes``.

        Args:
            lanes: Indices.
            records: The endpoint's.

        Returns:
            One record for each of the tracked episodes that have ended.
        """
        ended = {(lane, self.tracked[lane]) for lane in lanes if self.tracked[lane]}
        found = {(each.env_index, each.episode_id): each for each in records}
        self.tracked = _replaced(self.tracked, lanes, ("",) * len(lanes))
        # A Reset that is in flight or has failed has set the id of the next episode.
        following = [lane for lane in lanes if self.names[lane] == self._running[lane]]
        self.rename(following, self.new_ids(len(following)))
        self._running = _replaced(self._running, lanes, [self.names[lane] for lane in lanes])
        return tuple(each for key, each in found.items() if key in ended)


def _replaced(
    values: tuple[str, ...], lanes: Sequence[int], others: Sequence[str]
) -> tuple[str, ...]:
    changed = list(values)
    for lane, other in zip(lanes, others, strict=True):
        changed[lane] = other
    return tuple(changed)


_SHOWN = 8


class ReleasedEnvClientDialect(EditionEnvClientDialect):
    """The dialect of one session.

    Args:
        contract: The session's.
    """

    frames: ClassVar[Any] = wire
    edition = EDITION_NAME

    def __init__(self, contract: EnvContract) -> None:
        self._contract = contract
        self._all_lanes = range(contract.num_envs)
        # Requests that have not been answered.
        self._resets: deque[Reset] = deque()

    # A contract may have millions of lanes: these are made on first use.
    @cached_property
    def _episodes(self) -> EpisodeIds:
        return EpisodeIds(self._contract.num_envs)

    @cached_property
    def _latest(self) -> list[Column]:
        """The last observations of all lanes; read-only."""
        return empty_columns(self._contract.observation_space, self._contract.num_envs)

    def reset(self, request: Reset) -> Reset:
        """Return the request with the ids of the episodes that it begins.

        Raises:
            CodecError: An option or a seed cannot travel.
        """
        chosen = request.env_indices or self._all_lanes
        request = replace(request, episode_ids=self._episodes.new_ids(len(chosen)))
        self.frames.pack_request(  # refuses what cannot travel, before the lanes' ids change
            request, tag_arrays=False, max_bytes=max_request_bytes(self._contract)
        )
        self._episodes.rename(chosen, request.episode_ids)
        self._resets.append(request)
        return request

    def step(self, request_id: str, action: Sequence[Column], timeout_ms: int) -> Step:
        contract = self._contract
        data = values.encode_batch(contract.action_space, action, contract.num_envs)
        return Step(request_id, data, timeout_ms, episode_ids=self._episodes.names)

    def reset_result(self, done: ResetDone) -> ResetResult:
        request = self._resets.popleft()
        while request.request_id != done.request_id:  # earlier ones were answered with errors
            request = self._resets.popleft()
        lanes = request.env_indices or self._all_lanes
        self._episodes.begin(lanes, request.episode_ids)
        self._learn(done.observation, lanes)
        infos = as_vector_infos(done.infos, lanes, self._contract.num_envs)
        return ResetResult(owned(self._latest), infos, self._episodes.tracked)

    def step_result(self, done: StepDone) -> StepResult:
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
        rows = values.decode_batch(spec, data, len(lanes))
        is_all = lanes == self._all_lanes
        self._latest = rows if is_all else _with_rows(owned(self._latest), rows, lanes)


def _some(lanes: Sequence[int]) -> str:
    return f"{', '.join(map(str, lanes[:_SHOWN]))}{'…' * (len(lanes) > _SHOWN)}"


def _with_rows(columns: list[Column], rows: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
    """Return ``columns`` with new rows for ``lanes``; their arrays are written to."""
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


DIALECT = HandshakeVariant(
    WIRE_V1,
    wire.HANDSHAKE,
    make_released_offer(CLIENT_NAME, __version__, {}),
    _accept,
    ReleasedEnvClientDialect,
)
