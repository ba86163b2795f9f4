import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.cli.commands.evaluate import (
    EpisodesFile,
    EvaluationView,
    show_result,
)
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.main import main
from rlmesh_ray.cli.signals import INTERRUPTED
from rlmesh_ray.client.env import env_session_client
from rlmesh_ray.errors import EvaluationInterruptedError, RemoteEnvError, RlmeshError
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult, EvaluationResult, Loss
from tests.unit.cli.full_disks import room_for

Capture = pytest.CaptureFixture[str]
COMMAND = ["evaluate", "--env", "127.0.0.1:1", "--model", "127.0.0.1:2", "--episodes", "9"]


def episode(index: int) -> EpisodeResult:
    return EpisodeResult(
        index, None, 10.0 + index, 5, True, endpoint="127.0.0.1:1", model="127.0.0.1:2"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--step-timeout", "0"),
        ("--step-timeout", "inf"),
        ("--step-timeout", "-1"),
        ("--reconnect-timeout", "nan"),
    ],
)
def test_impossible_deadlines_are_wrong_usage(option: str, value: str, capsys: Capture) -> None:
    assert main(["evaluate", "--env", "a:1", "--model", "b:1", f"{option}={value}"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert option in line
    assert "finite number of seconds" in line


def evaluate_by(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmesh_ray.evaluation.run.evaluate", run)
    monkeypatch.setattr(
        env_session_client,
        "probe_endpoint",
        lambda _connect_options: SimpleNamespace(contract=None),
    )


def cut_short(monkeypatch: pytest.MonkeyPatch, num_episodes: int, error: BaseException) -> None:
    """Let evaluations end with ``error`` once some episodes have finished."""

    def run(*_endpoints: object, on_episode: Any, **_options: object) -> None:
        for index in reversed(range(num_episodes)):
            on_episode(episode(index))
        raise error

    evaluate_by(run, monkeypatch)


def covered_interrupt() -> RuntimeError:
    """The error of a Ctrl-C during a wait on a condition."""
    error = RuntimeError("cannot notify on un-acquired lock")
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), covered_interrupt()])
def test_an_interrupted_evaluation_reports_its_finished_episodes(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cut_short(monkeypatch, 3, error)

    assert main([*COMMAND, "--json"]) == INTERRUPTED

    captured = capsys.readouterr()
    *_, unfinished, interrupted = map(json.loads, captured.out.splitlines())
    assert unfinished["event"] == "unfinished"
    assert unfinished["returns"] == [10.0, 11.0, 12.0]  # in the order of their indices
    assert [report["episodes"] for report in unfinished["endpoints"]] == [3, 3]
    assert interrupted == {"event": "interrupted"}
    assert "3 of 9 episodes" in captured.err
    assert captured.err.splitlines()[-1] == "interrupted"


def test_an_interrupted_evaluation_shows_its_finished_episodes(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cut_short(monkeypatch, 3, KeyboardInterrupt())

    assert main(COMMAND) == INTERRUPTED

    text = capsys.readouterr().out
    assert "3 of 9 episodes" in text
    assert "11.00" in text


def test_an_interrupt_before_any_episode_has_no_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cut_short(monkeypatch, 0, KeyboardInterrupt())

    assert main([*COMMAND, "--json"]) == INTERRUPTED

    assert capsys.readouterr().out == '{"event": "interrupted"}\n'


def test_after_a_failure_of_the_environment_there_is_a_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cut_short(monkeypatch, 2, RemoteEnvError("INTERNAL", "broken", is_recoverable=False))

    assert main([*COMMAND, "--json"]) == 1

    *_, unfinished, error = map(json.loads, capsys.readouterr().out.splitlines())
    assert (unfinished["event"], unfinished["episodes"]) == ("unfinished", 2)
    assert error["type"] == "RemoteEnvError"


def test_a_file_that_cannot_grow_costs_no_finished_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cut_short(monkeypatch, 9, AssertionError("the file fails before"))
    path = tmp_path / "episodes.jsonl"

    with room_for(500):
        assert main([*COMMAND, "--json", "--output", str(path)]) == 1

    *reported, unfinished, error = map(json.loads, capsys.readouterr().out.splitlines())
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == reported[:-1]  # all but the one that had no room
    assert unfinished["event"] == "unfinished"
    assert unfinished["episodes"] == len(reported)
    assert error["type"] == "RlmeshError"
    assert error["message"].startswith(f"cannot write {path}: File too large")


def test_a_file_that_is_removed_meanwhile_does_not_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes.jsonl"

    def run(*_endpoints: object, on_episode: Any, **_options: object) -> EvaluationResult:
        on_episode(episode(0))
        path.unlink()
        return EvaluationResult((episode(0),), 1.0)

    evaluate_by(run, monkeypatch)

    assert main([*COMMAND, "--episodes", "1", "--output", str(path)]) == 0


class FailingConsole(Console):
    """A console whose events fail in some way."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__()
        self._fail = fail

    def event(self, *_: object, **__: object) -> None:
        self._fail()


def test_an_interrupt_while_an_episode_is_recorded_comes_afterwards(tmp_path: Path) -> None:
    console = FailingConsole(lambda: signal.raise_signal(signal.SIGINT))

    with (
        contextlib.closing(EpisodesFile(tmp_path / "episodes.jsonl")) as file,
        EvaluationView(console, 9, file) as meter,
    ):
        with pytest.raises(KeyboardInterrupt) as interrupt:
            meter.advance(episode(0))
        seen = meter.so_far(interrupt.value)

    assert seen is not None
    assert seen.episodes == (episode(0),)
    assert len((tmp_path / "episodes.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("failure", [RlmeshError("the disk is full"), KeyboardInterrupt()])
def test_an_error_while_the_last_episodes_are_shown_costs_no_summary(
    failure: BaseException,
) -> None:
    def fail() -> None:
        raise failure

    with EvaluationView(FailingConsole(fail), 9, None) as meter:
        seen = meter.so_far(EvaluationInterruptedError("gone", (episode(0), episode(1))))

    assert seen is not None
    assert seen.episodes == (episode(0), episode(1))


def test_without_a_terminal_it_says_how_many_episodes_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console()
    asked: list[Callable[[], str]] = []

    @contextlib.contextmanager
    def waiting(doing: Callable[[], str]) -> Iterator[None]:
        asked.append(doing)
        yield

    monkeypatch.setattr(console, "waiting", waiting)
    with EvaluationView(console, 2, None) as meter:
        (doing,) = asked
        texts = [doing()]
        for index in range(2):
            meter.advance(episode(index))
            texts.append(doing())

    running = [f"running episodes: {count} of 2 have ended" for count in range(2)]
    assert texts == [*running, "closing the sessions, and writing what is recorded"]


def test_episodes_of_an_error_count_and_are_shown(tmp_path: Path) -> None:
    with (
        contextlib.closing(EpisodesFile(tmp_path / "episodes.jsonl")) as file,
        EvaluationView(Console(), 9, file) as meter,
    ):
        meter.advance(episode(1))
        meter.note_loss(Loss(EndpointRole.ENV, "127.0.0.1:1", "gone", (2,)))

        seen = meter.so_far(EvaluationInterruptedError("gone", (episode(0), episode(1))))

    assert seen is not None
    assert seen.episodes == (episode(0), episode(1))
    assert seen.interruptions == 1
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [1, 0]


def test_a_loss_names_the_address_once(capsys: Capture) -> None:
    role = EndpointRole.MODEL
    loss = Loss(role, "127.0.0.1:2", "127.0.0.1:2: name its authority (--tls-ca)", ())

    EvaluationView(Console(), 1, None).note_loss(loss)

    shown = capsys.readouterr().err
    assert shown == f"lost {role} 127.0.0.1:2: name its authority (--tls-ca)\n"


def test_a_success_rate_says_of_how_many_episodes(capsys: Capture) -> None:
    for successes, text in (
        ((True, None, False, True), "50.0 % of 4 episodes; 1 without a report count as fail"),
        ((True, False), "50.0 % of 2 episodes"),
    ):
        own = tuple(
            replace(episode(index), success=success) for index, success in enumerate(successes)
        )
        show_result(Console(is_json=True), EvaluationResult(own, 1.0), len(own), ["e"], ["m"])

        shown = capsys.readouterr()
        result = json.loads(shown.out)
        assert result["success_rate"] == 0.5
        assert result["success_reports"] == sum(each is not None for each in successes)
        assert text in shown.err
