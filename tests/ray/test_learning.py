"""Algorithms learn through endpoints what they learn without them."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter

from benchmarks.cli.commands import app
from benchmarks.learning.plan import Task
from benchmarks.learning.run import learning_config
from rlmesh_ray import EnvServer
from rlmesh_ray.cli.console import Console
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
from rlmesh_ray.rllib.training import train
from rlmesh_ray.testing.envs import Fault, FaultyEnv

pytestmark = pytest.mark.usefixtures("local_ray")

NUM_ENVS = 8
NUM_ITERATIONS = 5


def ppo(seed: int) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=seed)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS)
    config.training(train_batch_size_per_learner=2048, minibatch_size=256, num_epochs=6, lr=1e-3)
    return config


def returns(progress: list[TrainingProgress]) -> list[float]:
    return [point.return_mean for point in progress]


@pytest.mark.slow
def test_the_learning_curve_is_the_same_to_the_last_digit() -> None:
    without = list(train(ppo(seed=3), stop_iters=NUM_ITERATIONS))

    with EnvServer("CartPole-v1", num_envs=NUM_ENVS) as server:
        through = list(
            train(
                configure(ppo(seed=3), server.address, inference="torch"), stop_iters=NUM_ITERATIONS
            )
        )

    assert returns(through) == returns(without)
    assert [point.env_steps for point in through] == [point.env_steps for point in without]
    assert np.mean(returns(through)[-2:]) > 2 * returns(through)[0]


def test_lost_sessions_are_counted() -> None:
    def break_down() -> FaultyEnv:
        return FaultyEnv(Fault.EXIT, at_step=40)

    with EnvServer(break_down, num_envs=1) as server:
        config = PPOConfig().env_runners(num_env_runners=0, rollout_fragment_length=100)
        config.training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1)
        progress = list(train(configure(config, server.address), stop_iters=2))

    # After 39 and 78 steps, and 117, 156 and 195.
    assert [point.sessions_lost for point in progress] == [2, 5]
    assert [point.env_steps for point in progress] == [100, 200]


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Return the numbers and arrays in a nested state by their paths."""
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return {path: np.asarray(state)}
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= leaves(value, f"{path}/{key}")
    return found


def lasting(algorithm: Algorithm) -> dict[str, Any]:
    """Return what a training must not lose: weights, optimizer, connectors and counters."""
    state = algorithm.get_state()
    learner = state["learner_group"]["learner"]
    runner = state["env_runner"]
    lifetime = {
        name: algorithm.metrics.peek(("env_runners", name), default=0)
        for name in ("num_env_steps_sampled_lifetime", "num_episodes_lifetime")
    }
    kept = {
        "module": learner["rl_module"],
        "optimizer": learner["optimizer"],
        "connectors": runner["env_to_module_connector"],
        "iteration": state["training_iteration"],
        "lifetime": lifetime,
    }
    return leaves(copy.deepcopy(kept))


@pytest.mark.slow
def test_a_training_goes_on_with_weights_optimizer_connectors_and_counters(tmp_path: Path) -> None:
    def built(address: str) -> tuple[Any, Algorithm]:
        config = (
            PPOConfig()
            .debugging(seed=3)
            .env_runners(
                num_env_runners=0,
                env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
            )
        )
        config.training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
        algorithm = configure(config, address).build_algo()
        return SimpleNamespace(build_algo=lambda: algorithm, evaluation_interval=None), algorithm

    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint"}
    with EnvServer("CartPole-v1", num_envs=NUM_ENVS) as server:
        config, algorithm = built(server.address)
        history = []
        for progress in train(config, stop_iters=2, **run):
            history.append(progress)
            expected = lasting(algorithm)

        config, algorithm = built(server.address)
        fresh = lasting(algorithm)
        found: dict[str, Any] = {}
        iterate = algorithm.train

        def watched() -> Any:
            found.update(lasting(algorithm))
            return iterate()

        algorithm.train = watched
        history += train(config, stop_iters=3, resume=tmp_path / "checkpoint", **run)

    assert found.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert different == []
    parts = {
        name.split("/")[1] for name in found if not np.array_equal(found[name], fresh.get(name, ()))
    }
    assert parts == {"module", "optimizer", "connectors", "iteration", "lifetime"}
    assert [point.iteration for point in history] == [1, 2, 3]
    assert history[2].env_steps >= history[1].env_steps + 256
    assert history[2].episodes >= history[1].episodes > 0


def bench(capture: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run ``bench learning``; return what it comes to."""
    code = app(
        ["learning", "--json", *arguments],
        prog_name="bench",
        standalone_mode=False,
        obj=Console(is_json=True),
    )
    result: dict[str, Any] = json.loads(capture.readouterr().out.splitlines()[-1])
    assert code == 0
    assert result["event"] == "result"
    assert result["is_complete"]
    return result


@pytest.mark.parametrize("task", Task)
def test_every_task_of_the_bench_has_a_config(task: Task) -> None:
    config = learning_config(task, seed=5, inference="")

    config.validate()
    assert config.seed == 5
    assert config.algo_class.__name__.lower() == task.partition("-")[0]


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_game_is_learnt_from_its_pixels_in_the_same_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = bench(capsys, "--only", "ppo-catch", "--inference", "torch")

    (task,) = result["tasks"]
    assert task["is_same_curve"] == {"rlmesh-ray, torch": True}
    assert task["steps_ratio"] == {"rlmesh-ray, torch": 1.0}
    assert [run["is_learnt"] for run in task["runs"]] == [True, True]
    assert result["caveats"] == []


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    "tasks",
    [
        pytest.param([Task.PPO_CARTPOLE], marks=pytest.mark.slow),
        pytest.param(list(Task), marks=pytest.mark.nightly),
    ],
)
def test_tasks_of_the_bench_run_on_all_sides(
    tasks: list[Task], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chosen = [option for task in tasks for option in ("--only", task.value)]

    plot = tmp_path / "learning.png"
    options = ["--curves", "--jobs", "2", "--out", str(plot)]

    result = bench(capsys, "--most-steps", "1", *options, *chosen)

    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [task["task"] for task in result["tasks"]] == tasks
    for task in result["tasks"]:
        samplers = sorted(run["sampler"] for run in task["runs"])
        assert samplers == ["RLlib", "rlmesh-ray, compiled", "rlmesh-ray, torch"]
        assert all(run["env_steps"] >= 1 for run in task["runs"])
