import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.actions import BatchBuckets, PaddedBatch


def test_without_buckets_a_batch_is_one_part_as_it_is() -> None:
    assert BatchBuckets().parts(5) == [PaddedBatch(slice(0, 5), 5)]


@pytest.mark.parametrize(("num_rows", "size"), [(1, 2), (2, 2), (3, 8), (8, 8)])
def test_a_batch_is_padded_up_to_the_next_bucket(num_rows: int, size: int) -> None:
    assert BatchBuckets([2, 8]).parts(num_rows) == [PaddedBatch(slice(0, num_rows), size)]


def test_a_batch_above_the_largest_bucket_runs_in_parts_of_known_sizes() -> None:
    parts = BatchBuckets([2, 8]).parts(18)

    assert parts == [
        PaddedBatch(slice(0, 8), 8),
        PaddedBatch(slice(8, 16), 8),
        PaddedBatch(slice(16, 18), 2),
    ]
    assert [part.num_rows for part in parts] == [8, 8, 2]


@pytest.mark.parametrize("sizes", [[0, 2], [2, 2], [8, 2], [True, 2], [1.5]])
def test_sizes_that_are_not_ascending_row_counts_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="must be ascending row counts, such as"):
        BatchBuckets(sizes)
