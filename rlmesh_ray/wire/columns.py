"""What both generations check: columns that are written, and bytes that shall be columns."""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.leaves import Column, Leaf


def check_column(leaf: Leaf, column: Column, num_lanes: int) -> None:
    """Make sure that ``column`` is what ``leaf`` declares. Raises CodecError if it is not."""
    if not _fits(leaf, column, num_lanes):
        found = (
            f"{len(column)} texts"
            if isinstance(column, tuple)
            else f"{column.dtype} {column.shape}"
        )
        expected = "texts" if leaf.dtype is None else f"{leaf.dtype} {leaf.shape}"
        raise CodecError(
            f"column {leaf.name!r} is {found}, expected {num_lanes} lanes of {expected}"
        )


def check_size(leaf: Leaf, size_bytes: int, num_lanes: int) -> None:
    """Make sure that so many bytes are the column of an array. Raises CodecError if not."""
    expected = num_lanes * leaf.lane_bytes
    if size_bytes != expected:
        place = f" at {leaf.name}" if leaf.path else ""
        raise CodecError(
            f"{size_bytes} bytes{place}, expected {expected} "
            f"({num_lanes} lanes of {leaf.dtype} {leaf.shape})"
        )


def _fits(leaf: Leaf, column: Column, num_lanes: int) -> bool:
    # Which kind it is comes first: NumPy takes None for float64 when it compares dtypes.
    if leaf.dtype is None or isinstance(column, tuple):
        return leaf.dtype is None and isinstance(column, tuple) and len(column) == num_lanes
    return column.dtype == leaf.dtype and column.shape == (num_lanes, *leaf.shape)
