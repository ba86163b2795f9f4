"""The columns of an episode's Parquet file: between the arrays of leaves and pyarrow's.

The first row has the observation and the info of the reset; its action, reward and flags say
nothing. Each further row is a step: the action, and what it led to.

A leaf without axes is a column of numbers or strings. Others are lists of fixed size in C order;
or, since Parquet has no small integers, binaries where they have many elements of one byte. One
without elements is a column of nulls.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlmesh_ray.spaces.spec import Column, Leaf

_LARGEST_LIST = 64


def schema(row_leaves: tuple[Leaf, ...]) -> pa.Schema:
    fields = [pa.field(_name_of(leaf), _type_of(leaf)) for leaf in row_leaves]
    return pa.schema([*fields, pa.field("info", pa.string())])


def arrow_array(leaf: Leaf, kind: pa.DataType, column: Column) -> pa.Array:
    if pa.types.is_null(kind):
        return pa.nulls(len(column))
    if leaf.dtype is None or not leaf.shape:
        return pa.array(column, kind)
    flat = np.ascontiguousarray(column).reshape(-1)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), kind.list_size)
    buffers = [None, pa.py_buffer(flat.view(np.uint8))]
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(column), buffers)


def read_columns(
    file: BinaryIO, row_leaves: Sequence[Leaf]
) -> tuple[list[Column], Sequence[str | None]]:
    """Return the columns of a file, and its infos; only observations and infos have a first row.

    Raises:
        Exception: It is not such a file; pyarrow and NumPy raise many types of errors.
    """
    table = pq.read_table(file)
    columns = []
    for leaf in row_leaves:
        name = _name_of(leaf)
        if name not in table.column_names:  # as it was written before keys could have slashes
            name = "/".join(map(str, leaf.path))
        array = table[name].combine_chunks()
        columns.append(_column(leaf, array if leaf.path[0] == "observation" else array.slice(1)))
    return columns, table["info"].to_pylist()


def read_rewards(file: BinaryIO, length: int) -> NDArray[np.float64]:
    """Return the rewards, ``(length,)``, of a file with ``length`` steps.

    Raises:
        Exception: See ``read_columns``.
    """
    parquet = pq.ParquetFile(file)
    if parquet.metadata.num_rows != length + 1:
        raise ValueError(f"{parquet.metadata.num_rows} rows for {length} steps")
    rewards = parquet.read(columns=["reward"])["reward"].to_numpy()
    return np.asarray(rewards[1:], np.float64)


def _column(leaf: Leaf, array: Any) -> Column:
    if leaf.dtype is None:
        return tuple(array.to_pylist())
    if 0 in leaf.shape:
        return np.zeros((len(array), *leaf.shape), leaf.dtype)
    if pa.types.is_fixed_size_binary(array.type):
        size, first = array.type.byte_width, array.offset
        data = np.frombuffer(array.buffers()[1], leaf.dtype)[first * size :][: len(array) * size]
    else:
        data = (array.flatten() if leaf.shape else array).to_numpy(zero_copy_only=False)
    return np.array(data, leaf.dtype).reshape(len(array), *leaf.shape)


def _name_of(leaf: Leaf) -> str:
    """Return a leaf's column: its path as JSON Pointers have it, where keys may contain slashes."""
    return "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in leaf.path)


def _type_of(leaf: Leaf) -> pa.DataType:
    if leaf.dtype is None:
        return pa.string()
    if 0 in leaf.shape:
        return pa.null()
    if not leaf.shape:
        return pa.from_numpy_dtype(leaf.dtype)
    if leaf.dtype.itemsize == 1 and leaf.lane_bytes > _LARGEST_LIST:
        return pa.binary(leaf.lane_bytes)
    return pa.list_(pa.from_numpy_dtype(leaf.dtype), leaf.lane_bytes // leaf.dtype.itemsize)
