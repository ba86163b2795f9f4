"""BatchCodec: encodes and decodes batches of one space, in the format of one generation."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from rlmesh_ray.spaces.batch import concatenate, split
from rlmesh_ray.spaces.spec import Column, SpaceSpec


class BatchCodec(Protocol):
    """Encodes and decodes batches of one space; keep it where there are many batches."""

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch.

        Args:
            columns: One for each leaf, at exactly its dtype and ``(num_lanes, *leaf.shape)``.
            num_lanes: Width of the batch.

        Raises:
            CodecError: A column has not the dtype and shape of its leaf; coerce it first.
        """

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a batch; arrays may be read-only views of ``data``.

        Bounds and domains are not checked here; see ``spaces.validation.Checker``.

        Args:
            data: Bytes of the batch, from the peer.
            num_lanes: Expected width of the batch.

        Raises:
            CodecError: ``data`` is no batch of ``num_lanes`` values of the space.
        """

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Decode several batches into the columns of one, in order.

        Args:
            batches: Bytes of at least one batch, from the peers.
            counts: Expected width of each.

        Raises:
            CodecError: One is no batch of that many values of the space.
        """
        return join_each([self] * len(batches), batches, counts)

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Encode one batch as several, with the widths in ``counts``, in order.

        Raises:
            CodecError: A column has not the dtype and shape of its leaf; coerce it first.
        """
        return split_each([self] * len(counts), columns, counts)


class BatchCodecs(Protocol):
    """The module of a protocol version that encodes values."""

    def codec(self, spec: SpaceSpec) -> BatchCodec:
        """Return the codec for the batches of a space."""


def join_each(
    codecs: Iterable[BatchCodec], batches: Sequence[bytes], counts: Sequence[int]
) -> list[Column]:
    """Decode several batches one by one into the columns of one; see ``BatchCodec.join``.

    Args:
        codecs: One for each batch, all of one space.
        batches: Bytes of at least one batch, from the peers.
        counts: Expected width of each.
    """
    parts = zip(codecs, batches, counts, strict=True)
    return concatenate([codec.decode(data, count) for codec, data, count in parts])


def split_each(
    codecs: Iterable[BatchCodec], columns: Sequence[Column], counts: Sequence[int]
) -> list[bytes]:
    """Encode one batch as several, one by one; see ``BatchCodec.split``.

    Args:
        codecs: One for each batch, all of one space.
        columns: Columns of all batches together, in order.
        counts: Width of each batch.
    """
    parts = zip(codecs, split(columns, counts), counts, strict=True)
    return [codec.encode(own, count) for codec, own, count in parts]
