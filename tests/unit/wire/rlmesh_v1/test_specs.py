import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError, UnsupportedSpaceError
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.spec import (
    MAX_LANE_BYTES,
    BoxSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    TextSpec,
    leaves,
)
from rlmesh_ray.testing.strategies import damaged, gymnasium_spaces
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import spaces_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import types_pb2
from rlmesh_ray.wire.protobuf import parse
from rlmesh_ray.wire.rlmesh_v1.specs import spec_from_proto, spec_to_proto

BOOL: Any = np.bool_  # gymnasium takes it; its annotations do not
Fill = Callable[[pb.SpaceSpec], object]


@given(space=gymnasium_spaces())
def test_a_space_comes_back_equal_from_the_wire(space: Space) -> None:
    spec = from_gymnasium(space)

    data = spec_to_proto(spec).SerializeToString()
    back = spec_from_proto(pb.SpaceSpec.FromString(data))

    assert back == spec
    assert to_gymnasium(back) == space


@given(data=st.data())
def test_a_damaged_description_is_refused_or_gives_a_possible_space(data: st.DataObject) -> None:
    frame = spec_to_proto(from_gymnasium(data.draw(gymnasium_spaces()))).SerializeToString()

    try:
        spec = spec_from_proto(parse(pb.SpaceSpec, data.draw(damaged(frame))))
    except CodecError:
        return

    to_gymnasium(spec)
    assert sum(leaf.lane_bytes for leaf in leaves(spec)) <= MAX_LANE_BYTES


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "unbounded"),
        (spaces.Box(-1, np.inf, (2,)), "uniform"),
        (spaces.Box(np.array([0.0, -0.0]), np.ones(2), dtype=np.float64), "elementwise"),
        (spaces.Box(0, 255, (2,), np.uint8), "typed_uniform"),
        (
            spaces.Box(np.array([0, 1]), np.array([5, 2**63 - 1]), dtype=np.int64),
            "typed_elementwise",
        ),
        (
            spaces.Box(0, 1, (2,), BOOL),
            "typed_uniform",
        ),
    ],
)
def test_bounds_take_the_form_that_holds_them_exactly(space: Space, kind: str) -> None:
    assert spec_to_proto(from_gymnasium(space)).box.WhichOneof("bounds") == kind


def test_every_leaf_has_shape_and_dtype_as_gymnasium_has_them() -> None:
    assert _shape_and_dtype(spaces.Box(0, 1, (2, 3))) == ([2, 3], types_pb2.D_TYPE_FLOAT32)
    assert _shape_and_dtype(spaces.Discrete(3)) == ([], types_pb2.D_TYPE_INT64)
    assert _shape_and_dtype(spaces.MultiBinary(4)) == ([4], types_pb2.D_TYPE_INT8)
    assert _shape_and_dtype(spaces.MultiDiscrete([3, 4])) == ([2], types_pb2.D_TYPE_INT64)


def _shape_and_dtype(space: Space) -> tuple[list[int], int]:
    message = spec_to_proto(from_gymnasium(space))
    return list(message.shape), message.dtype


@pytest.mark.parametrize(
    ("shape", "kind"), [((3,), "flat"), ((2, 2), "shaped"), ((2, 1, 2), "flat"), ((), "flat")]
)
def test_counts_are_flat_but_for_two_axes(shape: tuple[int, ...], kind: str) -> None:
    spec = from_gymnasium(spaces.MultiDiscrete(np.full(shape, 3)))

    assert spec_to_proto(spec).multi_discrete.WhichOneof("nvec") == kind


# --- what other implementations may leave out ------------------------------------------


def read(fill: Fill, **fields: int) -> object:
    message = pb.SpaceSpec()
    for name, value in fields.items():
        setattr(message, name, value)
    fill(message)
    return spec_from_proto(message)


def test_a_box_without_bounds_is_unbounded() -> None:
    def fill(message: pb.SpaceSpec) -> None:
        message.shape.append(1)
        message.box.SetInParent()

    real, integer = (
        read(fill, dtype=types_pb2.D_TYPE_FLOAT32),
        read(fill, dtype=types_pb2.D_TYPE_INT8),
    )
    flag = read(fill, dtype=types_pb2.D_TYPE_BOOL)

    low, high = np.array([-np.inf, np.inf], "<f4")
    assert real == BoxSpec((1,), "float32", low.tobytes(), high.tobytes())
    assert integer == BoxSpec((1,), "int8", b"\x80", b"\x7f")
    assert flag == BoxSpec((1,), "bool", b"\x00", b"\x01")


def test_a_double_beyond_a_narrow_float_is_an_infinite_bound() -> None:
    def uniform(message: pb.SpaceSpec) -> None:
        message.box.uniform.low, message.box.uniform.high = 0.0, 1e300

    def elementwise(message: pb.SpaceSpec) -> None:
        message.box.elementwise.low.append(0.0)
        message.box.elementwise.high.append(1e300)

    expected = BoxSpec((), "float32", bytes(4), np.float32(np.inf).tobytes())
    assert read(uniform, dtype=types_pb2.D_TYPE_FLOAT32) == expected
    assert read(elementwise, dtype=types_pb2.D_TYPE_FLOAT32) == expected


def test_a_discrete_without_dtype_is_int64() -> None:
    assert read(lambda m: setattr(m.discrete, "n", 3)) == DiscreteSpec(3, 0, "int64")


def test_counts_without_shape_have_one_axis() -> None:
    assert read(lambda m: m.multi_discrete.flat.data.append(5)) == MultiDiscreteSpec((5,), (1,))
    assert read(lambda m: m.multi_discrete.flat.data.extend([5, 6])) == MultiDiscreteSpec(
        (5, 6), (2,)
    )


def test_the_dtype_of_a_multi_binary_does_not_matter() -> None:
    spec = read(lambda m: setattr(m.multi_binary, "size", 3), dtype=types_pb2.D_TYPE_UINT8)

    assert spec == MultiBinarySpec(3)


def test_a_charset_is_read_in_order_and_once() -> None:
    def fill(message: pb.SpaceSpec) -> None:
        message.text.max_length = 4
        message.text.charset = "baab"

    assert read(fill) == TextSpec(0, 4, "ab")


def test_a_bound_that_is_the_same_everywhere_is_kept_once() -> None:
    # Else a frame of a few bytes would become hundreds of megabytes that routes keep.
    spec = spec_from_proto(box(shape=(2**12, 2**13)))

    assert isinstance(spec, BoxSpec)
    assert len(spec.low) == len(spec.high) == 4
    low, high = spec.bounds()
    assert low.shape == high.shape == (2**12, 2**13)
    assert low[0, 0] == -np.inf
    assert high[-1, -1] == np.inf
    assert len(spec_to_proto(spec).SerializeToString()) < 100


def test_bounds_of_which_one_is_the_same_everywhere_come_back_equal() -> None:
    low, high = np.zeros(3), np.arange(3.0)
    for dtype in (np.float64, np.int16):
        space = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
        assert to_gymnasium(spec_from_proto(spec_to_proto(from_gymnasium(space)))) == space


# --- nonsense --------------------------------------------------------------------------


def box(dtype: int = types_pb2.D_TYPE_FLOAT32, shape: tuple[int, ...] = (2,)) -> pb.SpaceSpec:
    message = pb.SpaceSpec(dtype=dtype, shape=shape)  # type: ignore[arg-type]  # enums are ints
    message.box.unbounded = True
    return message


def uniform(low: float, high: float) -> pb.SpaceSpec:
    message = box()
    message.box.uniform.low, message.box.uniform.high = low, high
    return message


def typed(kind: str, low: bytes, high: bytes, dtype: int) -> pb.SpaceSpec:
    message = box(dtype)
    bounds = getattr(message.box, kind)
    bounds.SetInParent()
    bounds.low, bounds.high = low, high
    return message


SIGNALING = struct.unpack("<d", b"\1\0\0\0\0\0\xf0\x7f")[0]
"""A NaN that makes NumPy warn when it is cast."""


def elementwise(count: int, low: float = 0.0) -> pb.SpaceSpec:
    message = box()
    message.box.elementwise.low.extend([low] * count)
    message.box.elementwise.high.extend([1.0] * count)
    return message


def doubles_for_integers() -> pb.SpaceSpec:
    message = uniform(0.0, 1.0)
    message.dtype = types_pb2.D_TYPE_INT32
    return message


def discrete(n: int, start: int = 0, dtype: int = types_pb2.D_TYPE_INT64) -> pb.SpaceSpec:
    return pb.SpaceSpec(dtype=dtype, discrete=pb.DiscreteSpec(n=n, start=start))  # type: ignore[arg-type]


def multi_binary(*dims: int, shape: tuple[int, ...] = ()) -> pb.SpaceSpec:
    own = pb.MultiBinarySpec(dims=types_pb2.VectorInt(data=dims))
    return pb.SpaceSpec(multi_binary=own, shape=shape)


def flat(*counts: int, shape: tuple[int, ...] = (), dtype: int = 0) -> pb.SpaceSpec:
    own = pb.MultiDiscreteSpec(flat=types_pb2.VectorInt(data=counts))
    return pb.SpaceSpec(multi_discrete=own, shape=shape, dtype=dtype)  # type: ignore[arg-type]


def rows(*counts: tuple[int, ...]) -> pb.SpaceSpec:
    matrix = types_pb2.MatrixInt(data=[types_pb2.VectorInt(data=row) for row in counts])
    return pb.SpaceSpec(multi_discrete=pb.MultiDiscreteSpec(shaped=matrix))


def text(min_length: int, max_length: int) -> pb.SpaceSpec:
    return pb.SpaceSpec(text=pb.TextSpec(min_length=min_length, max_length=max_length))


def mapping(*keys: str, parts: int) -> pb.SpaceSpec:
    return pb.SpaceSpec(dict=pb.DictSpec(keys=keys, spaces=[discrete(2)] * parts))


def nested(depth: int) -> pb.SpaceSpec:
    message = discrete(2)
    for _ in range(depth):
        message = pb.SpaceSpec(tuple=pb.TupleSpec(spaces=[message]))
    return message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.SpaceSpec(), "names no kind of space"),
        (box(types_pb2.D_TYPE_UNSPECIFIED), "dtype 0 is not supported"),
        (box(types_pb2.D_TYPE_BFLOAT16), "dtype 13 is not supported"),
        (box(99), "dtype 99 is not supported"),
        (box(shape=(-1,)), "not possible"),
        (box(shape=(1,) * 32), "not possible"),
        (box(shape=(2**25 + 1,)), "more than 134217728 bytes"),
        (box(shape=(2**62, 2**62, 2**62)), "more than 134217728 bytes"),
        (box(shape=(0, 2**62)), "more than 134217728 bytes"),
        (uniform(1.0, 0.0), "lower bound is above"),
        (uniform(SIGNALING, 0.0), "NaN"),
        (elementwise(2, SIGNALING), "NaN"),
        (uniform(np.nan, 0.0), "NaN"),
        (uniform(0.0, np.nan), "NaN"),
        (elementwise(1), "1 bounds for 2 elements"),
        (elementwise(3), "3 bounds for 2 elements"),
        (doubles_for_integers(), "must be typed"),
        (
            typed("typed_uniform", b"\0", b"\0" * 4, types_pb2.D_TYPE_INT32),
            "has 1 bytes, expected 4",
        ),
        (
            typed("typed_elementwise", b"\0\0", b"\1", types_pb2.D_TYPE_UINT8),
            "has 1 bytes, expected 2",
        ),
        (typed("typed_uniform", b"\0", b"\2", types_pb2.D_TYPE_BOOL), "neither 0 nor 1"),
        (discrete(0), "n=0"),
        (discrete(-1), "n=-1"),
        (discrete(300, dtype=types_pb2.D_TYPE_UINT8), "which uint8 cannot hold"),
        (discrete(2, start=-1, dtype=types_pb2.D_TYPE_UINT8), "which uint8 cannot hold"),
        (discrete(2**63 - 1, start=2), "beyond int64 or int64"),
        (discrete(100, start=100, dtype=types_pb2.D_TYPE_INT8), "beyond int8"),
        (discrete(2, dtype=types_pb2.D_TYPE_FLOAT32), "float32 is no integer type"),
        (pb.SpaceSpec(multi_binary=pb.MultiBinarySpec()), "neither size nor dims"),
        (pb.SpaceSpec(multi_binary=pb.MultiBinarySpec(size=0)), "must be positive"),
        (multi_binary(2, 0), "must be positive"),
        (multi_binary(2**20, 2**20), "more than 134217728 bytes"),
        (multi_binary(2, 3, shape=(3, 2)), "contradicts"),
        (pb.SpaceSpec(multi_discrete=pb.MultiDiscreteSpec()), "neither flat nor shaped"),
        (flat(3, 0), "a count that is not"),
        (flat(3, 300, dtype=types_pb2.D_TYPE_UINT8), "largest uint8"),
        (flat(3, 3, shape=(3,)), "2 counts for shape"),
        (flat(3, shape=(2**40,)), "more than 134217728 bytes"),
        (flat(3, dtype=types_pb2.D_TYPE_BOOL), "bool is no integer type"),
        (rows((1, 2), (3,)), "rows of lengths"),
        (text(-1, 2), "lengths -1 to 2"),
        (text(3, 2), "lengths 3 to 2"),
        (mapping("a", "b", parts=1), "2 keys, 1 spaces"),
        (mapping("a", "a", parts=2), "a key occurs twice"),
        (nested(33), "nested more than 32 deep"),
    ],
)
def test_nonsense_is_refused_with_the_reason(message: pb.SpaceSpec, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        spec_from_proto(message)


def test_a_long_key_above_many_parts_is_refused() -> None:
    inner = mapping(*map(str, range(100)), parts=100)
    spec_from_proto(pb.SpaceSpec(dict=pb.DictSpec(keys=["k" * 2**13], spaces=[inner])))

    long = pb.SpaceSpec(dict=pb.DictSpec(keys=["k" * 2**14], spaces=[inner]))
    with pytest.raises(CodecError, match="more than 4096 parts, or long keys above many parts"):
        spec_from_proto(long)
    with pytest.raises(CodecError, match="more than 4096 parts"):
        spec_from_proto(pb.SpaceSpec(tuple=pb.TupleSpec(spaces=[text(0, 1)] * 2**12)))


def test_a_space_that_clients_would_refuse_is_refused_at_the_start() -> None:
    most = spaces.Dict({"k" * 8128: spaces.Tuple([spaces.Discrete(2)] * 124)})
    spec_from_proto(spec_to_proto(from_gymnasium(most)))

    longer = spaces.Dict({"k" * 8129: most["k" * 8128]})
    many = spaces.Tuple([spaces.Discrete(2)] * 2**12)
    for space in (longer, many):
        with pytest.raises(UnsupportedSpaceError, match=r"more than 4096 parts.*; make arrays"):
            from_gymnasium(space)
    with pytest.raises(UnsupportedSpaceError, match="more than 524288 counts"):
        from_gymnasium(spaces.MultiDiscrete([2] * (2**19 + 1)))


def test_more_counts_than_a_policy_could_learn_are_refused() -> None:
    with pytest.raises(CodecError, match="524289 counts, and 524288 are the limit"):
        spec_from_proto(flat(*([2] * (2**19 + 1))))
    with pytest.raises(CodecError, match="more than 524288 counts"):
        spec_from_proto(rows(*([(2,) * 2**10] * (2**9 + 1))))


def test_a_space_at_the_depth_limit_is_read() -> None:
    assert len(leaves(spec_from_proto(nested(32)))) == 1


def test_many_large_parts_are_counted_together() -> None:
    quarter = multi_binary(2**13, 2**12)
    message = pb.SpaceSpec(tuple=pb.TupleSpec(spaces=[quarter] * 5))

    with pytest.raises(CodecError, match=r"space at 4: .* more than"):
        spec_from_proto(message)


def test_the_place_of_the_nonsense_is_named() -> None:
    inner = pb.SpaceSpec(tuple=pb.TupleSpec(spaces=[discrete(2), discrete(0)]))
    message = pb.SpaceSpec(dict=pb.DictSpec(keys=["arm"], spaces=[inner]))

    with pytest.raises(CodecError, match=r"space at arm\.1: Discrete has n=0"):
        spec_from_proto(message)
