"""When a learner in the driver's process is said to have too many threads."""

import os

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.rllib.config import learner_threads
from rlmesh_ray.rllib.config.learner_threads import (
    excess_threads,
    idle_between,
    is_torch_default,
    thread_warnings,
)


@pytest.mark.parametrize(("threads", "idle", "remedy"), [(2, 0, 1), (2, 1, 1), (8, 5, 5)])
def test_more_threads_than_idle_cores_are_named_with_the_remedy(
    threads: int, idle: int, remedy: int
) -> None:
    sentence = excess_threads(threads, 8, idle)

    assert sentence is not None
    assert f"{threads} threads" in sentence
    assert f"{idle} of 8 cores are idle" in sentence
    assert f"torch.set_num_threads({remedy})" in sentence


@pytest.mark.parametrize(("threads", "idle"), [(1, 0), (2, 2), (8, 15)])
def test_threads_that_have_a_core_each_are_left_alone(threads: int, idle: int) -> None:
    assert excess_threads(threads, 16, idle) is None


@pytest.mark.parametrize(
    ("threads", "cores", "environment", "is_default"),
    [
        (2, 2, {}, True),
        (8, 16, {}, True),
        (1, 2, {}, False),
        (3, 16, {}, False),
        (2, 2, {"OMP_NUM_THREADS": "2"}, False),
        (2, 2, {"MKL_NUM_THREADS": "2"}, False),
    ],
)
def test_a_number_that_torch_would_not_have_taken_was_chosen(
    threads: int, cores: int, environment: dict[str, str], is_default: bool
) -> None:
    assert is_torch_default(threads, cores, environment) == is_default


def test_idle_cores_are_counted_by_what_the_system_spent_on_nothing() -> None:
    before = "cpu  100 0 10 500 5 0 0 0 0 0\ncpu0 0\ncpu1 0\nintr 7\n"
    after = "cpu  148 0 12 545 10 0 0 0 0 0\ncpu0 0\ncpu1 0\nintr 8\n"

    assert idle_between(before, after) == 1
    assert idle_between(before, before) == 0


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, both taken, and what torch would take."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(learner_threads, "idle_cores", lambda cores, *, enough: 0)


@pytest.mark.usefixtures("busy")
def test_a_local_learner_on_a_busy_machine_is_warned_of() -> None:
    [sentence] = thread_warnings(PPOConfig())

    assert "torch.set_num_threads(1)" in sentence


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize(
    "config",
    [PPOConfig().learners(num_learners=1), PPOConfig().learners(num_gpus_per_learner=1)],
)
def test_a_learner_elsewhere_is_left_alone(config: AlgorithmConfig) -> None:
    assert list(thread_warnings(config)) == []


@pytest.mark.usefixtures("busy")
def test_threads_that_were_chosen_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    assert list(thread_warnings(PPOConfig())) == []
