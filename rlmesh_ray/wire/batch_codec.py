"""What reads and writes the batches of one space, in one generation's form."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.leaves import Column


class BatchCodec(Protocol):
    """Reads and writes the batches of one space. Whoever has many of them keeps it."""

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch.

        Args:
            columns: One a leaf, at exactly its dtype and ``(num_lanes, *leaf.shape)``.
            num_lanes: Width of the batch.

        Raises:
            CodecError: A column is not what its leaf declares; coerce it first.
        """

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a batch; arrays may be read-only views of ``data``.

        Values are not compared with their space here; see ``conformance.check``.

        Args:
            data: From the peer.
            num_lanes: Width that the batch must have.

        Raises:
            CodecError: ``data`` is no batch of ``num_lanes`` such values.
        """

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Return the columns of several batches, one after the other, as ``decode`` does.

        Args:
            batches: From the peers; at least one.
            counts: Width that each must have.

        Raises:
            CodecError: One of them is no batch of that many such values.
        """

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Return the bytes of several batches whose columns follow each other, as ``encode``.

        Raises:
            CodecError: A column is not what its leaf declares; coerce it first.
        """


def join_each(
    codecs: Iterable[BatchCodec], batches: Sequence[bytes], counts: Sequence[int]
) -> list[Column]:
    """Return the columns of several batches that are read one by one; see ``BatchCodec.join``.

    Args:
        codecs: One a batch, all of one space.
        batches: From the peers; at least one.
        counts: Width that each must have.
    """
    parts = zip(codecs, batches, counts, strict=True)
    return concatenate([codec.decode(data, count) for codec, data, count in parts])


def split_each(
    codecs: Iterable[BatchCodec], columns: Sequence[Column], counts: Sequence[int]
) -> list[bytes]:
    """Return the bytes of several batches that are written one by one; see ``BatchCodec.split``.

    Args:
        codecs: One a batch, all of one space.
        columns: Of all batches, one after the other.
        counts: Width of each.
    """
    parts = zip(codecs, split(columns, counts), counts, strict=True)
    return [codec.encode(own, count) for codec, own, count in parts]
