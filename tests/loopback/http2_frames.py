"""Calls written by hand, frame by frame, for what no client of gRPC would send."""

import socket
import struct
from collections.abc import Sequence

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING, _GOAWAY, _DATA, _RESET = 1, 4, 6, 7, 0, 3
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1

Headers = Sequence[tuple[bytes, bytes]]


def call_by_hand(
    address: str, path: bytes, headers: Headers = (), timeout_s: float = 10.0
) -> bytes | None:
    """Make a call with an empty message; return its ``grpc-status``.

    Args:
        address: ``HOST:PORT``.
        path: As it goes over the wire.
        headers: Beside those that each call has.
        timeout_s: How long to wait for the answer.

    Returns:
        None: the call, or the connection, was ended without a status.
    """
    host, _, port = address.rpartition(":")
    every_header = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"somewhere"),
        (b"te", b"trailers"),  # codespell:ignore te
        (b"content-type", b"application/grpc"),
        *headers,
    ]
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in every_header)
    with socket.create_connection((host, int(port)), timeout_s) as line:
        line.sendall(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, 1, block)
            + _frame(_DATA, _END_STREAM, 1, bytes(5))
        )
        try:
            return _status(line)
        except (ConnectionError, EOFError):
            return None


def _status(line: socket.socket) -> bytes | None:
    while True:
        header = _exactly(line, 9)
        body = _exactly(line, int.from_bytes(header[:3]))
        kind, flags, stream = header[3], header[4], int.from_bytes(header[5:])
        if kind == _PING and not flags & _ACK:
            line.sendall(_frame(_PING, _ACK, 0, body))
        elif kind == _GOAWAY or (kind == _RESET and stream == 1):
            return None
        elif kind == _HEADERS and flags & _END_STREAM:
            # gRPC writes it as a literal: the name, the length of the number, the number.
            _, found, rest = body.partition(b"grpc-status")
            return rest[1 : 1 + rest[0]] if found else None


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = line.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body
    )


def _text(data: bytes) -> bytes:
    """Return a string as HPACK writes it, without Huffman's code."""
    if len(data) < 127:
        return bytes((len(data),)) + data
    length, rest = b"\x7f", len(data) - 127
    while rest >= 128:
        length += bytes((rest % 128 + 128,))
        rest //= 128
    return length + bytes((rest,)) + data
