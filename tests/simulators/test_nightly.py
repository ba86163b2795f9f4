import json
from typing import Any

import pytest

from tests.simulators.nightly import Finished, comparison_cell, exit_code, training_cell


def ended(returncode: int | None = 0, stderr: str = "", **event: Any) -> Finished:
    return Finished(returncode, f"a line of the simulator's\n{json.dumps(event)}\n", stderr)


def compared(steps: int, reason: str = "") -> Finished:
    return ended(steps=steps, reason=reason)


def trained(iterations: int = 2, env_steps: int = 800, sessions_lost: int = 0) -> Finished:
    return ended(
        event="result", iterations=iterations, env_steps=env_steps, sessions_lost=sessions_lost
    )


def refused(message: str, kind: str = "ConfigurationError") -> Finished:
    return ended(1, event="error", type=kind, message=message)


def test_equal_steps_and_a_finished_training_pass() -> None:
    cells = [comparison_cell("pong", compared(500)), training_cell("pong", trained())]

    assert cells == ["500", "2 iterations, 800 steps"]
    assert exit_code(cells) == 0


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (comparison_cell("pong", compared(3, "Not equal")), "3 of 500 steps were equal: Not equal"),
        (comparison_cell("pong", compared(0, "several agents")), "0 of 500 steps"),
        (comparison_cell("pong", Finished(1, "", "Traceback\nOSError: no ROM")), "OSError: no ROM"),
        (comparison_cell("pong", Finished(-9)), "exit code -9"),
        (comparison_cell("pong", Finished(None)), "not done within 600 s"),
        (comparison_cell("rock_paper_scissors", compared(500)), "500, not 'several agents'"),
        (training_cell("pong", Finished(None)), "not done within 600 s"),
        (training_cell("pong", refused("no such endpoint")), "no such endpoint"),
        (training_cell("pong", trained(iterations=1)), "1 iterations"),
        (training_cell("pong", trained(env_steps=0)), "0 steps"),
        (training_cell("pong", trained(sessions_lost=1)), "1 lost sessions"),
        (training_cell("pong", ended(1, "out of memory", event="progress")), "out of memory"),
        (training_cell("rock_paper_scissors", trained()), "not refused"),
        (training_cell("rock_paper_scissors", refused("no endpoint")), "not refused"),
        (training_cell("rock_paper_scissors", Finished(None)), "not done within 600 s"),
    ],
)
def test_everything_else_fails_with_the_reason(cell: str, reason: str) -> None:
    assert cell.startswith("FAILED: ")
    assert reason in cell
    assert exit_code(["| ant | 500 | 2 iterations |", f"| pong | {cell} | |"]) == 1


def test_what_is_known_not_to_work_passes_for_that_reason_only() -> None:
    name = "rock_paper_scissors"
    cells = [
        comparison_cell(name, compared(0, "several agents, which no vector has")),
        training_cell(name, refused("train trains one policy for one agent, and it has two")),
    ]

    assert cells[0] == "none: several agents, which no vector has"
    assert cells[1].startswith("refused: train trains one policy")
    assert exit_code(cells) == 0


def test_a_reason_breaks_no_row_of_the_table() -> None:
    cell = comparison_cell("pong", compared(3, "a | b\nc"))

    assert cell == "FAILED: 3 of 500 steps were equal: a \\| b c"
