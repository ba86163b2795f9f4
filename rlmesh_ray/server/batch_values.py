"""How the values of a batch are read and written, whose parts need not speak alike."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(slots=True)
class CodecTimes:
    """What a batch takes beside the policy."""

    decode_ns: int = 0
    """For its observations to be read."""
    encode_ns: int = 0
    """For its actions to be written."""


class TimedValues:
    """The values of a batch, whose clients are told what reading and writing takes.

    Args:
        values: How to do it.
        times: Gets what it takes, whether it succeeds or not.
    """

    def __init__(self, values: JoinedValues, times: CodecTimes) -> None:
        self._values = values
        self._times = times

    def join_batches(
        self, spec: SpaceSpec, batches: Sequence[bytes], counts: Sequence[int]
    ) -> list[Column]:
        """Return the columns of several batches. Raises CodecError when one is none."""
        begun_ns = time.perf_counter_ns()
        try:
            return self._values.join_batches(spec, batches, counts)
        finally:
            self._times.decode_ns += time.perf_counter_ns() - begun_ns

    def split_batch(
        self, spec: SpaceSpec, columns: Sequence[Column], counts: Sequence[int]
    ) -> list[bytes]:
        """Return the bytes of several batches."""
        begun_ns = time.perf_counter_ns()
        try:
            return self._values.split_batch(spec, columns, counts)
        finally:
            self._times.encode_ns += time.perf_counter_ns() - begun_ns
