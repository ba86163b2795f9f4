"""The checker finds what must not be in a history, and nothing in one that is as it should be."""

from pathlib import Path

import numpy as np
import pytest

from tests.chaos.hash_chain import HashChain, Position
from tests.chaos.history import History, Verdict, check_file

ACTIONS = [3, 1, 4, 1, 5]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def positions() -> list[Position]:
    """Return an episode without an end."""
    for incarnation in range(1, 100):
        passed = [Position.first(incarnation, 1)]
        for action in ACTIONS:
            passed.append(passed[-1].after(action))
        if not any(position.is_terminated for position in passed):
            return passed
    raise AssertionError("every episode ends at once")


def step(history: History, position: Position, action: int) -> None:
    history.stepped(
        "0",
        action,
        position.observation().tolist(),
        position.reward,
        terminated=position.is_terminated,
        truncated=position.is_truncated,
    )


def verdict_of(path: Path, *seen: tuple[Position, int]) -> Verdict:
    """Return what is found where steps were answered with these positions."""
    history = History(path)
    history.began("0", positions()[0].observation().tolist())
    for position, action in seen:
        step(history, position, action)
    history.close()
    return check_file(path)


def test_episodes_of_an_environment_are_as_they_should_be(path: Path) -> None:
    env, history = HashChain(), History(path)
    actions = np.random.default_rng(1).integers(16, size=500)
    observation, _ = env.reset()
    history.began("0", observation)
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        history.stepped(
            "0", action, observation, reward, terminated=terminated, truncated=truncated
        )
        if terminated or truncated:
            history.began("0", env.reset()[0])
    history.close()

    verdict = check_file(path)

    assert verdict.violations == []
    assert verdict.num_steps == 500
    assert verdict.num_episodes > 10


def test_what_happened_twice_or_never_is_found(path: Path) -> None:
    _, one, two, three, *_ = positions()

    twice = verdict_of(path, (one.after(ACTIONS[0]), ACTIONS[0]))
    lost = verdict_of(path, (two, ACTIONS[0]))
    another_ones = verdict_of(path, (one, ACTIONS[0]), (one, ACTIONS[1]))
    fine = verdict_of(path, (one, ACTIONS[0]), (two, ACTIONS[1]), (three, ACTIONS[2]))

    assert [len(verdict.violations) for verdict in (twice, lost, another_ones, fine)] == [
        1,
        1,
        1,
        0,
    ]
    assert "leads from" in twice.violations[0]


def test_a_mark_that_is_made_twice_or_never_is_found(path: Path) -> None:
    history = History(path)
    for number, marks in enumerate([[7], [7, 7], []]):
        position = Position.first(number, 1)
        history.began(str(number), position.observation())
        for mark in marks:
            position = position.marked(mark)
        history.marked(str(number), 7, position.observation())
    history.close()

    verdict = check_file(path)

    assert [text.partition(":")[0] for text in verdict.violations] == [
        "record 4, lane 1",
        "record 6, lane 2",
    ]


def test_an_episode_that_goes_on_after_it_was_given_up_is_found(path: Path) -> None:
    _, one, two, *_ = positions()
    history = History(path)
    history.began("0", positions()[0].observation())
    step(history, one, ACTIONS[0])
    history.lost("0", "its worker is gone")
    step(history, two, ACTIONS[1])
    history.began("1", positions()[0].observation())
    history.continued("1", one.observation())
    history.close()

    verdict = check_file(path)

    assert [text.partition(": ")[2].split(" ")[0] for text in verdict.violations] == [
        "a",
        "Position(incarnation=1,",
        "what",
    ]
    assert verdict.num_lost == 1
