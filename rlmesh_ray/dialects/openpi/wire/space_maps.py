"""Maps of openpi's messages <-> columns of a space: one key for each leaf.

A key is the leaf's path, joined by slashes: the leaf ``image`` of the Dict ``observation`` has the
key ``observation/image``, and so has a key of a Dict that contains the slash itself. A map may have
such keys, or nest maps. The one leaf of a space that is no Dict has the key ``observation`` or
``actions``.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.openpi.wire.msgpack_arrays import pack, unpack
from rlmesh_ray.errors import CodecError, ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import as_array, coerce
from rlmesh_ray.spaces.leaves import Column, Leaf, leaves
from rlmesh_ray.spaces.space_description import space_lines
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import structure_checker
from rlmesh_ray.wire.batch_codec import join_each, split_each
from rlmesh_ray.wire.msgpack_values import holds_numbers

OBSERVATION, ACTIONS = "observation", "actions"
SERVER_TIMING = "server_timing"
_MOST_NAMED = 8
"""Keys that an error names."""


def require_keys(spec: SpaceSpec, root: str) -> dict[str, Leaf]:
    """Return the leaves of a space by their keys.

    Args:
        spec: The space.
        root: Key of a space that is a leaf itself.

    Raises:
        ConfigurationError: Two leaves have the same key.
    """
    found: dict[str, Leaf] = {}
    for leaf in leaves(spec):
        key = "/".join(map(str, leaf.path)) or root
        if found.setdefault(key, leaf) is not leaf:
            raise ConfigurationError(
                f"two parts of the space have the key {key!r} in openpi's messages; rename one"
            )
    return found


def _outer(keys: Iterable[str]) -> frozenset[str]:
    """Return the paths, each with a slash at its end, of the maps that can hold one of ``keys``."""
    return frozenset(
        key[: at + 1] for key in keys for at, character in enumerate(key) if character == "/"
    )


def _found(
    message: object, keys: Collection[str], outer: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a message by their keys, and the first of its other keys.

    Args:
        message: As ``unpack`` returns it: has keys with slashes, nested maps, or both.
        keys: The keys that are looked for.
        outer: ``_outer(keys)``. Other maps are not entered: with a long key above many short ones,
            their paths would take thousands of times the bytes of the message.

    Raises:
        CodecError: It is not a map, or has one of the keys twice.
    """
    if not isinstance(message, dict):
        raise CodecError("the message is no map from names to arrays, numbers and text")
    found: dict[str, Any] = {}
    others: list[str] = []
    for key, value in _walk(message, "", outer):
        if key in found:
            raise CodecError(f"the message has the key {key!r:.80} twice")
        if key in keys:
            found[key] = value
        elif len(others) < _MOST_NAMED:
            others.append(key)
    return found, others


def _walk(
    message: Mapping[str, Any], prefix: str, outer: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for key, value in message.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and f"{path}/" in outer:
            yield from _walk(value, f"{path}/", outer)
        else:
            yield path, value


class ServerCodec:
    """Reads observations of one row and writes results; the server's ``BatchCodec``.

    Args:
        spec: The observation space, or the action space.
    """

    def __init__(self, spec: SpaceSpec) -> None:
        self._spec = spec
        self._observed = require_keys(spec, OBSERVATION)
        self._acted = require_keys(spec, ACTIONS)
        self._outer = _outer(self._observed)

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of an observation.

        Raises:
            CodecError: It lacks a key, has an unknown one, or a value does not fit its leaf.
        """
        found, unknown = _found(unpack(data), self._observed, self._outer)
        if unknown or len(found) < len(self._observed):
            raise CodecError(self._wrong_keys(found, unknown))
        columns = []
        for key, leaf in self._observed.items():
            try:
                columns.append(_column(leaf, found[key]))
            except ConformanceError as error:
                raise CodecError(f"{key} {error.reason}; {self._expected()}") from error
        return columns

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the actions of one step of one row, which ``result`` reads: their bytes alone."""
        return b"".join(np.asarray(column).tobytes() for column in columns)

    def result(self, steps: Sequence[bytes], timing: Mapping[str, object]) -> bytes:
        """Return the message with a chunk of actions.

        Args:
            steps: The actions of each step, from ``encode``; one for a policy without chunks.
            timing: Goes along as ``server_timing``.
        """
        message: dict[str, object] = {}
        begin = 0
        for key, leaf in self._acted.items():
            end = begin + leaf.lane_bytes
            data = b"".join([step[begin:end] for step in steps])
            message[key] = np.frombuffer(data, leaf.dtype).reshape(len(steps), *leaf.shape)
            begin = end
        return pack({**message, SERVER_TIMING: timing})

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Return the columns of several observations; see ``BatchCodec.join``."""
        return join_each(repeat(self, len(batches)), batches, counts)

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Return the packed results of several rows; see ``BatchCodec.split``."""
        return split_each(repeat(self, len(counts)), columns, counts)

    def _wrong_keys(self, found: Mapping[str, Any], unknown: Sequence[str]) -> str:
        missing = [key for key in self._observed if key not in found]
        problems = [
            f"{verb} {', '.join(f'{key!r:.80}' for key in keys[:_MOST_NAMED])}"
            for verb, keys in (("lacks", missing), ("has the unknown", unknown))
            if keys
        ]
        return f"the observation {' and '.join(problems)}; {self._expected()}"

    def _expected(self) -> str:
        lines = (f"{key} ({space_lines(leaf.spec)[0]})" for key, leaf in self._observed.items())
        return f"this policy takes {', '.join(lines)}"


class ClientCodec(NamedTuple):
    """Writes observations and reads results; for a client.

    Args:
        spec: The observation space, or the action space.
    """

    spec: SpaceSpec

    def encode(self, columns: Sequence[Column], num_rows: int) -> list[bytes]:
        """Return one observation message a row; maps nest as the Dicts of the space do."""
        return [pack(self._nested(columns, row)) for row in range(num_rows)]

    def _nested(self, columns: Sequence[Column], row: int) -> dict[str, Any]:
        message: dict[str, Any] = {}
        for leaf, column in zip(leaves(self.spec), columns, strict=True):
            *outer, last = map(str, leaf.path or (OBSERVATION,))
            place = message
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = column[row]
        return message

    def decode(self, message: object) -> list[NDArray[Any]]:
        """Return the chunk of actions in a result, ``(horizon, *leaf.shape)`` for each leaf.

        Args:
            message: The result, as ``unpack`` returns it; other keys are left out.

        Raises:
            CodecError: It is not a map, a key is missing or twice, a value does not fit, or the
                horizons differ.
        """
        keys = require_keys(self.spec, ACTIONS)
        found, others = _found(message, keys, _outer(keys))
        chunks = []
        for key, leaf in keys.items():
            if key not in found:
                has = ", ".join(sorted([*found, *others]))
                raise CodecError(f"the result has no {key!r}, only: {has:.200}")
            try:
                array = as_array(leaf, _numbers(leaf, found[key]))
                if array.ndim == len(leaf.shape):  # a single action, without the axis of the chunk
                    array = array[None]
                chunks.append(_exact(leaf, array, len(array) if array.ndim else 0))
            except ConformanceError as error:
                raise CodecError(f"{key} in the result {error.reason}") from error
        if len({len(chunk) for chunk in chunks}) > 1 or not all(map(len, chunks)):
            raise CodecError(f"the result has {[len(chunk) for chunk in chunks]} actions")
        try:
            structure_checker(self.spec).check(chunks)
        except ConformanceError as error:
            raise CodecError(f"the result is no action: {error.about(ACTIONS)}") from error
        return chunks


@lru_cache(maxsize=256)
def codec(spec: SpaceSpec) -> ServerCodec:
    """Return the server's codec for a space; this module is a ``BatchCodecs``."""
    return ServerCodec(spec)


def require_actions(spec: SpaceSpec) -> None:
    """Refuse an action space that has no form in openpi's messages.

    Raises:
        ConfigurationError: It holds text, or uses a key of the protocol, or a key twice.
    """
    for key, leaf in require_keys(spec, ACTIONS).items():
        if leaf.dtype is None:
            raise ConfigurationError(
                f"the action {key!r} is text, and openpi's actions are arrays; serve this policy "
                "to clients of rlmesh-ray only"
            )
        if key.split("/")[0] == SERVER_TIMING:
            raise ConfigurationError(
                f"an action has the key {SERVER_TIMING!r}, which openpi's results use; rename it"
            )


def message_bytes(spec: SpaceSpec) -> int:
    """Return the size of the largest message that an observation of the space needs.

    Numbers of two bytes and more may come as eight: NumPy's default dtypes.
    """
    return _BESIDES_BYTES + sum(_most_bytes(leaf) for leaf in leaves(spec))


_BESIDES_BYTES = 2**16
_TEXT_BYTES = 4
_KEY_BYTES = 256


def _most_bytes(leaf: Leaf) -> int:
    if leaf.dtype is None:
        return _KEY_BYTES + _TEXT_BYTES * min(getattr(leaf.spec, "max_length", 0), 2**20)
    item = leaf.dtype.itemsize
    return _KEY_BYTES + leaf.lane_bytes // item * (8 if item > 1 else 1)


def _column(leaf: Leaf, value: object) -> Column:
    """Return the column of one row with ``value``. Raises ConformanceError as ``_exact`` does."""
    found = _exact(leaf, value, None)
    return (found,) if isinstance(found, str) else np.asarray(found)[None]


def _exact(leaf: Leaf, value: object, num_rows: int | None) -> Any:
    """Return ``value`` at the leaf's dtype and shape, without a float that became infinite.

    Raises:
        ConformanceError: See ``coerce`` and ``_numbers``; or a number is beyond the leaf's floats.
    """
    found = coerce(leaf, value if leaf.dtype is None else _numbers(leaf, value), num_rows)
    if leaf.dtype is None or leaf.dtype.kind != "f" or np.isfinite(found).all():
        return found
    given = as_array(leaf, value)
    overflown = np.isinf(found) & np.isfinite(given)
    if overflown.any():
        reason = f"has {given[overflown].flat[0]}, which is beyond {leaf.dtype}"
        raise ConformanceError("dtype", leaf.name, reason)
    return found


def _numbers(leaf: Leaf, value: object) -> object:
    """Return a value of a message that is an array, a number, or lists of numbers.

    Raises:
        ConformanceError: It is anything else.
    """
    try:
        if holds_numbers(value):
            return value
    except (ValueError, RecursionError) as error:
        raise ConformanceError("structure", leaf.name, f"is no array: {error}") from error
    reason = "is no array, no number and no list of numbers"
    raise ConformanceError("structure", leaf.name, reason)
