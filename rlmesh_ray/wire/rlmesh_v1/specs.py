"""Conversion between specs and ``rlmesh.spaces.v1.SpaceSpec``.

Specs from a peer are validated: the result of ``spec_from_proto`` makes a valid gymnasium space,
and its values fit into bounded memory.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, assert_never

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import (
    DTYPES,
    MAX_COUNTS,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)
from rlmesh_ray.wire import validation
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import spaces_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import types_pb2

_DTYPE_NUMBERS = {name: types_pb2.DType.Value(f"D_TYPE_{name.upper()}") for name in DTYPES}
_DTYPE_NAMES = {number: name for name, number in _DTYPE_NUMBERS.items()}


def spec_to_proto(spec: SpaceSpec) -> pb.SpaceSpec:
    message = pb.SpaceSpec()
    fill_spec(message, spec, _fill_leaf)
    return message


def spec_from_proto(message: pb.SpaceSpec) -> SpaceSpec:
    """Return the spec that ``message`` describes.

    Raises:
        CodecError: It is no valid space, or its values are larger than ``MAX_LANE_BYTES``.
    """
    return SpecReader().spec(message, ())


def spec_to_json(spec: SpaceSpec) -> str:
    """Return the message that describes ``spec``, as JSON."""
    return json_format.MessageToJson(spec_to_proto(spec), indent=None)


def spec_from_json(text: str) -> SpaceSpec:
    """Return the spec that a message in JSON describes.

    Raises:
        CodecError: See ``spec_from_proto``; or it is no such message.
    """
    try:
        message = json_format.Parse(text, pb.SpaceSpec())
    except (json_format.ParseError, RecursionError) as error:
        raise CodecError(f"it is no SpaceSpec: {error}") from error
    return spec_from_proto(message)


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


class SpecReader:
    """Decodes one spec and counts the size of its values.

    A subclass decodes the leaves of a wire with the same nodes.
    """

    def __init__(self) -> None:
        self._budget = validation.LaneBudget()

    def spec(self, message: Any, path: tuple[str, ...]) -> SpaceSpec:
        self._budget.enter(path)
        kind = message.WhichOneof("spec")
        if kind == "dict":
            parts = validation.named_parts(message.dict.keys, message.dict.spaces)
            return DictSpec(tuple((key, self.spec(part, (*path, key))) for key, part in parts))
        if kind == "tuple":
            return TupleSpec(
                tuple(
                    self.spec(part, (*path, str(i))) for i, part in enumerate(message.tuple.spaces)
                )
            )
        try:
            return self.leaf(kind, message)
        except CodecError as error:
            raise CodecError(f"space at {'.'.join(path) or 'the root'}: {error}") from error

    def leaf(self, kind: str | None, message: Any) -> LeafSpec:
        match kind:
            case "box":
                return self._box(message)
            case "discrete":
                own = message.discrete
                return validation.discrete(own.n, own.start, _integer_dtype(message))
            case "multi_binary":
                return self._multi_binary(message)
            case "multi_discrete":
                return self._multi_discrete(message)
            case "text":
                own_text = message.text
                return validation.text(own_text.min_length, own_text.max_length, own_text.charset)
        raise CodecError("it names no kind of space that is known here")

    def _box(self, message: pb.SpaceSpec) -> BoxSpec:
        dtype = np.dtype(_dtype_name(message, default=None))
        shape = tuple(message.shape)
        self._budget.take(shape, dtype.itemsize)
        return validation.box(shape, dtype, *_bounds(message.box, math.prod(shape), dtype))

    def _multi_binary(self, message: pb.SpaceSpec) -> MultiBinarySpec:
        kind = message.multi_binary.WhichOneof("n")
        if kind is None:
            raise CodecError("MultiBinary has neither size nor dims")
        dims = message.multi_binary.dims.data
        n = message.multi_binary.size if kind == "size" else tuple(dims)
        spec = validation.multi_binary(n, self._budget)
        if message.shape and tuple(message.shape) != spec.shape:
            raise CodecError(
                f"shape {tuple(message.shape[:8])} contradicts the space's own {spec.shape}"
            )
        return spec

    def _multi_discrete(self, message: pb.SpaceSpec) -> MultiDiscreteSpec:
        dtype = _integer_dtype(message)
        nvec, own_shape = _nvec(message.multi_discrete)
        shape = _multi_discrete_shape(message, own_shape)
        return validation.multi_discrete(nvec, shape, dtype, self._budget)


def _dtype_name(message: pb.SpaceSpec, default: str | None) -> str:
    if message.dtype == types_pb2.D_TYPE_UNSPECIFIED and default is not None:
        return default
    if message.dtype not in _DTYPE_NAMES:
        raise CodecError(f"dtype {message.dtype} is not supported")
    return _DTYPE_NAMES[message.dtype]


def _integer_dtype(message: pb.SpaceSpec) -> str:
    return validation.require_integer(_dtype_name(message, default="int64"))


def _bounds(
    message: pb.BoxSpec, size: int, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``(low, high)``, flat, little endian: ``size`` elements, or one for all."""
    kind = message.WhichOneof("bounds")
    if kind is None or kind == "unbounded":
        return validation.unbounded(size, dtype)
    bounds = getattr(message, kind)
    if kind.startswith("typed"):
        count = 1 if kind == "typed_uniform" else size
        low = validation.typed_bounds(bounds.low, kind, count, dtype)
        return low[:size], validation.typed_bounds(bounds.high, kind, count, dtype)[:size]
    if dtype.kind != "f":
        raise CodecError(f"bounds of {dtype} must be typed, not doubles")
    if kind == "uniform":
        return _full(size, bounds.low, dtype), _full(size, bounds.high, dtype)
    return _doubles(bounds.low, size, dtype), _doubles(bounds.high, size, dtype)


def _full(size: int, bound: float, dtype: np.dtype[Any]) -> NDArray[Any]:
    return _cast(np.array([bound]), dtype)[:size]


def _doubles(bounds: Iterable[float], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    doubles = np.fromiter(bounds, np.float64)
    if doubles.size != size:
        raise CodecError(f"{doubles.size} bounds for {size} elements")
    return _cast(doubles, dtype)


def _cast(bounds: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    # A double beyond the dtype becomes infinite: no bound. NaN is refused later.
    with np.errstate(over="ignore", invalid="ignore"):
        return bounds.astype(dtype.newbyteorder("<"))


def _nvec(message: pb.MultiDiscreteSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kind = message.WhichOneof("nvec")
    if kind is None:
        raise CodecError("MultiDiscrete has neither flat nor shaped")
    if kind == "flat":
        counts = validation.few(message.flat.data, "counts", MAX_COUNTS)
        return counts, (len(counts),)
    rows = [row.data for row in validation.few(message.shaped.data, "rows")]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise CodecError(f"MultiDiscrete has rows of lengths {sorted(lengths)[:8]}")
    if sum(map(len, rows)) > MAX_COUNTS:
        raise CodecError(f"MultiDiscrete has more than {MAX_COUNTS} counts")
    counts = tuple(count for row in rows for count in row)
    return counts, (len(rows), lengths.pop() if lengths else 0)


def _multi_discrete_shape(message: pb.SpaceSpec, own_shape: tuple[int, ...]) -> tuple[int, ...]:
    if message.shape:
        return tuple(message.shape)
    # An empty shape and an omitted one have the same encoding; a peer that sends the dtype sends
    # the shape, too.
    is_scalar = own_shape == (1,) and message.dtype != types_pb2.D_TYPE_UNSPECIFIED
    return () if is_scalar else own_shape
