import contextlib
import json
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.cli.commands.train import TrainingView, format_duration
from rlmesh_ray.cli.console import Console

Capture = pytest.CaptureFixture[str]


def progress(
    iteration: int,
    return_mean: float,
    sessions_lost: int = 0,
    first_failure: str = "",
    evaluation_return_mean: float = math.nan,
) -> Any:
    """Stand-in for the class of rllib.training, which would import Ray."""
    return SimpleNamespace(
        iteration=iteration,
        env_steps=iteration * 1000,
        env_steps_per_s=500.0,
        return_mean=return_mean,
        episodes=iteration,
        wall_s=iteration * 2.0,
        sessions_lost=sessions_lost,
        first_failure=first_failure,
        evaluation_return_mean=evaluation_return_mean,
    )


def test_a_line_is_printed_for_each_iteration(capsys: Capture) -> None:
    with TrainingView(Console(), 3) as view:
        history = view.follow([progress(1, math.nan), progress(2, 21.5)])

    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "iteration", "env", "steps", "steps/s", "return", "elapsed", "time", "left",
    ]  # fmt: skip
    assert first.split() == ["1", "1,000", "500", "-", "2", "s", "4", "s"]
    assert second.split() == ["2", "2,000", "500", "21.5", "4", "s", "2", "s"]
    assert [point.iteration for point in history] == [1, 2]


def test_without_a_terminal_it_waits_aloud_until_the_first_iteration_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console()
    story: list[str] = []

    @contextlib.contextmanager
    def waiting(doing: str) -> Iterator[None]:
        story.append(doing)
        yield
        story.append("over")

    monkeypatch.setattr(console, "waiting", waiting)
    with TrainingView(console, 3) as view:
        for iteration in (1, 2):
            story.append(str(iteration))
            view.update(progress(iteration, 1.0))

    beginning = "building the algorithm, and running its first iteration"
    assert story == [beginning, "1", "over", "2"]


def test_an_event_is_printed_for_each_iteration(capsys: Capture) -> None:
    with TrainingView(Console(is_json=True), None) as view:
        view.follow([progress(1, math.nan)])

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "event": "progress",
        "iteration": 1,
        "env_steps": 1000,
        "env_steps_per_s": 500.0,
        "return_mean": None,
        "episodes": 1,
        "wall_s": 2.0,
        "time_left_s": None,
        "sessions_lost": 0,
        "evaluation_return_mean": None,
    }


def test_the_return_of_an_evaluation_is_shown_where_there_was_one(capsys: Capture) -> None:
    with TrainingView(Console(), 2) as view:
        view.follow([progress(1, 9.0), progress(2, 10.0, evaluation_return_mean=55.25)])

    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if "evaluated" in line] == ["evaluated: mean return 55.2"]


def test_more_lost_sessions_are_reported(capsys: Capture) -> None:
    with TrainingView(Console(), 4) as view:
        view.follow([progress(number, 1.0, lost) for number, lost in enumerate([0, 2, 2, 3], 1)])

    reported = [line for line in capsys.readouterr().out.splitlines() if "lost" in line]
    assert [line.partition(";")[0] for line in reported] == [
        "2 session(s) lost so far",
        "3 session(s) lost so far",
    ]


def test_the_first_failure_is_reported_once(capsys: Capture) -> None:
    failures = ["", "lane 3: it gave nan", "lane 3: it gave nan"]
    with TrainingView(Console(is_json=True), 3) as view:
        view.follow([progress(number, 1.0, 0, what) for number, what in enumerate(failures, 1)])

    programs, people = capsys.readouterr()
    assert people.count("lane 3: it gave nan; ") == 1
    events = [json.loads(line) for line in programs.splitlines()]
    assert [event["event"] for event in events] == ["progress", "progress", "warning", "progress"]
    assert events[2]["message"].startswith("lane 3: it gave nan; ")


def test_an_interrupted_run_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def run() -> Iterator[Any]:
        try:
            yield progress(1, 1.0)
            yield progress(2, 2.0)
        finally:
            closed.append(True)

    class InterruptedView(TrainingView):
        def update(self, _progress: object) -> None:
            raise KeyboardInterrupt

    generator = run()
    with (
        InterruptedView(Console(), 3) as view,
        pytest.raises(KeyboardInterrupt),
    ):
        view.follow(generator)

    assert closed == [True]


def test_resets_of_the_driver_s_sessions_that_take_long_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("rlmesh_ray.client.env.env_client")
    with TrainingView(Console(), 1):
        log.info("resetting %d lane(s): %.0f s so far", 8, 6.0)
    log.info("nobody sees this")

    assert "resetting 8 lane(s): 6 s so far" in capsys.readouterr().out
    assert (log.handlers, log.level) == ([], logging.NOTSET)


def test_a_reader_that_is_gone_does_not_end_the_thread_that_logs_resets() -> None:
    class Unread(Console):
        def say(self, text: str = "", *, style: str = "") -> None:
            if text.startswith("resetting"):
                raise BrokenPipeError

    with TrainingView(Unread(), 1):
        logging.getLogger("rlmesh_ray.client.env.env_client").info("resetting 8 lane(s)")


def test_failures_of_the_driver_s_sessions_are_said_less_and_less_often(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("rlmesh_ray.rllib.runner.session_recovery")
    with TrainingView(Console(), 1):
        for number in range(1, 9):
            log.warning("the simulator failed (failure %d)", number)

    said = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert said == [f"the simulator failed (failure {number})" for number in (1, 2, 4, 8)]


def test_the_time_left_is_never_negative(capsys: Capture) -> None:
    with TrainingView(Console(is_json=True), 2) as view:
        view.follow([progress(5, 1.0)])

    assert json.loads(capsys.readouterr().out)["time_left_s"] == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125.0, "2 min 05 s"),
        (4200.0, "1 h 10 min"),
    ],
)
def test_durations_have_readable_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
