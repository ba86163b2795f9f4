import os
import threading
from collections.abc import Iterator

import pytest

from rlmesh_ray.rllib.arrivals import Arrivals


@pytest.fixture
def arrivals() -> Iterator[Arrivals[str]]:
    arrivals: Arrivals[str] = Arrivals(2)
    yield arrivals
    arrivals.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_work_is_done_when_its_descriptor_is_readable(
    arrivals: Arrivals[str], pipe: tuple[int, int]
) -> None:
    arrivals.watch(pipe[0], "one", lambda: "done")

    assert arrivals.take(0.0) is None
    os.write(pipe[1], b"x")
    assert arrivals.take(None) == "done"
    assert arrivals.take(0.0) is None


def test_who_waits_for_descriptors_hears_of_threads(
    arrivals: Arrivals[str], pipe: tuple[int, int]
) -> None:
    arrivals.watch(pipe[0], "one", lambda: "done")
    thread = threading.Thread(target=arrivals.put, args=("put",))
    thread.start()

    assert arrivals.take(None) == "put"
    thread.join()
    assert arrivals.take(0.0) is None


def test_what_was_put_before_anything_was_watched_is_not_forgotten(
    arrivals: Arrivals[str], pipe: tuple[int, int]
) -> None:
    arrivals.put("put")
    arrivals.watch(pipe[0], "one", lambda: "done")
    os.write(pipe[1], b"x")

    assert [arrivals.take(None), arrivals.take(None)] == ["put", "done"]


def test_each_take_does_one_work(arrivals: Arrivals[str]) -> None:
    pipes = [os.pipe() for _ in range(3)]
    for number, (reader, writer) in enumerate(pipes):
        arrivals.watch(reader, number, lambda number=number: str(number))  # type: ignore[misc]
        os.write(writer, b"x")

    assert sorted(str(arrivals.take(None)) for _ in pipes) == ["0", "1", "2"]
    for ends in pipes:
        for end in ends:
            os.close(end)


def test_what_is_no_longer_watched_is_the_caller_s(
    arrivals: Arrivals[str], pipe: tuple[int, int]
) -> None:
    arrivals.watch(pipe[0], "one", lambda: "done")
    os.write(pipe[1], b"x")

    job = arrivals.unwatch("one")
    assert job is not None
    assert job() == "done"
    assert arrivals.unwatch("one") is None
    assert arrivals.take(0.0) is None


def test_a_thread_may_be_late(arrivals: Arrivals[str], pipe: tuple[int, int]) -> None:
    arrivals.watch(pipe[0], "one", lambda: "done")
    arrivals.close()
    arrivals.close()

    arrivals.put("put")
