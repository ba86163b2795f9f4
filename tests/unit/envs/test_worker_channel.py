import collections
import enum
import itertools
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.envs.commands import StepCommand, StepReply
from rlmesh_ray.envs.worker_channel import WorkerChannel, encode
from rlmesh_ray.errors import CodecError, RemoteEnvError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import EchoEnv
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.child_processes import arrives


class Point(NamedTuple):
    x: int
    y: int


class Level(enum.IntEnum):
    LOW = 1


class Color(enum.Enum):
    RED = 1


class UnknownClass:
    def __repr__(self) -> str:
        return "of an unknown class"


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture
def ends() -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    left, right = map(WorkerChannel, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def carried(ends: tuple[WorkerChannel, WorkerChannel], message: Any) -> Any:
    sender = threading.Thread(target=ends[0].send, args=(encode(message),))
    sender.start()
    received = ends[1].receive()
    sender.join()
    return received


@pytest.mark.parametrize("kind", FailureKind)
def test_members_of_this_package_s_enums_arrive_as_python_3_11_0_pickles_them_too(
    ends: tuple[WorkerChannel, WorkerChannel],
    kind: FailureKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_name(member: enum.Enum, _protocol: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", by_name)

    assert carried(ends, [kind])[0] is kind


@pytest.mark.parametrize(
    "value",
    [
        None,
        2**80,
        1 + 2j,
        b"bytes",
        bytearray(b"more"),
        range(3),
        {1, 2},
        [np.float32(0.1), np.int64(3), np.bool_(True), np.str_("x")],
        np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        np.array([None, {"a": np.zeros(2)}], dtype=object),
        {"nested": {"deep": (1, [2])}},
        np.datetime64("2026-01-01"),
    ],
)
def test_plain_values_arrive_as_they_are(
    ends: tuple[WorkerChannel, WorkerChannel], value: Any
) -> None:
    received = carried(ends, value)

    assert type(received) is type(value)
    assert_identical(received, value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1, 2), (1, 2)),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (Level.LOW, 1),
        (Color.RED, "<Color.RED: 1>"),
        (UnknownClass(), "of an unknown class"),
        ([UnknownClass()], ["of an unknown class"]),
        (Unspeakable(), "<Unspeakable>"),
        (UnknownClass, repr(UnknownClass)),
        (len, repr(len)),
        (FailureKind.RAISED, FailureKind.RAISED),
        (np.float32, np.float32),
    ],
)
def test_values_of_classes_that_the_endpoint_does_not_know_become_plain(
    ends: tuple[WorkerChannel, WorkerChannel], value: Any, expected: Any
) -> None:
    received = carried(ends, {"key": value})["key"]

    assert type(received) is type(expected)
    assert received == expected


@pytest.mark.parametrize(
    "value",
    [
        np.random.default_rng(1),
        np.random.RandomState(1),
        np.random.PCG64(1),
        np.random.SeedSequence(1),
        np.random.mtrand._rand,
        np.add,
        np.mean,
        np.poly1d([1, 2]),
        np.vectorize(len),
        RemoteEnvError("INTERNAL", "no", True),
        EchoEnv(spaces.Discrete(2), spaces.Discrete(2)),
        from_gymnasium,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_becomes_text(
    ends: tuple[WorkerChannel, WorkerChannel], value: Any
) -> None:
    assert carried(ends, [value]) == [repr(value)]


def test_all_kinds_of_arrays_arrive(
    ends: tuple[WorkerChannel, WorkerChannel], tmp_path: Path
) -> None:
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(2,))
    kinds = [
        np.ma.masked_array([1, 2], [False, True]),
        np.ma.masked,
        np.zeros(1, [("a", "i4")]).view(np.recarray),
        np.array([b"ab"]).view(np.char.chararray),
        mapped,
        np.array(["2026"], "M8[Y]"),
        np.zeros(1, [("a", "i4")]),
        np.void(b"abc"),
        np.dtype("f4"),
        np.longdouble(1) / 3,
    ]

    for value, received in zip(kinds, carried(ends, kinds), strict=True):
        assert type(received) is type(value)
        assert str(received) == str(value)


def test_a_message_that_does_not_decode_costs_only_itself() -> None:
    def fail(body: memoryview) -> Any:
        if b"bad" in bytes(body):
            raise TypeError("'str' object is not callable")
        return pickle.loads(body)

    left, right = socket.socketpair()
    sender, receiver = WorkerChannel(left), WorkerChannel(right, fail)
    sender.send(encode("bad") + encode("good"))

    with pytest.raises(CodecError, match="TypeError: 'str' object is not callable"):
        receiver.receive()
    assert receiver.receive() == "good"
    sender.close()
    receiver.close()


def test_what_cannot_be_pickled_becomes_text(ends: tuple[WorkerChannel, WorkerChannel]) -> None:
    lock = threading.Lock()

    received = carried(ends, np.array([lock, (n for n in "ab"), 1], dtype=object))

    assert received[0] == repr(lock)
    assert received[1].startswith("<generator")
    assert received[2] == 1


@pytest.mark.parametrize(
    "message",
    [
        StepCommand((("a", "b"),)),
        StepReply({"k": [1]}, {0: {"x": 2}}, (("t",),)),
        Failure(FailureKind.RAISED, "message", "trace"),
    ],
)
def test_messages_survive_the_channel(
    ends: tuple[WorkerChannel, WorkerChannel], message: Any
) -> None:
    assert carried(ends, message) == message


def test_a_message_larger_than_one_read_arrives_whole(
    ends: tuple[WorkerChannel, WorkerChannel],
) -> None:
    large = np.arange(200_000)

    assert_identical(carried(ends, large), large)


def test_a_message_in_single_bytes_arrives_whole(ends: tuple[WorkerChannel, WorkerChannel]) -> None:
    def trickle() -> None:
        for byte in encode("slow"):
            ends[0].connection.send(bytes([byte]))

    sender = threading.Thread(target=trickle)
    sender.start()

    assert ends[1].receive() == "slow"
    sender.join()


@pytest.mark.parametrize("cut", [0, 3, 8, 20])
def test_the_end_of_the_channel_is_reported(
    ends: tuple[WorkerChannel, WorkerChannel], cut: int
) -> None:
    ends[0].connection.sendall(encode("a message that is cut off")[:cut])
    ends[0].close()

    with pytest.raises(EOFError):
        ends[1].receive()


def test_pulling_never_blocks_and_says_when_the_message_is_whole(
    ends: tuple[WorkerChannel, WorkerChannel],
) -> None:
    frame = encode(np.arange(10_000))
    cuts = [0, 3, 8, 20, 70_000, len(frame)]

    heard = []
    for start, end in itertools.pairwise(cuts):
        heard.append(ends[1].advance())
        ends[0].connection.sendall(frame[start:end])

    assert heard == [False] * 5
    assert ends[1].advance()
    assert ends[1].has_message
    assert_identical(ends[1].receive(), np.arange(10_000))


def test_a_frame_without_a_reader_is_sent_as_far_as_it_goes(
    ends: tuple[WorkerChannel, WorkerChannel],
) -> None:
    large = np.arange(1_000_000)

    ends[0].queue_frame(encode(large))
    ends[0].queue_frame(encode("and another"))

    assert ends[0].is_sending
    while ends[0].is_sending:
        ends[0].advance()
        ends[1].advance()
    assert_identical(ends[1].receive(), large)
    assert ends[1].receive() == "and another"


def test_waiting_ends_with_the_message_the_time_or_the_other_end(
    ends: tuple[WorkerChannel, WorkerChannel],
) -> None:
    assert not arrives(ends[1], 0.01)
    ends[0].connection.sendall(encode("whole")[:10])
    assert not arrives(ends[1], 0.01)
    ends[0].connection.sendall(encode("whole")[10:])
    assert arrives(ends[1], 20.0)
    assert ends[1].receive() == "whole"
    ends[0].close()
    assert arrives(ends[1], 20.0)
    assert not ends[1].has_message


def test_the_last_message_is_received_although_the_other_end_is_gone(
    ends: tuple[WorkerChannel, WorkerChannel],
) -> None:
    ends[0].send(encode("farewell"))
    ends[0].close()

    ends[1].queue_frame(encode("too late"))

    assert not ends[1].is_sending
    assert ends[1].advance()
    assert ends[1].receive() == "farewell"
    with pytest.raises(EOFError):
        ends[1].receive()


def test_a_frame_is_an_ordinary_pickle_behind_its_length() -> None:
    frame = encode({"a": 1})

    assert int.from_bytes(frame[:8]) == len(frame) - 8
    assert pickle.loads(frame[8:]) == {"a": 1}
