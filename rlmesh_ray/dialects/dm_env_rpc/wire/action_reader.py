"""Decodes one action, and checks it against its spec."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.wire.tensor_specs import TensorSpec
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    Array,
    DataType,
    fitted,
    flat_payload,
    kind_of,
    resolved_shape,
)
from rlmesh_ray.errors import CodecError

# A single one of these is a Python number in the message.
_NUMBERS = set(DataType) - {
    DataType.INVALID,
    DataType.INT8,
    DataType.UINT8,
    DataType.STRING,
    DataType.PROTO,
}


@dataclass(frozen=True, slots=True)
class ActionTensor:
    """One action of an agent."""

    spec: TensorSpec
    position: int
    """Index of its leaf in the action space."""
    dtype: np.dtype[Any] | None
    """The leaf's; None for text."""


class ActionReader:
    """Reads the tensors of one action.

    Args:
        action: Which.
    """

    def __init__(self, action: ActionTensor) -> None:
        spec = action.spec
        self.position = action.position
        """Index of its leaf in the action space."""
        self._spec = spec
        self._dtype = action.dtype
        self._name = f"action {spec.name!r}"
        self._field = spec.dtype.field
        self._is_number = (
            not spec.shape and spec.dtype in _NUMBERS and spec.dtype.numpy == action.dtype
        )
        self._is_uniform = not any(
            bound is not None and bound.ndim for bound in (spec.low, spec.high)
        )
        self._low: Any = -np.inf
        self._high: Any = np.inf
        if self._is_uniform:
            self._low = -np.inf if spec.low is None else spec.low.item()
            self._high = np.inf if spec.high is None else spec.high.item()

    def read(self, tensor: Any) -> Any:
        """Return the value in a ``pb.Tensor``, at the leaf's dtype.

        Returns:
            An array of the spec's shape, perhaps read-only; a number, or text.

        Raises:
            CodecError: It has another dtype or shape, or an element out of its bounds.
        """
        if self._is_number and not tensor.shape and tensor.WhichOneof("payload") == self._field:
            elements = getattr(tensor, self._field).array
            # One of them is out of range, or NaN.
            if len(elements) == 1 and self._low <= elements[0] <= self._high:
                return elements[0]
        return self._read(tensor)

    def _read(self, tensor: Any) -> Any:
        spec, name = self._spec, self._name
        kind = kind_of(tensor, name)
        if kind is not spec.dtype:
            raise CodecError(f"{name} is {kind.name}, expected {spec.dtype.name}")
        flat = flat_payload(tensor, kind)
        shape = resolved_shape(tensor.shape, len(flat), name)
        if shape != spec.shape:
            raise CodecError(f"{name} has shape {list(shape)}, expected {list(spec.shape)}")
        if kind is DataType.STRING:
            return fitted(flat, shape, name) if shape else flat[0]
        self._check_range(flat)
        if flat.dtype != self._dtype:
            with np.errstate(over="ignore"):  # a narrowing may lose precision
                flat = flat.astype(self._dtype)
        return fitted(flat, shape, name)

    def _check_range(self, flat: Array) -> None:
        if not flat.size:
            return
        least, greatest = np.minimum.reduce(flat), np.maximum.reduce(flat)
        # NaN is outside of every interval.
        if self._low <= least and greatest <= self._high and self._is_uniform:
            return
        if least != least:
            raise CodecError(f"{self._name} holds NaN")
        self._check_elements(flat, self._spec.low, np.less, "below")
        self._check_elements(flat, self._spec.high, np.greater, "above")

    def _check_elements(self, flat: Array, bound: Array | None, is_outside: Any, word: str) -> None:
        if bound is None:
            return
        limits = bound.reshape(-1)
        outside = is_outside(flat, limits)
        if not np.count_nonzero(outside):
            return
        at = int(outside.argmax())
        value, limit = flat[at % len(flat)], limits[at % len(limits)]
        shape = self._spec.shape
        where = f" (element {list(map(int, np.unravel_index(at, shape)))})" if shape else ""
        raise CodecError(f"{self._name}: {value} is {word} {limit}{where}")
