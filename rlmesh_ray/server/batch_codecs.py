"""How the values of a batch are read and written, whose parts need not speak alike."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rlmesh_ray.spaces.leaves import Column
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire.batch_codec import BatchCodec, join_each, split_each


class BatchCodecs(Protocol):
    """A generation's module for values."""

    def codec(self, spec: SpaceSpec) -> BatchCodec:
        """Return what reads and writes the batches of a space."""


class JoinableCodec(Protocol):
    """The part of a ``BatchCodec`` that requests with a common batch need."""

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """See ``BatchCodec``."""

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """See ``BatchCodec``."""


class CodecPair(NamedTuple):
    """What reads observations, and writes actions."""

    observations: JoinableCodec
    actions: JoinableCodec


class MixedCodec:
    """Reads and writes the batches of requests in several languages, one by one.

    Args:
        codecs: One a request.
    """

    def __init__(self, codecs: Sequence[BatchCodec]) -> None:
        self._codecs = codecs

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Return the columns of several batches. Raises CodecError when one is none."""
        return join_each(self._codecs, batches, counts)

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Return the bytes of several batches."""
        return split_each(self._codecs, columns, counts)
