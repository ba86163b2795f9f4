"""Output of the stopwatch; nothing depends on how fast the clock goes."""

import io
import json
import sys
from typing import Any

import pytest

from benchmarks.stepping.stopwatch import time_in_bulk, time_steps, time_threads

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))


def printed(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_steps_are_counted_after_the_warm_up_and_each_is_timed(capsys: Capture) -> None:
    calls = 0

    def step() -> int:
        nonlocal calls
        calls += 1
        return 8

    time_steps(step, warm_up_s=0.005, seconds=0.005)

    ready, begun, result = printed(capsys)
    assert (ready, begun) == ({"ready": True}, {"begun": True})
    assert result["answers"] == 8 * len(result["latencies_us"])
    assert 0 < len(result["latencies_us"]) < calls
    assert result["seconds"] >= 0.005


def test_a_step_longer_than_the_measurement_is_waited_for(capsys: Capture) -> None:
    time_steps(lambda: 1, warm_up_s=0.0, seconds=1e-9)

    assert printed(capsys)[-1]["answers"] == 1


def test_threads_are_counted_together(capsys: Capture) -> None:
    over: list[int] = []

    def step() -> int:
        if over:
            raise SystemExit  # the threads would go on to the end of the tests
        return 1

    time_threads([step, step], warm_up_s=0.001, seconds=0.3)
    over.append(1)

    assert printed(capsys)[-1]["answers"] > 0


def test_a_thread_that_fails_is_no_measurement() -> None:
    def broken() -> int:
        raise RuntimeError("the session broke")

    with pytest.raises(RuntimeError, match="the session broke"):
        time_threads([broken], warm_up_s=10.0, seconds=10.0)


def test_bulk_work_is_done_in_one_piece(capsys: Capture) -> None:
    pieces: list[int] = []

    def work(rounds: int) -> int:
        pieces.append(rounds)
        return sum(10 for _ in range(rounds))  # takes the longer, the more there are

    time_in_bulk(work, warm_up_s=0.002, seconds=0.002)

    assert printed(capsys)[-1]["answers"] == 10 * pieces[-1]
    assert pieces[0] == 1


def test_nothing_is_measured_for_a_parent_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))

    with pytest.raises(SystemExit, match="the parent has gone"):
        time_steps(lambda: pytest.fail("a step"), warm_up_s=0.0, seconds=1.0)
