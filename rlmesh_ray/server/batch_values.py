"""How the values of a batch are read and written, whose parts need not speak alike."""

from collections.abc import Sequence
from typing import Protocol

from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.leaves import Column
from rlmesh_ray.spaces.spec import SpaceSpec


class JoinedValues(Protocol):
    """How the requests of a batch become columns together, and its actions their answers."""

    def join_batches(
        self, spec: SpaceSpec, batches: Sequence[bytes], counts: Sequence[int]
    ) -> list[Column]:
        """Return the columns of several batches, one after the other."""

    def split_batch(
        self, spec: SpaceSpec, columns: Sequence[Column], counts: Sequence[int]
    ) -> list[bytes]:
        """Return the bytes of several batches whose columns follow each other."""


class BatchValues(JoinedValues, Protocol):
    """A generation's module for values."""

    def decode_batch(self, spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a batch. Raises CodecError when it is none."""

    def encode_batch(self, spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch."""


class MixedValues:
    """The values of requests in several languages, joined and split one by one.

    Args:
        languages: One a request.
    """

    def __init__(self, languages: Sequence[BatchValues]) -> None:
        self._languages = languages

    def join_batches(
        self, spec: SpaceSpec, batches: Sequence[bytes], counts: Sequence[int]
    ) -> list[Column]:
        """Return the columns of several batches. Raises CodecError when one is none."""
        parts = zip(self._languages, batches, counts, strict=True)
        return concatenate(
            [values.decode_batch(spec, data, count) for values, data, count in parts]
        )

    def split_batch(
        self, spec: SpaceSpec, columns: Sequence[Column], counts: Sequence[int]
    ) -> list[bytes]:
        """Return the bytes of several batches."""
        parts = zip(self._languages, split(columns, counts), counts, strict=True)
        return [values.encode_batch(spec, own, count) for values, own, count in parts]
