"""What openpi's clients and servers send: messages in msgpack, their keys, and the metadata.

Arrays and numbers of NumPy are maps with marked keys. What is read comes from the network: only
dtypes of a list are accepted, and the number, length and depth of lists and maps is limited, so
that a message takes a small multiple of its own size.

A message has one key for each leaf of a space: the leaf's path, joined by slashes. The leaf
``image`` of the Dict ``observation`` has the key ``observation/image``, and so has a key of a Dict
that contains the slash itself. A map may have such keys, or nest maps. The one leaf of a space that
is no Dict has the key ``observation`` or ``actions``.

The metadata, which a server sends first, says what the policy takes and gives, in plain values.
Servers of other projects put what they like there, so everything is optional for a client.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError, ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import as_array, coerce
from rlmesh_ray.spaces.contract import EnvContract, space_lines
from rlmesh_ray.spaces.spec import DTYPES, Column, Leaf, SpaceSpec, leaves
from rlmesh_ray.spaces.validation import structure_checker
from rlmesh_ray.wire import msgpack_values
from rlmesh_ray.wire.msgpack_values import holds_numbers
from rlmesh_ray.wire.policy_v1 import PolicyFacts, facts_in
from rlmesh_ray.wire.rlmesh_v1.values import BatchCodec

# --- msgpack with arrays -----------------------------------------------------------------

_DTYPES = {np.dtype(name).newbyteorder("<").str: np.dtype(name) for name in DTYPES}
"""The dtypes that are accepted, by NumPy's text, such as ``"<f4"``."""
_ARRAY, _NUMBER = "__ndarray__", "__npgeneric__"

MAX_ITEMS = 4096
"""Most items of a list or a map."""
MAX_VALUES = 2**16
"""Most values in a message, lists, maps and what they hold; an array's numbers do not count."""
MAX_DEPTH = 32
"""Deepest nesting of lists and maps."""


def pack(value: object) -> bytes:
    """Return the bytes of a value: maps, sequences, text, bytes, numbers and NumPy arrays.

    Raises:
        CodecError: A part of it has no form in the protocol.
        MissingPackageError: The package msgpack is not installed.
    """
    try:
        return msgpack_values.pack(value, _marked)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"this has no form in openpi's protocol: {error}") from error


def unpack(data: bytes) -> Any:
    """Return the value in a message; arrays are read-only views of it.

    Raises:
        CodecError: It is no message of the protocol, or exceeds a limit.
        MissingPackageError: The package msgpack is not installed.
    """
    value = msgpack_values.unpack(
        data, max_items=MAX_ITEMS, max_values=MAX_VALUES, read_map=_read_map
    )
    _check_depth(value, 0)
    return value


def _read_map(found: dict[Any, Any]) -> Any:
    by_name: dict[str, Any] = {}
    for key, value in found.items():
        name = key.decode("utf-8") if isinstance(key, bytes) else key
        if not isinstance(name, str) or name in by_name:
            raise CodecError(f"the key {str(key)[:40]!r} of a map is no text, or comes twice")
        by_name[name] = value
    if _ARRAY not in by_name and _NUMBER not in by_name:
        return by_name
    text, data = by_name.get("dtype"), by_name.get("data")
    dtype = _DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise CodecError(
            f"an array has the dtype {str(text)[:40]!r}; accepted are {', '.join(_DTYPES)}"
        )
    if _ARRAY in by_name:
        return msgpack_values.array_of(dtype, by_name.get("shape"), data)
    if not isinstance(data, bool | int | float):
        raise CodecError("the data of a NumPy number is no number")
    return data


def _marked(value: object) -> object:
    """Return the marked map for an array or a NumPy number: ``default`` of msgpack's packer."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.name in DTYPES:
        if isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"), copy=False)
            return {
                b"__ndarray__": True,
                b"data": little.tobytes(),
                b"dtype": little.dtype.str,
                b"shape": little.shape,
            }
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')}".rstrip())


def _check_depth(value: object, depth: int) -> None:
    if not isinstance(value, dict | list):
        return
    if depth >= MAX_DEPTH:
        raise CodecError(f"the message is nested more than {MAX_DEPTH} deep")
    for part in value.values() if isinstance(value, dict) else value:
        _check_depth(part, depth + 1)


# --- maps of a space ---------------------------------------------------------------------

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


class ServerCodec(BatchCodec):
    """Reads observations of one row, and writes results.

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


def encode_observations(spec: SpaceSpec, columns: Sequence[Column], num_rows: int) -> list[bytes]:
    """Return the messages of a client's observations, one for each row."""
    return [pack(_nested(spec, columns, row)) for row in range(num_rows)]


def _nested(spec: SpaceSpec, columns: Sequence[Column], row: int) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for leaf, column in zip(leaves(spec), columns, strict=True):
        *outer, last = map(str, leaf.path or (OBSERVATION,))
        place = message
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = column[row]
    return message


def decode_actions(spec: SpaceSpec, message: object) -> list[NDArray[Any]]:
    """Return the chunk of actions in a result, ``(horizon, *leaf.shape)`` for each leaf.

    Args:
        spec: The action space.
        message: The result, as ``unpack`` returns it; other keys are left out.

    Raises:
        CodecError: It is not a map, a key is missing or twice, a value does not fit, or the
            horizons differ.
    """
    keys = require_keys(spec, ACTIONS)
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
        structure_checker(spec).check(chunks)
    except ConformanceError as error:
        raise CodecError(f"the result is no action: {error.about(ACTIONS)}") from error
    return chunks


@lru_cache(maxsize=256)
def codec(spec: SpaceSpec) -> ServerCodec:
    """Return the server's codec for a space."""
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
        raise ConformanceError("structure", leaf.name, f"is not an array: {error}") from error
    reason = "is no array, no number and no list of numbers"
    raise ConformanceError("structure", leaf.name, reason)


# --- metadata ----------------------------------------------------------------------------

FULL = "full:"
"""Begins the HTTP response of a server of this package that has no place for a connection."""

_SPACES = (("observation_space", OBSERVATION), ("action_space", ACTIONS))
_FACTS = ("kind", "algorithm", "version")
_HORIZON = "action_horizon"


def metadata(facts: PolicyFacts, contract: EnvContract) -> dict[str, Any]:
    """Return the metadata of a served policy.

    Args:
        facts: Its description.
        contract: Has the spaces of its openpi clients.
    """
    return {
        _HORIZON: facts.horizon,
        "policy": {name: getattr(facts, name) for name in _FACTS},
        **{name: _plain(getattr(contract, name), root) for name, root in _SPACES},
    }


def _plain(spec: SpaceSpec, root: str) -> dict[str, dict[str, Any]]:
    return {
        key: {
            "space": space_lines(leaf.spec)[0],
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype or "text"),
        }
        for key, leaf in require_keys(spec, root).items()
    }


def horizon_of(found: Mapping[str, Any]) -> int:
    """Return the number of actions in a chunk; 0: the metadata does not say."""
    horizon = found.get(_HORIZON)
    return horizon if type(horizon) is int and horizon > 0 else 0  # True is an int


def facts_of(found: Mapping[str, Any]) -> PolicyFacts:
    policy = found.get("policy")
    facts = {name: policy.get(name) for name in _FACTS} if isinstance(policy, dict) else {}
    spaces = {name: _lines(found.get(name)) for name, _ in _SPACES}
    return facts_in({**facts, **spaces, "horizon": horizon_of(found) or 1})


def _lines(space: object) -> list[str]:
    leaves = space.items() if isinstance(space, dict) else ()
    return [
        f"{key}: {leaf['space']}"
        for key, leaf in leaves
        if isinstance(leaf, dict) and "space" in leaf
    ]


def difference(found: Mapping[str, Any], contract: EnvContract) -> str:
    """Return why an environment does not fit a server's metadata; empty: nothing speaks against it.

    Only spaces in the form of ``metadata`` are compared, and of these the keys and the shapes.
    """
    for name, root in _SPACES:
        offered = found.get(name)
        if not isinstance(offered, dict) or not all(isinstance(v, dict) for v in offered.values()):
            continue
        own = require_keys(getattr(contract, name), root)
        if own.keys() != offered.keys():
            return f"its {name} has the keys {sorted(offered)}, the environment's {sorted(own)}"
        for key, leaf in own.items():
            shape = offered[key].get("shape")
            if isinstance(shape, list) and shape != list(leaf.shape):
                return f"{key} of its {name} has shape {shape}, the environment's {leaf.shape}"
    return ""
