"""Limits the size of a worker's replies, so that the endpoint decodes and forwards them quickly.

The endpoint does so in its serving loop, while all other sessions wait. Here, in the worker and
under the request's deadline, large infos delay their own session only.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlmesh_ray.envs.commands import CallReply, Outcome, ResetReply, StepReply
from rlmesh_ray.envs.worker_channel import encode
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.spaces.bounded_repr import (
    CONTAINERS,
    LEFT_OUT_KEY,
    bounded_repr,
    int_repr_cost,
    left_out_notice,
    type_repr,
)
from rlmesh_ray.spaces.validation import ConformanceWarning

SMALL_BYTES = 2**16
"""A frame up to this size is never slow to decode."""
MAX_NODES = 2**16
"""Most values in the infos of one reply; a numeric array counts as one."""
MAX_BYTES = 2**26
"""Approximate byte limit for text, bytes and arrays in the infos, beyond twice an observation."""
MAX_RESULT_BYTES = 2**24
"""Approximate byte limit for text, bytes and arrays in the results of a call."""
MAX_DEPTH = 64
"""Deepest nesting: above the wire's limit, below pickle's, which recurses."""
MAX_TEXT = 2**16
"""Characters kept of an error's message, from its start, and of its traceback, from its end."""

_MAP_ENTRY_NODES = 4
_FREE_BYTES = 64
_REPR_NODES = 16
_REPR_TEXT = 4096
_INT64 = range(-(2**63), 2**63)
_KEPT = (np.generic, float, complex, bool, type(None), ConformanceWarning)


def encode_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the frame of ``reply``, limited (``limit_reply``) if it would be large."""
    try:
        frame = encode(reply)
        if len(frame) <= SMALL_BYTES:
            return frame
    except RecursionError:  # nested deeper than pickle can follow
        pass
    return encode(limit_reply(reply, max_bytes))


def limit_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> Outcome:
    """Return a copy of ``reply`` with infos within the limits.

    Containers that are too large or too deep, sets, objects and integers beyond int64 become
    text, as on the wire. Of too many keys the first remain. ``LEFT_OUT_KEY`` in the infos says
    that entries are missing. Results of a call are returned whole, or as a Failure.

    Args:
        reply: The environment's reply; unchanged.
        max_bytes: Byte limit for text, bytes and arrays in its infos together.
    """
    if isinstance(reply, Failure):
        return dataclasses.replace(
            reply, message=reply.message[:MAX_TEXT], debug_info=reply.debug_info[-MAX_TEXT:]
        )
    if isinstance(reply, CallReply):
        return _limit_results(reply)
    if not isinstance(reply, (ResetReply, StepReply)):
        return reply
    if isinstance(reply, StepReply) and not (reply.infos or any(reply.final_infos.values())):
        # The usual step. New dicts, since the environment may change its own.
        return StepReply({}, {lane: {} for lane in reply.final_infos}, reply.text_columns)
    trimmer = _InfoLimiter(max_bytes)
    infos = trimmer.trim(reply.infos)
    if isinstance(reply, ResetReply):
        return ResetReply(trimmer.with_notice(infos), reply.text_columns)
    final_infos = {lane: trimmer.trim(own) for lane, own in reply.final_infos.items()}
    infos = trimmer.with_notice(infos)
    return StepReply(infos, final_infos, reply.text_columns)


def _limit_results(reply: CallReply) -> CallReply | Failure:
    # Twice, since one entry gets half of the budget.
    trimmer = _InfoLimiter(2 * MAX_RESULT_BYTES)
    results = trimmer.trim({"": list(reply.results)})[""]
    if trimmer.with_notice({}):
        return Failure(
            FailureKind.BAD_REQUEST,
            f"it was called, but its result is larger than {MAX_RESULT_BYTES >> 20} MiB or "
            f"{MAX_NODES // 2} values; return less, or arrays in place of lists",
        )
    return CallReply(tuple(results))


class _InfoLimiter:
    """Copies the infos of one reply within a budget."""

    def __init__(self, max_bytes: int) -> None:
        self._nodes_left = MAX_NODES
        self._bytes_left = max_bytes
        self._num_left_out = 0
        self._around: set[int] = set()
        """Ids of the containers around the current value; one inside itself becomes text."""
        self._plain: tuple[tuple[Any, Callable[[Any, int], Any]], ...] = (
            ((str, bytes, bytearray), lambda value, _: self._sized(value, len(value))),
            (_KEPT, lambda value, _: value),
            (int, self._integer),
            (dict, self._dict),
            ((list, tuple), self._list),
            (np.ndarray, self._array),
        )

    def trim(self, infos: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a limited copy; each entry gets at most half of the rest, and so do the keys."""
        num_kept = min(len(infos), self._nodes_left // 2 // _MAP_ENTRY_NODES)
        self._num_left_out += len(infos) - num_kept
        self._nodes_left -= num_kept * _MAP_ENTRY_NODES
        own = {}
        for key, value in itertools.islice(infos.items(), num_kept):
            kept_nodes, kept_bytes = self._nodes_left // 2, self._bytes_left // 2
            self._nodes_left -= kept_nodes
            self._bytes_left -= kept_bytes
            own[self._key(key)] = self._value(value, MAX_DEPTH - 1)
            self._nodes_left += kept_nodes
            self._bytes_left += kept_bytes
        return own

    def with_notice(self, infos: dict[Any, Any]) -> dict[Any, Any]:
        """Return ``infos`` with a notice, if entries of this reply were left out."""
        return (
            {**infos, LEFT_OUT_KEY: left_out_notice(self._num_left_out)}
            if self._num_left_out
            else infos
        )

    def _value(self, value: Any, depth: int) -> Any:
        try:
            for kind, trimmed in self._plain:
                if isinstance(value, kind):
                    return trimmed(value, depth)
            return self._text(value)
        except Exception:  # noqa: BLE001  # a user's own class may do anything; the step goes on
            return type_repr(value)

    def _key(self, key: Any) -> Any:
        if isinstance(key, (str, bytes)) and len(key) <= _REPR_TEXT:
            return self._sized(key, len(key))
        is_plain = isinstance(key, _KEPT) or (type(key) is int and key in _INT64)
        return key if is_plain else self._text(key)

    def _sized(self, value: Any, num_bytes: int) -> Any:
        """Return ``value`` if the budget covers it, else a text."""
        # The container pays for small values.
        if num_bytes - _FREE_BYTES > self._bytes_left:
            self._num_left_out += 1
            return type_repr(value)
        self._bytes_left -= max(num_bytes - _FREE_BYTES, 0)
        return value

    def _text(self, value: Any) -> Any:
        is_affordable = not isinstance(value, CONTAINERS) or self._affords(_REPR_NODES)
        text = _representation(value) if is_affordable else type_repr(value)
        text = text if len(text) <= _REPR_TEXT else f"{text[:_REPR_TEXT]}..."
        return self._sized(text, len(text))

    def _integer(self, number: int, _: int) -> Any:
        plain = int(number)
        if plain in _INT64:
            return number
        return str(plain) if self._affords(int_repr_cost(plain)) else type_repr(number)

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        if not self._admits(len(value), len(value) * _MAP_ENTRY_NODES, depth):
            return self._text(value)
        with self._inside(value) as is_new:
            if not is_new:
                return self._text(value)
            return {self._key(key): self._value(part, depth - 1) for key, part in value.items()}

    def _list(self, value: Any, depth: int) -> Any:
        if not self._admits(len(value), len(value), depth):
            return self._text(value)
        with self._inside(value) as is_new:
            if not is_new:
                return self._text(value)
            return [self._value(part, depth - 1) for part in value]

    def _array(self, value: Any, depth: int) -> Any:
        if value.dtype != object:
            return self._sized(value, value.nbytes)
        if not self._admits(value.size, value.size, depth):
            return self._text(value)
        with self._inside(value) as is_new:
            if not is_new:
                return self._text(value)
            array = np.empty(value.shape, object)
            for index, part in np.ndenumerate(value):
                array[index] = self._value(part, depth - 1)
            return array

    @contextlib.contextmanager
    def _inside(self, container: Any) -> Iterator[bool]:
        """Enter a container; yield False where it is inside itself."""
        if id(container) in self._around:
            yield False
            return
        self._around.add(id(container))
        try:
            yield True
        finally:
            self._around.discard(id(container))

    def _admits(self, num_entries: int, num_nodes: int, depth: int) -> bool:
        """Charge the nodes of a container if the budget covers it; else count it as left out."""
        if depth > 0 and self._affords(_MAP_ENTRY_NODES + num_nodes):
            return True
        self._num_left_out += num_entries
        return False

    def _affords(self, num_nodes: int) -> bool:
        if num_nodes > self._nodes_left:
            return False
        self._nodes_left -= num_nodes
        return True


def _representation(value: Any) -> str:
    try:
        return bounded_repr(value) if isinstance(value, CONTAINERS) else repr(value)
    except Exception:  # noqa: BLE001  # a user's own class may do anything; the step goes on
        return type_repr(value)
