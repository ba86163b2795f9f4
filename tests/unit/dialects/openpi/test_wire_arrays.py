"""Messages of openpi: as the published client packs them, and as no client would."""

import importlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from rlmesh_ray.dialects.openpi.wire import pack, unpack
from rlmesh_ray.errors import CodecError
from rlmesh_ray.testing.equality import assert_identical
from tests.frame_mutation import damaged
from tests.peers.openpi.record import MESSAGES

RECORDED = json.loads(
    (Path(__file__).parents[3] / "peers" / "openpi" / "messages.json").read_text()
)
NUM_DAMAGED = 10_000

# NumPy's numbers are read as Python's.
VALUES = {
    **MESSAGES,
    "numbers": {"a": 0.5, "b": -3, "c": True, "d": 2, "e": 0.25, "f": None, "g": True},
}


@pytest.mark.parametrize("name", RECORDED)
def test_messages_of_the_published_client_are_read(name: str) -> None:
    assert_identical(unpack(bytes.fromhex(RECORDED[name])), VALUES[name])


@pytest.mark.parametrize("name", RECORDED)
def test_messages_are_packed_as_the_published_client_packs_them(name: str) -> None:
    assert pack(MESSAGES[name]).hex() == RECORDED[name]


def test_arrays_of_another_layout_are_packed_in_c_order_and_little_endian() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T

    found = unpack(pack(array))

    assert found.dtype.str == "<i4"
    assert np.array_equal(found, array)


def array_map(**changes: Any) -> bytes:
    """Return the message of an array of two float32, with some entries changed."""
    entries = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2], **changes}
    packed: bytes = msgpack.packb({key.encode(): value for key, value in entries.items()})
    return packed


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (array_map(dtype="|O"), "dtype '|O'"),
        (array_map(dtype="|V4"), r"dtype '|V4'"),
        (array_map(dtype="<c8"), "dtype '<c8'"),
        (array_map(dtype="<U1"), "dtype '<U1'"),
        (array_map(dtype=">f4"), "dtype '>f4'; accepted are"),
        (array_map(dtype="i4,f4"), "dtype 'i4,f4'"),
        (array_map(dtype=[["a", "<f4"]]), "dtype"),
        (array_map(dtype=None), "dtype 'None'"),
        (array_map(shape=[3]), r"shape \(3,\) comes with 8 bytes"),
        (array_map(shape=[2**31 - 1, 2**31 - 1]), "comes with 8 bytes"),
        (array_map(shape=[-1]), r"shape \[-1\]"),
        (array_map(shape=[True, 2]), r"shape \[True, 2\]"),
        (array_map(shape=[1] * 40), "shape"),
        (array_map(shape=2), "shape 2"),
        (array_map(data="text"), "no binary value"),
        (array_map(data=b"\1\2", dtype="|b1"), "neither 0 nor 1"),
        (msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}), "no number"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}), "dtype"),
        (msgpack.packb({1: 2}), "no text"),
        (msgpack.packb({b"a": 1, "a": 2}), "twice"),
        (msgpack.packb({b"\xff": 1}), "msgpack"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "extension"),
        (msgpack.packb([0] * 4097), "msgpack"),
        (msgpack.packb([[0] * 4096] * 16), "more than 65536 values"),
        (b"\x91" * 33 + b"\x90", "nested more than 32 deep"),
        (b"\x91" * 3000 + b"\x90", "msgpack"),
        (b"", "msgpack"),
        (b"\x80\x80", "msgpack"),
        (b"\xc1", "msgpack: FormatError"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\xc6\xff\xff\xff\xff", "msgpack"),
        (b"\x81\x90\x01", "msgpack"),
    ],
)
def test_what_no_client_should_send_is_refused(message: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        unpack(message)


def test_nested_lists_that_announce_many_items_take_little_memory() -> None:
    message = b"\xdc\x10\x00" * 400 + bytes(2**20)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            unpack(message)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 2**25


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(2, complex), {1, 2}, 2**70])
def test_what_has_no_form_is_not_packed(value: object) -> None:
    with pytest.raises(CodecError, match="no form in openpi's protocol"):
        pack({"a": value})


def test_damaged_messages_are_read_or_refused() -> None:
    chance = random.Random(29)
    frames = [bytes.fromhex(frame) for frame in RECORDED.values()]
    num_refused = 0

    for _ in range(NUM_DAMAGED):
        try:
            found = unpack(damaged(chance.choice(frames), chance))
        except CodecError:
            num_refused += 1
        else:
            pack(found) if _is_plain(found) else None

    assert NUM_DAMAGED / 10 < num_refused < NUM_DAMAGED


def _is_plain(found: object) -> bool:
    """Return whether there is no timestamp in it, which msgpack reads and no space takes."""
    if isinstance(found, dict | list):
        return all(map(_is_plain, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, msgpack.Timestamp)


def test_the_package_of_the_library_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)

    with pytest.raises(ImportError, match=r"pip install '\.\[openpi\]'"):
        pack({})
