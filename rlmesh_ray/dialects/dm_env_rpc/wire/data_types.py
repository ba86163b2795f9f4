"""Data types of tensors, and the dtypes of their arrays."""

import enum
from typing import Any

import numpy as np

from rlmesh_ray.errors import CodecError


class DataType(enum.IntEnum):
    """Data type of a tensor; also the number of its payload field in Tensor."""

    INVALID = 0
    """Only in the spec of a property that has no value."""
    FLOAT = 1
    DOUBLE = 2
    INT8 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT32 = 7
    UINT64 = 8
    BOOL = 9
    STRING = 10
    PROTO = 11

    @property
    def field(self) -> str:
        """Name of the payload field, such as ``"floats"``."""
        return f"{self.name.lower()}s"

    @property
    def numpy(self) -> np.dtype[Any]:
        """Little-endian dtype of the arrays; ``object`` for STRING and PROTO.

        Raises:
            CodecError: INVALID has none.
        """
        if self is DataType.INVALID:
            raise CodecError("INVALID_DATA_TYPE has no values")
        dtype: np.dtype[Any] = NUMPY[self]
        return dtype


NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.FLOAT: np.dtype("<f4"),
    DataType.DOUBLE: np.dtype("<f8"),
    DataType.INT8: np.dtype("i1"),
    DataType.INT32: np.dtype("<i4"),
    DataType.INT64: np.dtype("<i8"),
    DataType.UINT8: np.dtype("u1"),
    DataType.UINT32: np.dtype("<u4"),
    DataType.UINT64: np.dtype("<u8"),
    DataType.BOOL: np.dtype("?"),
    DataType.STRING: np.dtype(object),
    DataType.PROTO: np.dtype(object),
}
"""``DataType.numpy`` of the data types with values."""
_BY_NUMPY = {dtype: kind for kind, dtype in NUMPY.items() if dtype.kind != "O"}
BY_FIELD = {kind.field: kind for kind in DataType}
"""By name of the payload field."""
RAW_KINDS = {
    DataType.FLOAT,
    DataType.DOUBLE,
    DataType.INT8,
    DataType.UINT8,
    DataType.BOOL,
}
"""Data types whose arrays have the same bytes in memory and in a message."""
BYTES_KINDS = {DataType.INT8, DataType.UINT8}
"""Data types whose payload is one field of bytes."""


def data_type_of(value: Any) -> DataType:
    """Return the data type of ``value``: an array of a dtype above, or what NumPy converts to one.

    Raises:
        CodecError: There is no such tensor (float16, int16, complex, ...).
    """
    array = np.asarray(value)
    if array.dtype.kind in "UT":
        return DataType.STRING
    if array.dtype == object:
        first = next(iter(array.flat), "")
        return DataType.STRING if isinstance(first, str) else DataType.PROTO
    kind = _BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise CodecError(f"no tensor holds {array.dtype}; convert it to a dtype that one does")
    return kind
