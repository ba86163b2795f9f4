"""Conversion of specs and contracts to ``rlmesh.spaces.v1`` and ``rlmesh.env.v1``, and back.

What a peer sends is validated: a spec that is read makes a valid gymnasium space, and its values
fit into bounded memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, assert_never

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import SPEC
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    DTYPES,
    MAX_COUNTS,
    MAX_DEPTH,
    MAX_LANE_BYTES,
    MAX_PATH_CHARACTERS,
    MAX_RANK,
    PART_CHARACTERS,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    extremes,
    leaves,
)
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import spaces_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import types_pb2
from rlmesh_ray.wire.protobuf import few
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta

_DTYPE_NUMBERS = {name: types_pb2.DType.Value(f"D_TYPE_{name.upper()}") for name in DTYPES}
_INT64_MAX = 2**63 - 1
_REWARD_BYTES = 8


# --- specs to messages -----------------------------------------------------------------


def spec_to_proto(spec: SpaceSpec) -> pb.SpaceSpec:
    message = pb.SpaceSpec()
    fill_spec(message, spec, _fill_leaf)
    return message


def spec_to_json(spec: SpaceSpec) -> str:
    return json_format.MessageToJson(spec_to_proto(spec), indent=None)


def fill_spec(message: Any, spec: SpaceSpec, fill_leaf: Callable[[Any, LeafSpec], None]) -> None:
    """Describe ``spec`` in a ``SpaceSpec``, of this wire or of one with the same nodes."""
    match spec:
        case DictSpec(items):
            message.dict.SetInParent()
            for key, part in items:
                message.dict.keys.append(key)
                fill_spec(message.dict.spaces.add(), part, fill_leaf)
        case TupleSpec(parts):
            message.tuple.SetInParent()
            for part in parts:
                fill_spec(message.tuple.spaces.add(), part, fill_leaf)
        case _:
            fill_leaf(message, spec)


def _fill_leaf(message: pb.SpaceSpec, spec: LeafSpec) -> None:
    match spec:
        case BoxSpec():
            _fill_array(message, spec.shape, spec.dtype)
            _fill_bounds(message.box, spec)
        case DiscreteSpec(n, start, dtype):
            _fill_array(message, (), dtype)
            message.discrete.n, message.discrete.start = n, start
        case MultiBinarySpec(n):
            _fill_array(message, spec.shape, "int8")
            if isinstance(n, int):
                message.multi_binary.size = n
            else:
                message.multi_binary.dims.SetInParent()
                message.multi_binary.dims.data.extend(n)
        case MultiDiscreteSpec():
            _fill_array(message, spec.shape, spec.dtype)
            _fill_multi_discrete(message.multi_discrete, spec)
        case TextSpec(min_length, max_length, charset):
            message.text.min_length, message.text.max_length = min_length, max_length
            message.text.charset = charset
        case _:
            assert_never(spec)


def _fill_array(message: pb.SpaceSpec, shape: tuple[int, ...], dtype: str) -> None:
    message.shape.extend(shape)
    message.dtype = _DTYPE_NUMBERS[dtype]  # type: ignore[assignment]  # enums are ints


def _fill_bounds(message: pb.BoxSpec, spec: BoxSpec) -> None:
    low, high = spec.bounds()
    is_uniform = len(spec.low) == len(spec.high) == low.itemsize
    if low.dtype.kind != "f":
        typed = message.typed_uniform if is_uniform else message.typed_elementwise
        typed.SetInParent()
        typed.low = spec.low if is_uniform else low.tobytes()
        typed.high = spec.high if is_uniform else high.tobytes()
    elif is_uniform and low.flat[0] == -math.inf and high.flat[0] == math.inf:
        message.unbounded = True
    elif is_uniform:
        message.uniform.low, message.uniform.high = float(low.flat[0]), float(high.flat[0])
    else:
        message.elementwise.SetInParent()
        message.elementwise.low.extend(low.ravel().tolist())
        message.elementwise.high.extend(high.ravel().tolist())


def _fill_multi_discrete(message: pb.MultiDiscreteSpec, spec: MultiDiscreteSpec) -> None:
    if len(spec.shape) != 2:
        message.flat.SetInParent()
        message.flat.data.extend(spec.nvec)
        return
    message.shaped.SetInParent()
    for row in np.array(spec.nvec, np.int64).reshape(spec.shape):
        message.shaped.data.add().data.extend(row.tolist())


# --- messages to specs -----------------------------------------------------------------


def spec_from_proto(message: pb.SpaceSpec) -> SpaceSpec:
    """Return the spec that ``message`` describes; raises CodecError."""
    return SpecReader().spec(message)


def spec_from_json(text: str) -> SpaceSpec:
    try:
        message = json_format.Parse(text, pb.SpaceSpec())
    except (json_format.ParseError, RecursionError) as error:
        raise CodecError(f"it is no SpaceSpec: {error}") from error
    return spec_from_proto(message)


class SpecReader:
    """Decodes one spec, within a budget of bytes for one lane's arrays and characters for paths.

    A subclass reads the leaves of a wire with the same nodes; all raise CodecError for what makes
    no valid space.
    """

    dtypes: ClassVar[Mapping[int, str]] = {number: name for name, number in _DTYPE_NUMBERS.items()}
    """The dtypes by their numbers, of which 0 means that the peer has named none."""

    def __init__(self) -> None:
        self._bytes_left = MAX_LANE_BYTES
        self._characters_left = MAX_PATH_CHARACTERS

    def spec(self, message: Any, path: tuple[str, ...] = ()) -> SpaceSpec:
        self._enter(path)
        kind = message.WhichOneof("spec")
        if kind == "dict":
            keys, parts = message.dict.keys, message.dict.spaces
            if len(keys) != len(parts) or len(set(keys)) != len(keys):
                raise CodecError(
                    f"Dict: {len(keys)} keys, {len(parts)} spaces, or a key occurs twice"
                )
            named = zip(keys, parts, strict=True)
            return DictSpec(tuple((key, self.spec(part, (*path, key))) for key, part in named))
        if kind == "tuple":
            items = enumerate(message.tuple.spaces)
            return TupleSpec(tuple(self.spec(part, (*path, str(i))) for i, part in items))
        try:
            return self._leaf(kind, message)
        except CodecError as error:
            raise CodecError(f"space at {'.'.join(path) or 'the root'}: {error}") from error

    def _leaf(self, kind: str | None, message: Any) -> LeafSpec:
        match kind:
            case "box":
                return self._box(message)
            case "discrete":
                own = message.discrete
                return _discrete(own.n, own.start, self._integer_dtype(message))
            case "multi_binary":
                return self._multi_binary(message)
            case "multi_discrete":
                return self._multi_discrete(message)
            case "text":
                own = message.text
                if not 0 <= own.min_length <= own.max_length:
                    raise CodecError(f"Text has lengths {own.min_length} to {own.max_length}")
                charset = "".join(sorted(set(own.charset)))
                return TextSpec(own.min_length, own.max_length, charset)
        raise CodecError("it names no kind of space that is known here")

    def _box(self, message: Any) -> BoxSpec:
        dtype = np.dtype(self._dtype_name(message.dtype))
        shape = tuple(message.shape)
        self._take(shape, dtype.itemsize)  # before its bounds are allocated
        low, high = self.bounds(message.box, math.prod(shape), dtype)
        if np.isnan(low).any() or np.isnan(high).any() or (low > high).any():
            raise CodecError("a bound is NaN, or a lower bound is above its upper bound")
        return BoxSpec(shape, dtype.name, low.tobytes(), high.tobytes())

    def _multi_binary(self, message: Any) -> MultiBinarySpec:
        spec = MultiBinarySpec(self.binary_axes(message))
        if min(spec.shape, default=1) < 1:
            raise CodecError(f"MultiBinary has axes {spec.shape}; they must be positive")
        self._take(spec.shape, 1)
        return spec

    def _multi_discrete(self, message: Any) -> MultiDiscreteSpec:
        dtype = self._integer_dtype(message)
        nvec, shape = self.counts(message)
        self._take(shape, np.dtype(dtype).itemsize)
        if len(nvec) != math.prod(shape):
            raise CodecError(f"MultiDiscrete has {len(nvec)} counts for shape {shape}")
        if min(nvec, default=1) < 1 or max(nvec, default=1) > np.iinfo(dtype).max:
            raise CodecError(f"MultiDiscrete has a count that is not in 1 to the largest {dtype}")
        return MultiDiscreteSpec(nvec, shape, dtype)

    def _dtype_name(self, number: int) -> str:
        if number not in self.dtypes:
            raise CodecError(f"dtype {number} is not supported")
        return self.dtypes[number]

    def _integer_dtype(self, message: Any) -> str:
        dtype = self._dtype_name(message.dtype) if message.dtype else "int64"
        if np.dtype(dtype).kind not in "iu":
            raise CodecError(f"{dtype} is no integer type")
        return dtype

    def _enter(self, path: Sequence[str]) -> None:
        """Subtract a subspace, and the name of its place: it may be long above many short ones."""
        if len(path) > MAX_DEPTH:
            raise CodecError(f"the space is nested more than {MAX_DEPTH} deep")
        self._characters_left -= PART_CHARACTERS + sum(map(len, path))
        if self._characters_left < 0:
            raise CodecError(
                f"the space has more than {MAX_PATH_CHARACTERS // PART_CHARACTERS} parts, or "
                "long keys above many parts"
            )

    def _take(self, shape: Sequence[int], item_bytes: int) -> None:
        """Subtract an array's size, unless NumPy has no such shape."""
        if len(shape) > MAX_RANK or min(shape, default=0) < 0:
            raise CodecError(f"shape {tuple(shape[: MAX_RANK + 1])} is not possible")
        # Empty axes count as one: NumPy multiplies the other axes even of an empty array.
        self._bytes_left -= item_bytes * math.prod(max(length, 1) for length in shape)
        if self._bytes_left < 0:
            raise CodecError(f"shape {shape}: values of more than {MAX_LANE_BYTES} bytes a lane")

    # --- what a subclass may read otherwise --------------------------------------------

    def bounds(
        self, message: Any, size: int, dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ``(low, high)``, flat, little endian: ``size`` elements, or one for all."""
        kind = message.WhichOneof("bounds")
        match kind:
            case None | "unbounded":
                return unbounded(size, dtype)
            case "typed_uniform":
                return typed_bounds(message.typed_uniform, kind, 1, size, dtype)
            case "typed_elementwise":
                return typed_bounds(message.typed_elementwise, kind, size, size, dtype)
        if dtype.kind != "f":
            raise CodecError(f"bounds of {dtype} must be typed, not doubles")
        if kind == "uniform":
            low, high = [message.uniform.low], [message.uniform.high]
            return _doubles(low, 1, dtype)[:size], _doubles(high, 1, dtype)[:size]
        own = message.elementwise
        return _doubles(own.low, size, dtype), _doubles(own.high, size, dtype)

    def binary_axes(self, message: Any) -> int | tuple[int, ...]:
        own = message.multi_binary
        kind = own.WhichOneof("n")
        if kind is None:
            raise CodecError("MultiBinary has neither size nor dims")
        n: int | tuple[int, ...] = own.size if kind == "size" else tuple(own.dims.data)
        shape = n if isinstance(n, tuple) else (n,)
        if message.shape and tuple(message.shape) != shape:
            raise CodecError(
                f"shape {tuple(message.shape[:8])} contradicts the space's own {shape[:8]}"
            )
        return n

    def counts(self, message: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the counts of a MultiDiscrete in C order, and its shape."""
        own = message.multi_discrete
        kind = own.WhichOneof("nvec")
        if kind is None:
            raise CodecError("MultiDiscrete has neither flat nor shaped")
        if kind == "flat":
            nvec = few(own.flat.data, "counts", MAX_COUNTS)
            shape: tuple[int, ...] = (len(nvec),)
        else:
            rows = [row.data for row in few(own.shaped.data, "rows")]
            lengths = {len(row) for row in rows}
            if len(lengths) > 1:
                raise CodecError(f"MultiDiscrete has rows of lengths {sorted(lengths)[:8]}")
            if sum(map(len, rows)) > MAX_COUNTS:
                raise CodecError(f"MultiDiscrete has more than {MAX_COUNTS} counts")
            nvec = tuple(count for row in rows for count in row)
            shape = len(rows), lengths.pop() if lengths else 0
        if message.shape:
            return nvec, tuple(message.shape)
        # An empty shape and an omitted one have the same encoding; a peer that sends the dtype
        # sends the shape, too.
        return nvec, () if shape == (1,) and message.dtype else shape


def _discrete(n: int, start: int, dtype: str) -> DiscreteSpec:
    info = np.iinfo(dtype)
    if not 1 <= n <= info.max or not info.min <= start <= info.max:
        raise CodecError(f"Discrete has n={n} and start={start}, which {dtype} cannot hold")
    if start + n - 1 > min(_INT64_MAX, info.max):
        raise CodecError(f"Discrete with n={n} and start={start} goes beyond {dtype} or int64")
    return DiscreteSpec(n, start, dtype)


def unbounded(size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    low, high = extremes(dtype)
    little = dtype.newbyteorder("<")
    return np.array([low], little)[:size], np.array([high], little)[:size]


def typed_bounds(
    message: Any, kind: str, count: int, size: int, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``(low, high)`` that a peer has sent as ``count`` numbers each, of the space's dtype.

    ``kind`` is their field, for CodecError; ``size`` is how many elements a value has.
    """
    expected = dtype.itemsize * count
    for raw in (message.low, message.high):
        if len(raw) != expected:
            raise CodecError(f"{kind} has {len(raw)} bytes, expected {expected}")
        if dtype.kind == "b" and raw.strip(b"\x00\x01"):
            raise CodecError("a bool bound is neither 0 nor 1")
    little = dtype.newbyteorder("<")
    low, high = np.frombuffer(message.low, little), np.frombuffer(message.high, little)
    return low[:size], high[:size]


def _doubles(bounds: Iterable[float], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    doubles = np.fromiter(bounds, np.float64)
    if doubles.size != size:
        raise CodecError(f"{doubles.size} bounds for {size} elements")
    # A double beyond the dtype becomes infinite: no bound. NaN is refused later.
    with np.errstate(over="ignore", invalid="ignore"):
        return doubles.astype(dtype.newbyteorder("<"))


# --- contracts -------------------------------------------------------------------------

_MODES = {
    contract_pb2.AutoresetMode.Value(f"AUTORESET_MODE_{mode.name}"): mode for mode in AutoresetMode
} | {contract_pb2.AUTORESET_MODE_UNSPECIFIED: AutoresetMode.DISABLED}


def contract_to_proto(contract: EnvContract) -> contract_pb2.EnvContract:
    """Return the message of ``contract``; metadata without a wire form become text."""
    metadata = dict(contract.metadata)
    if contract.spec:
        metadata[SPEC] = dict(contract.spec)
    return contract_pb2.EnvContract(
        id=contract.id,
        action_space=spec_to_proto(contract.action_space),
        observation_space=spec_to_proto(contract.observation_space),
        metadata=encode_meta(metadata, tag_arrays=False),
        render_mode=contract.render_mode,
        num_envs=contract.num_envs,
        autoreset_mode=f"AUTORESET_MODE_{contract.autoreset_mode.name}",
    )


def contract_from_proto(message: contract_pb2.EnvContract) -> EnvContract:
    """Return the contract in ``message``; raises CodecError, also for too many lanes."""
    if message.autoreset_mode not in _MODES:
        raise CodecError(f"autoreset mode {message.autoreset_mode} is not known")
    metadata = decode_peer_meta(message.metadata)
    spec = metadata.pop(SPEC, {})
    observation_space, action_space = read_spaces(message, message.num_envs, SpecReader)
    return EnvContract(
        id=message.id,
        observation_space=observation_space,
        action_space=action_space,
        num_envs=message.num_envs,
        autoreset_mode=_MODES[message.autoreset_mode],
        render_mode=message.render_mode,
        metadata=metadata,
        spec=spec if isinstance(spec, dict) else {},
    )


def read_spaces(
    message: Any, num_envs: int, reader: type[SpecReader]
) -> tuple[SpaceSpec, SpaceSpec]:
    """Return the observation space and the action space in a message; raises CodecError."""
    specs = []
    for name, part in (
        ("observation space", message.observation_space),
        ("action space", message.action_space),
    ):
        try:
            specs.append(reader().spec(part))
        except CodecError as error:
            raise CodecError(f"{name}: {error}") from error
    for spec in specs:
        lane_bytes = sum(leaf.lane_bytes for leaf in leaves(spec)) + _REWARD_BYTES
        if num_envs * lane_bytes > MAX_MESSAGE_BYTES:
            raise CodecError(
                f"{num_envs} lanes of {lane_bytes} bytes do not fit into a message of at "
                f"most {MAX_MESSAGE_BYTES} bytes; serve fewer lanes"
            )
    return specs[0], specs[1]
