"""Conversion of infos, options and metadata to ``rlmesh.spaces.v1.MetaMap`` and back.

Infos may contain any object, and a step must not fail for it: values without a wire form become
text (``encode_meta``). What a client sends arrives as it is, or is refused before it is sent
(``InputEncoder``).
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import DTYPES, MAX_RANK
from rlmesh_ray.spaces.vector_infos import (
    CONTAINERS,
    LEFT_OUT_KEY,
    bounded_repr,
    type_repr,
)
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8

ARRAY_KEY = "rlmesh_ray.ndarray"
"""The only key of a map that stands for an array."""
MAX_BYTES = 2**26
"""Approximate byte limit for the infos of one message; values beyond it become text. The wire has
no references, so lists that contain each other twice would grow without bound."""
MAX_NODES = 2**16
"""Approximate limit for the infos of one message in small values. They are encoded in the serving
loop while every other session waits: this many take tenths of a second."""

MAX_PEER_NODES = 2**14
"""Most values in a client's options or a contract's metadata, which are decoded in the serving
loop, too."""

# protobuf parsers stop at 100 nested messages; a level here takes three.
_MAX_DEPTH = 24
_ENTRY_BYTES = 64
_REPR_BYTES = 4096
"""Cost of the repr of a container, which takes time however short the text is."""
_REPR_NODES = 200
_ARRAY_NODES = 16
_TAGGED_VALUES = 4
"""Values of a map that stands for an array, besides its lengths."""
_MAP_ENTRY_NODES = 4
_CONTAINER_NODES = 4
_OBJECT = "object"
_ARRAY_DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in (*DTYPES, "complex64", "complex128")
}
_INT64 = range(-(2**63), 2**63)


_ARRAYS = (np.ndarray, np.memmap)
"""Other subclasses would lose something, such as a mask."""
TOO_MANY = (
    "one message cannot carry so many values: give fewer, or numeric numpy arrays, which count as "
    "one each"
)
TOO_LARGE = "one message cannot carry so many bytes: give smaller arrays, or shorter text"
TOO_DEEP = f"containers are nested more than {_MAX_DEPTH} deep: give flatter ones"
_INPUT_REMEDY = "give numbers, text, bytes, arrays, and lists and dicts of these"


class MetaBudget:
    """Remaining budget for the maps of one message together, approximately."""

    def __init__(self, size_bytes: int = MAX_BYTES, num_nodes: int = MAX_NODES) -> None:
        self.bytes_left = size_bytes
        self.nodes_left = num_nodes
        self.left_out: Counter[str] = Counter()
        """Entries of the maps that are left out, or whose container is text, by reason."""

    def affords(self, size_bytes: int, num_nodes: int = 0) -> bool:
        """Subtract a cost if the budget covers it; return whether it did."""
        if size_bytes > self.bytes_left or num_nodes > self.nodes_left:
            return False
        self.bytes_left -= max(size_bytes, 0)
        self.nodes_left -= num_nodes
        return True

    def lacking(self, num_nodes: int) -> str:
        return TOO_MANY if num_nodes > self.nodes_left else TOO_LARGE


def encode_meta(
    infos: Mapping[Any, Any], *, tag_arrays: bool, budget: MetaBudget | None = None
) -> pb.MetaMap:
    """Return ``infos`` as a message. Never fails, whatever the values are.

    Values are scalars, text, bytes, None, arrays, and nested mappings and sequences of these.
    Anything else (integers beyond int64, sets, other objects, containers that contain themselves,
    are nested too deep or exceed the budget) becomes text, and so do keys that are no text; of keys
    with equal text the last wins. Keys beyond the budget, which the maps of a message share, are
    left out, with a notice under ``LEFT_OUT_KEY``. Arrays keep dtype and shape for a peer with the
    capability NDARRAY (``tag_arrays``); else they become nested lists.
    """
    message = pb.MetaMap()
    encoder = _MetaEncoder(tag_arrays, budget or MetaBudget())
    encoder.fill_infos(message, infos)
    return message


def as_decoded(infos: Mapping[Any, Any], budget: MetaBudget) -> dict[str, Any]:
    """Return what a peer with the capability NDARRAY decodes of ``infos``."""
    return decode_meta(encode_meta(infos, tag_arrays=True, budget=budget))


class InputEncoder:
    """Encodes what a client sends, so that it arrives equal, with the dtype and shape of arrays.

    Tuples arrive as lists, and NumPy's numbers as Python's. Any other value is refused with
    CodecError, and so are arrays for a peer without the capability NDARRAY (``tag_arrays``).
    ``max_bytes`` is for keys, text, bytes and arrays; ``check_peer_nodes`` counts the values.
    """

    def __init__(
        self, subject: str, *, tag_arrays: bool, max_bytes: int, max_values: int = MAX_PEER_NODES
    ) -> None:
        self._tag_arrays = tag_arrays
        self._budget = MetaBudget(max_bytes, max_values)
        self._excess = (
            f"{subject} take more than {max_values} values or {max_bytes >> 10} KiB; give an array "
            "in place of lists, or the name of something that the environment loads itself"
        )

    def fill_map(
        self, message: pb.MetaMap, values: Mapping[Any, Any], place: str, depth: int = 0
    ) -> None:
        """Add all entries to ``message``; errors name ``place``, where they stand in the input."""
        for key, value in values.items():
            is_text = isinstance(key, str) and key != ARRAY_KEY and as_utf8(key) == key
            if not is_text:
                raise CodecError(f"{place} has the key {key!r:.40}; give other text")
            inner = f"{place}[{key!r:.40}]"
            self._take(inner, 0, len(key.encode()))
            self.fill(message.entries[key], value, inner, depth + 1)

    def fill(self, message: pb.MetaValue, value: Any, place: str, depth: int = 0) -> None:
        """Set ``message`` to a value; arguments and errors as for ``fill_map``."""
        self._take(place, 1)
        if value is None:
            return
        scalar = _scalar(value)
        if scalar is not None:
            self._fill_scalar(message, value, scalar, place)
        elif (
            type(value) in _ARRAYS and value.ndim <= MAX_RANK and _named(value.dtype)[1] is not None
        ):
            self._fill_array(message, value, place)
        elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
            message.map.SetInParent()
            self.fill_map(message.map, value, place, depth)
        elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
            message.list.SetInParent()
            for index, part in enumerate(value):
                self.fill(message.list.items.add(), part, f"{place}[{index}]", depth + 1)
        else:
            name = type(value).__name__
            raise CodecError(
                f"{place}, of type {name}, cannot be sent or is too deep; {_INPUT_REMEDY}"
            )

    def _fill_scalar(
        self, message: pb.MetaValue, value: Any, scalar: tuple[str, Any], place: str
    ) -> None:
        kind, plain = scalar
        if kind == "int" and plain not in _INT64:
            raise CodecError(f"{place} does not fit into 64 bits; give a string")
        if plain != value and plain == plain:  # a lone surrogate, a longdouble; but not NaN
            name = type(value).__name__
            raise CodecError(
                f"{place}, of type {name}, would arrive as {plain!r:.40}; give that, or another "
                "form of it"
            )
        if kind in ("str", "bytes"):
            self._take(place, 0, len(plain.encode() if kind == "str" else plain))
        setattr(message, kind, plain)

    def _fill_array(self, message: pb.MetaValue, array: NDArray[Any], place: str) -> None:
        if not self._tag_arrays:
            raise CodecError(f"{place} is an array, which this endpoint does not know; give a list")
        self._take(place, _TAGGED_VALUES + array.ndim, array.nbytes)
        _fill_tagged(message, array)

    def _take(self, place: str, num_values: int, num_bytes: int = 0) -> None:
        if not self._budget.affords(num_bytes, num_values):
            raise CodecError(f"{place}: {self._excess}")


def decode_meta(message: pb.MetaMap) -> dict[str, Any]:
    """Return entries in alphabetical order, with tagged arrays as arrays; raises CodecError."""
    # The order of a protobuf map is undefined, and differs between processes.
    return {key: decode_value(message.entries[key]) for key in sorted(message.entries)}


def decode_peer_meta(message: pb.MetaMap) -> dict[str, Any]:
    """Decode an untrusted peer's message; raises CodecError for more than ``MAX_PEER_NODES``."""
    check_peer_nodes(message)
    return decode_meta(message)


def check_peer_nodes(message: pb.MetaMap | pb.MetaList) -> None:
    """Raise CodecError for more than ``MAX_PEER_NODES`` values, before they are decoded."""
    num_nodes = 0
    unseen: list[pb.MetaMap | pb.MetaList] = [message]
    while unseen:
        part = unseen.pop()
        values = part.entries.values() if isinstance(part, pb.MetaMap) else part.items
        num_nodes += len(values)
        # Before they are visited, which takes the time.
        if num_nodes > MAX_PEER_NODES:
            raise CodecError(
                f"more than {MAX_PEER_NODES} values: leave some out, or send them as one array "
                "or text"
            )
        unseen += [
            value.map if kind == "map" else value.list
            for value in values
            if (kind := value.WhichOneof("kind")) in ("map", "list")
        ]


class _MetaEncoder:
    """Fills one map and subtracts its cost from the budget."""

    def __init__(self, tag_arrays: bool, budget: MetaBudget) -> None:
        self._tag_arrays = tag_arrays
        self._budget = budget
        self._open: set[int] = set()
        """Ids of the containers around the current value."""

    def fill_infos(self, message: pb.MetaMap, infos: Mapping[Any, Any]) -> None:
        """Add all entries, each with at most half of the rest, so that none displaces the others.

        All keys together take half at most, too.
        """
        budget = self._budget
        num_kept = min(len(infos), budget.nodes_left // 2 // _MAP_ENTRY_NODES)
        former, budget.left_out = budget.left_out, Counter()
        if num_kept < len(infos):
            budget.left_out[TOO_MANY] = len(infos) - num_kept
        budget.affords(0, num_kept * _MAP_ENTRY_NODES)
        for key, value in itertools.islice(infos.items(), num_kept):
            kept_bytes, kept_nodes = budget.bytes_left // 2, budget.nodes_left // 2
            budget.bytes_left -= kept_bytes
            budget.nodes_left -= kept_nodes
            self._fill(self._entry(message, key), value, 0)
            budget.bytes_left += kept_bytes
            budget.nodes_left += kept_nodes
        if budget.left_out:
            num, reasons = budget.left_out.total(), "; ".join(budget.left_out)
            notice = f"{num} entries of the infos were left out or made text: {reasons}"
            message.entries[LEFT_OUT_KEY].str = notice
        budget.left_out += former

    def _fill(self, message: pb.MetaValue, value: Any, depth: int) -> None:
        try:
            if value is not None and not self._fill_scalar(message, value):
                self._fill_other(message, value, depth)
        except Exception:  # noqa: BLE001  # a user's own class may do anything; the step goes on
            message.Clear()
            message.str = type_repr(value)

    def _entry(self, message: pb.MetaMap, key: Any) -> pb.MetaValue:
        text = as_utf8(str.__str__(key)) if isinstance(key, str) else self._text(key)
        is_affordable = self._budget.affords(len(text) - _ENTRY_BYTES)
        entry = message.entries[text if is_affordable else type_repr(key)]
        entry.Clear()
        return entry

    def _fill_scalar(self, message: pb.MetaValue, value: Any) -> bool:
        scalar = _scalar(value)
        if scalar is None:
            return False
        kind, plain = scalar
        if kind == "int" and plain not in _INT64:
            message.str = self._text(plain)
            return True
        if isinstance(plain, (str, bytes)) and not self._budget.affords(len(plain) - _ENTRY_BYTES):
            self._budget.left_out[TOO_LARGE] += 1
            message.str = f"<{len(plain)} of {type(plain).__name__}>"
        else:
            setattr(message, kind, plain)
        return True

    def _fill_other(self, message: pb.MetaValue, value: Any, depth: int) -> None:
        if id(value) in self._open:
            self._fill_text(message, value)
            return
        if depth >= _MAX_DEPTH:
            if isinstance(value, (Mapping, list, tuple, np.ndarray)):
                self._budget.left_out[TOO_DEEP] += max(1, _num_parts(value))
            self._fill_text(message, value)
            return
        self._open.add(id(value))
        try:
            self._fill_container(message, value, depth)
        finally:
            self._open.discard(id(value))

    def _fill_container(self, message: pb.MetaValue, value: Any, depth: int) -> None:
        if isinstance(value, np.ndarray):
            self._fill_array(message, value, depth)
        # A user's own map in the form of an array would decode as one, or not at all.
        elif isinstance(value, Mapping) and not (len(value) == 1 and ARRAY_KEY in value):
            num_nodes = _CONTAINER_NODES + len(value) * _MAP_ENTRY_NODES
            if self._budget.affords(len(value) * _ENTRY_BYTES, num_nodes):
                message.map.SetInParent()
                for key, part in value.items():
                    self._fill(self._entry(message.map, key), part, depth + 1)
            else:
                self._leave_out(message, value, self._budget.lacking(num_nodes))
        elif isinstance(value, (list, tuple)):
            self._fill_list(message, value, depth)
        else:
            self._fill_text(message, value)

    def _fill_list(self, message: pb.MetaValue, items: Sequence[Any], depth: int) -> None:
        num_nodes = _CONTAINER_NODES + len(items)
        if not self._budget.affords(len(items) * _ENTRY_BYTES, num_nodes):
            self._leave_out(message, items, self._budget.lacking(num_nodes))
            return
        message.list.SetInParent()
        for item in items:
            self._fill(message.list.items.add(), item, depth + 1)

    def _fill_array(self, message: pb.MetaValue, array: NDArray[Any], depth: int) -> None:
        _, dtype = _named(array.dtype)
        is_tagged = self._tag_arrays and array.ndim <= MAX_RANK
        item_bytes = array.itemsize if is_tagged and dtype is not None else _ENTRY_BYTES
        # tolist() allocates before the elements are charged; structured ones and texts have parts.
        num_nodes = 0 if is_tagged and dtype is not None else max(array.size, array.nbytes // 64)
        is_small = array.size * item_bytes <= self._budget.bytes_left
        if not (is_small and _ARRAY_NODES + num_nodes <= self._budget.nodes_left):
            self._leave_out(message, array, TOO_MANY if is_small else TOO_LARGE)
        elif is_tagged:
            self._fill_tagged(message, array, dtype, depth)
        else:
            self._fill(message, array.tolist(), depth + (array.ndim == 0))

    def _fill_tagged(
        self, message: pb.MetaValue, array: NDArray[Any], dtype: np.dtype[Any] | None, depth: int
    ) -> None:
        self._budget.affords(0, _ARRAY_NODES)
        if dtype is not None:
            self._budget.affords(array.nbytes)
            _fill_tagged(message, array)
            return
        entries = message.map.entries[ARRAY_KEY].map.entries
        entries["dtype"].str = _OBJECT
        self._fill_list(entries["shape"], array.shape, 0)
        self._fill_list(entries["data"], array.ravel().tolist(), depth + 2)

    def _leave_out(self, message: pb.MetaValue, value: Any, reason: str) -> None:
        self._budget.left_out[reason] += max(1, _num_parts(value))
        self._fill_text(message, value)

    def _fill_text(self, message: pb.MetaValue, value: Any) -> None:
        text = self._text(value)
        is_affordable = self._budget.affords(len(text) - _ENTRY_BYTES)
        message.str = text if is_affordable else type_repr(value)

    def _text(self, value: Any) -> str:
        """Return the text of a value, whose cost in time is charged."""
        cost = (0, 0)
        if isinstance(value, CONTAINERS):
            cost = (_REPR_BYTES, _REPR_NODES)
        elif isinstance(value, int):  # its decimal form takes time
            cost = (0, value.bit_length() // 64)
        return _as_text(value) if self._budget.affords(*cost) else type_repr(value)


def _num_parts(value: Any) -> int:
    return int(value.size) if isinstance(value, np.ndarray) else len(value)


@lru_cache(maxsize=256)
def _named(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any] | None]:
    """Return the name of a dtype, which NumPy takes long to make, and its form on the wire."""
    return dtype.name, _ARRAY_DTYPES.get(dtype.name)


def _fill_tagged(message: pb.MetaValue, array: NDArray[Any]) -> None:
    name, dtype = _named(array.dtype)
    entries = message.map.entries[ARRAY_KEY].map.entries
    entries["dtype"].str = name
    entries["shape"].list.SetInParent()
    for length in array.shape:
        entries["shape"].list.items.add().int = length
    entries["data"].bytes = np.asarray(array, dtype).tobytes()


def _scalar(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, (bool, np.bool_)):
        return "bool", bool(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64):
        return "int", int(value)
    if isinstance(value, (float, np.floating)):
        return "float", float(value)
    if isinstance(value, str):
        return "str", as_utf8(str.__str__(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", bytes(value)
    return None


def _as_text(value: Any) -> str:
    try:
        return as_utf8(bounded_repr(value) if isinstance(value, CONTAINERS) else str(value))
    except Exception:  # noqa: BLE001  # a user's __str__ may do anything; the step goes on
        return type_repr(value)


def decode_value(message: pb.MetaValue) -> Any:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "list":
        return [decode_value(item) for item in message.list.items]
    if kind == "map":
        entries = message.map.entries
        if len(entries) == 1 and ARRAY_KEY in entries:
            return _array(decode_value(entries[ARRAY_KEY]))
        return decode_meta(message.map)
    return getattr(message, kind)


def _array(plain: Any) -> NDArray[Any]:
    if not isinstance(plain, dict) or plain.keys() != {"dtype", "shape", "data"}:
        raise CodecError(f"{ARRAY_KEY}: expected dtype, shape and data")
    name, shape, data = plain["dtype"], _shape(plain["shape"]), plain["data"]
    # The type is checked first: an array would compare element by element.
    if not isinstance(name, str):
        raise CodecError(f"{ARRAY_KEY}: {type(name).__name__} as dtype")
    if name == _OBJECT and isinstance(data, list):
        return _object_array(shape, data)
    if name not in _ARRAY_DTYPES or not isinstance(data, bytes):
        raise CodecError(f"{ARRAY_KEY}: dtype {name[:40]!r} with {type(data).__name__} as data")
    dtype = _ARRAY_DTYPES[name]
    if len(data) != dtype.itemsize * math.prod(shape):
        raise CodecError(f"{ARRAY_KEY}: {len(data)} bytes for shape {shape} of {name}")
    if dtype.kind == "b":
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape).astype(name)  # own, writable memory


def _object_array(shape: tuple[int, ...], items: list[Any]) -> NDArray[Any]:
    if len(items) != math.prod(shape):
        raise CodecError(f"{ARRAY_KEY}: {len(items)} objects for shape {shape}")
    flat = np.empty(len(items), object)
    for index, item in enumerate(items):
        flat[index] = item
    return flat.reshape(shape)


def _shape(plain: Any) -> tuple[int, ...]:
    is_list = isinstance(plain, list) and all(type(length) is int for length in plain)
    if not is_list or len(plain) > MAX_RANK or min(plain, default=0) < 0:
        raise CodecError(f"{ARRAY_KEY}: no shape")
    if math.prod(max(length, 1) for length in plain) > 2**40:
        raise CodecError(f"{ARRAY_KEY}: shape {plain} is not possible")
    return tuple(plain)
