"""Hypothesis strategies for spaces, specs, batches, infos, and damaged bytes.

The only module of the package that imports hypothesis, which is not a dependency.
"""

import string
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlmesh_ray.spaces.batch import Column, Leaf, leaves
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.spaces.spec import DTYPES, DiscreteSpec, SpaceSpec

_INTEGERS = [name for name in DTYPES if np.dtype(name).kind in "iu"]
_SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
_FULL_SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)
# Text.__eq__ does not look at the order of the charset, and the wire keeps none.
_CHARSETS = st.text(string.ascii_letters + "äß漢🎲 \n", min_size=1, max_size=8)
_KEYS = st.text(max_size=6)


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    """Draw a Box of any dtype: unbounded, uniformly or elementwise bounded."""
    dtype: np.dtype[Any] = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(_SHAPES)
    elements = hnp.from_dtype(dtype, allow_nan=False)
    if draw(st.booleans()):
        first, second = (np.full(shape, draw(elements), dtype) for _ in range(2))
    else:
        first, second = (draw(hnp.arrays(dtype, shape, elements=elements)) for _ in range(2))
    low, high = np.minimum(first, second), np.maximum(first, second)
    if dtype.kind == "f" and draw(st.booleans()):
        low, high = np.full(shape, -np.inf, dtype), np.full(shape, np.inf, dtype)
    return spaces.Box(np.asarray(low), np.asarray(high), shape, dtype.type)


@st.composite
def discretes(draw: st.DrawFn) -> "spaces.Discrete[Any]":
    """Draw a Discrete of any integer dtype whose values fit it."""
    dtype: np.dtype[Any] = np.dtype(draw(st.sampled_from(_INTEGERS)))
    info = np.iinfo(dtype)
    low, high = int(info.min), min(int(info.max), 2**63 - 1)
    start = draw(st.integers(low, high))
    n = draw(st.integers(1, min(high, high - start + 1)))
    return spaces.Discrete(n, start=start, dtype=dtype.type)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    """Draw a MultiDiscrete of any integer dtype with up to three axes."""
    dtype: np.dtype[Any] = np.dtype(draw(st.sampled_from(_INTEGERS)))
    counts = st.integers(1, min(int(np.iinfo(dtype).max), 2**63 - 1))
    nvec = draw(hnp.arrays(dtype, draw(_SHAPES), elements=counts))
    return spaces.MultiDiscrete(nvec, dtype.type)


def multi_binaries() -> st.SearchStrategy[spaces.MultiBinary]:
    """Draw a MultiBinary with a size, or with a shape."""
    return st.one_of(st.integers(1, 5), _FULL_SHAPES).map(spaces.MultiBinary)


@st.composite
def texts(draw: st.DrawFn) -> spaces.Text:
    """Draw a Text, with gymnasium's default charset or another."""
    min_length, max_length = sorted(draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    if draw(st.booleans()):
        return spaces.Text(max_length, min_length=min_length)
    return spaces.Text(max_length, min_length=min_length, charset=frozenset(draw(_CHARSETS)))


def leaf_spaces() -> st.SearchStrategy[Space]:
    """Draw a space without parts, of any kind that the contract has."""
    return st.one_of(boxes(), discretes(), multi_binaries(), multi_discretes(), texts())


def gymnasium_spaces(max_leaves: int = 6) -> st.SearchStrategy[Space]:
    """Draw a space, nested at random; also empty Dicts and Tuples."""
    return st.recursive(
        leaf_spaces(),
        lambda parts: st.one_of(
            st.dictionaries(_KEYS, parts, max_size=3).map(lambda own: spaces.Dict([*own.items()])),
            st.lists(parts, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=max_leaves,
    )


def specs(max_leaves: int = 6) -> st.SearchStrategy[SpaceSpec]:
    """Draw the spec of a random space."""
    return gymnasium_spaces(max_leaves).map(from_gymnasium)


@st.composite
def batches(draw: st.DrawFn, spec: SpaceSpec, num_lanes: int) -> list[Column]:
    """Draw a batch of ``spec`` with any bits of the dtypes, also NaN.

    Only Discrete columns are within their space, as the wire requires.
    """
    return [draw(_columns(leaf, num_lanes)) for leaf in leaves(spec)]


def _columns(leaf: Leaf, num_lanes: int) -> st.SearchStrategy[Column]:
    dtype, spec = leaf.dtype, leaf.spec
    if dtype is None:
        return st.lists(st.text(max_size=5), min_size=num_lanes, max_size=num_lanes).map(tuple)
    if isinstance(spec, DiscreteSpec):
        values = st.integers(spec.start, spec.start + spec.n - 1)
        return hnp.arrays(dtype, num_lanes, elements=values)
    shape = (num_lanes, *leaf.shape)
    if dtype.kind == "b":
        return hnp.arrays(dtype, shape)
    size = num_lanes * leaf.lane_bytes
    raw = st.binary(min_size=size, max_size=size)
    return raw.map(lambda data: np.frombuffer(data, dtype).reshape(shape))


def plain_infos() -> st.SearchStrategy[dict[str, Any]]:
    """Draw infos that are equal after a round trip through any peer."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=8),
        st.binary(max_size=8),
    )
    values = st.recursive(
        scalars,
        lambda parts: st.one_of(
            st.lists(parts, max_size=3), st.dictionaries(_KEYS, parts, max_size=3)
        ),
        max_leaves=8,
    )
    return st.dictionaries(_KEYS, values, max_size=4)


def arrays() -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Draw an array of any dtype that infos preserve."""
    dtypes = st.sampled_from([*DTYPES, "complex64", "complex128"])
    return dtypes.flatmap(lambda name: hnp.arrays(np.dtype(name), _SHAPES))


@st.composite
def damaged(draw: st.DrawFn, frame: bytes) -> bytes:
    """Draw ``frame`` with some bytes changed, removed, inserted or truncated."""
    data = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 3))
        data[position : position + length] = draw(st.binary(max_size=3))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)
