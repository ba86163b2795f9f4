"""Tensors of a space: one a leaf, named by the leaf's path.

The root of a space that is no Dict or Tuple is ``action`` or ``observation``; the others have
their path, with a '.' between its parts. What is no part of the path is percent-encoded: '.' and
'%' in keys, and the first letter of a key that would take one of this module's own names.
"""

from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.wire.tensor_specs import TensorSpec
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, DataType, data_type_of
from rlmesh_ray.spaces.leaves import Leaf, Path
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, MultiBinarySpec, MultiDiscreteSpec

ACTION = "action"
OBSERVATION = "observation"
REWARD = "reward"
"""Observation: DOUBLE; 0 on the first step of a sequence."""
PRESENT = "present"
"""Observation of an agent among several: BOOL, whether it was observed."""
TERMINATED = "terminated"
"""Observation of a batched join: BOOL, one a lane."""
TRUNCATED = "truncated"
"""Likewise."""
_OWN_NAMES = {REWARD, PRESENT, TERMINATED, TRUNCATED, "discount"}
_WIDER = {"float16": np.float32, "int16": np.int32, "uint16": np.uint32}


def tensor_spec(leaf: Leaf, name: str, num_lanes: int | None = None) -> TensorSpec:
    """Return the spec of the tensor of one leaf.

    Args:
        leaf: Of a lane's space.
        name: Name of the tensor.
        num_lanes: Width of a batched value, whose tensor has one more axis; None: one lane.
    """
    kind = data_type(leaf)
    low, high = _bounds(leaf, kind)
    if num_lanes is None:
        return TensorSpec(name, kind, leaf.shape, low, high)
    shape = (num_lanes, *leaf.shape)
    return TensorSpec(name, kind, shape, _over_lanes(low, shape), _over_lanes(high, shape))


def tensor_name(path: Path, root: str) -> str:
    """Return the name of the tensor of the leaf at ``path``."""
    if not path:
        return root
    first, *others = [_escaped(str(part)) for part in path]
    if first in _OWN_NAMES:
        first = f"%{ord(first[0]):02X}{first[1:]}"
    return ".".join((first, *others))


def data_type(leaf: Leaf) -> DataType:
    """Return the data type of a leaf: its own dtype, or the next wider one that tensors have."""
    if leaf.dtype is None:
        return DataType.STRING
    return data_type_of(np.zeros(0, _WIDER.get(leaf.dtype.name, leaf.dtype)))


def _escaped(part: str) -> str:
    # No key is escaped to a '%' alone.
    return part.replace("%", "%25").replace(".", "%2E") or "%"


def _bounds(leaf: Leaf, kind: DataType) -> tuple[Array | None, Array | None]:
    if kind in (DataType.BOOL, DataType.STRING) or 0 in leaf.shape:
        return None, None
    dtype = kind.numpy
    low: Array | None
    high: Array | None
    low, high = (_shortened(np.asarray(bound, dtype)) for bound in _leaf_bounds(leaf))
    if dtype.kind == "f":
        return _if_any(low, -np.inf), _if_any(high, np.inf)
    # dm_env takes a scalar from 0 on for a choice, and fails to count the values of a whole dtype.
    if not leaf.shape and low == 0 and high == np.iinfo(dtype).max:
        high = None
    return low, high


def _leaf_bounds(leaf: Leaf) -> tuple[Any, Any]:
    match leaf.spec:
        case BoxSpec():
            return leaf.spec.bounds()
        case DiscreteSpec(n, start):
            return start, start + n - 1
        case MultiBinarySpec():
            return 0, 1
        case MultiDiscreteSpec(nvec, shape):
            highest = np.array(nvec, leaf.dtype).reshape(shape)
            return 0, highest - 1
    raise AssertionError("a text has no bounds")


def _shortened(bound: Array) -> Array:
    """Return one number where all are the same."""
    first = bound.reshape(-1)[:1]
    return first.reshape(()) if (bound == first).all() else np.ascontiguousarray(bound)


def _if_any(bound: Array, nothing: float) -> Array | None:
    return None if (bound == nothing).all() else bound


def _over_lanes(bound: Array | None, shape: tuple[int, ...]) -> Array | None:
    return bound if bound is None or not bound.ndim else np.broadcast_to(bound, shape)
