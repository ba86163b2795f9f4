"""``rlmesh-ray compare``, with real endpoints."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.spaces.contract import EnvContract

HERE = "tests.loopback.test_compare"


def balance() -> Any:
    return lambda observations: (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def fall() -> Any:
    return lambda observations: np.zeros(len(observations), np.int64)


class ForFrames:
    """A policy of other spaces."""

    traits = PolicyTraits()

    def check_contract(self, contract: EnvContract) -> None:
        raise ContractMismatchError("it acts on frames (84, 84, 4)")

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        raise AssertionError("it was refused")

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing."""


def command(
    capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Run a command in this process; return its events and its text for people."""
    capsys.readouterr()
    actual = main([*arguments, "--json"])
    output = capsys.readouterr()
    assert actual == code, output.err
    return [json.loads(line) for line in output.out.splitlines()], output.err


@pytest.fixture(scope="module")
def env() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=4) as server:
        yield server


def test_two_policies_run_the_same_episodes_and_are_compared(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("--episodes", "4", "--seed", "5")
    with ModelServer(balance()) as b:
        at = ("--env", env.address, *run)
        events, text = command(capsys, "compare", f"{HERE}:fall", b.address, *at)

    comparison = events[-1]
    assert comparison["event"] == "comparison"
    assert comparison["seeds"] == [5, 6, 7, 8]
    assert [each["event"] for each in events].count("episode") == 8
    returns_of_a, returns_of_b = (each["returns"] for each in events if each["event"] == "result")
    assert comparison["differences"] == list(np.subtract(returns_of_b, returns_of_a))
    assert comparison["difference_low"] > 0
    assert comparison["contains_zero"] is False
    assert "does not contain 0: B has the higher returns" in text


def test_a_policy_that_does_not_fit_is_named_before_an_episode_runs(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with ModelServer(balance()) as a, ModelServer(ForFrames()) as b:
        names = ("compare", a.address, b.address, "--env", env.address)
        events, text = command(capsys, *names, code=1)

    assert [each["event"] for each in events] == ["error"]
    assert f"policy {b.address} does not fit the environment" in text
    assert "frames (84, 84, 4)" in text


def test_how_policies_are_run_can_be_chosen(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ("compare", f"{HERE}:balance", f"{HERE}:fall", "--env", env.address)
    _, text = command(capsys, *policies, "--inference", "compiled", code=2)

    assert "inference cannot be used with a function" in text


def test_different_environments_are_refused_before_an_episode_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    policies = f"{HERE}:balance", f"{HERE}:fall"
    with EnvServer("CartPole-v1") as env, EnvServer("Acrobot-v1") as other:
        at = ("--env", env.address, "--env", other.address)
        events, text = command(capsys, "compare", *policies, *at, code=1)
        assert env.statistics().sessions.opened == other.statistics().sessions.opened == 0

    assert [each["event"] for each in events] == ["error"]
    assert "'Acrobot-v1' where 'CartPole-v1' is expected" in text


def test_an_environment_that_cannot_be_reached_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with EnvServer("CartPole-v1") as away:
        pass
    with EnvServer("CartPole-v1") as env, ModelServer(balance()) as policy:
        at = ("--env", away.address, "--env", env.address, "--episodes", "2")
        events, _ = command(capsys, "compare", policy.address, policy.address, *at)

    assert events[-1]["differences"] == [0.0, 0.0]


def test_a_policy_that_fails_when_it_is_asked_is_named_before_an_episode_runs(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(observations: Any) -> Any:
        raise RuntimeError("its file of weights is empty")

    with ModelServer(fail) as b:
        names = ("compare", f"{HERE}:balance", b.address, "--env", env.address)
        events, text = command(capsys, *names, code=1)

    assert [each["event"] for each in events] == ["error"]
    assert f"policy {b.address} does not fit the environment" in text
    assert "its file of weights is empty" in text


def test_the_pairs_before_a_failure_are_compared(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[None] = []

    def fall_for_a_while(observations: Any) -> Any:
        asked.append(None)
        if len(asked) > 13:  # episodes take 8 to 10 steps: the first of each lane has ended
            raise RuntimeError("its file of weights is empty")
        return fall()(observations)

    with ModelServer(fall_for_a_while) as b:
        at = ("--env", env.address, "--episodes", "8")
        events, _ = command(capsys, "compare", f"{HERE}:fall", b.address, *at, code=1)

    *_, unfinished, comparison, error = events
    assert (unfinished["event"], unfinished["episodes"]) == ("unfinished", 4)
    assert (comparison["event"], comparison["differences"]) == ("comparison", [0.0] * 4)
    assert "its file of weights is empty" in error["message"]


def test_the_episodes_before_a_failure_are_drawn(
    env: EnvServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    steps = itertools.count()

    def fall_for_a_while(observations: Any) -> Any:
        if next(steps) > 13:
            raise RuntimeError("its file of weights is empty")
        return fall()(observations)

    plot = tmp_path / "returns.png"
    with ModelServer(fall_for_a_while) as model:
        at = ("--env", env.address, "--model", model.address, "--episodes", "8")
        command(capsys, "evaluate", *at, "--plot", str(plot), code=1)

    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_policy_that_does_not_exist_is_named(
    env: EnvServer, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("compare", f"{HERE}:balance", "no/such/folder", "--env", env.address)
    _, text = command(capsys, *names, code=2)

    assert "no/such/folder" in text


@pytest.mark.parametrize("name", ["plot.jpg", "no/folder/plot.png"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_an_episode_runs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("--env", "CartPole-v1", "--model", f"{HERE}:balance", "--plot", name)

    _, text = command(capsys, "evaluate", *names, code=2)

    assert f"{name} is no .png file in an existing folder" in text
