"""Actions that NumPy draws fall as those of RLlib's distributions."""

from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchSquashedGaussian,
)

from rlmesh_ray.models.onnx.action_draws import KINDS, ActionDraws

RLLIBS: dict[str, Any] = {
    "categorical": TorchCategorical,
    "diag_gaussian": TorchDiagGaussian,
    "squashed_gaussian": TorchSquashedGaussian,
}
INPUTS = np.array([[0.3, -1.2, 0.5, -0.7]], np.float32)
NUM = 20_000


def rows(num: int = NUM) -> Any:
    return np.repeat(INPUTS, num, axis=0)


@pytest.mark.parametrize("kind", RLLIBS)
def test_log_probabilities_are_rllibs(kind: str) -> None:
    actions, logp = ActionDraws(kind, 1).draw(rows(200), explore=True)

    expected = RLLIBS[kind].from_logits(torch.as_tensor(rows(200))).logp(torch.as_tensor(actions))

    assert logp is not None
    assert logp.dtype == np.float32
    assert np.allclose(logp, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("kind", RLLIBS)
def test_the_likeliest_actions_are_rllibs(kind: str) -> None:
    actions, logp = ActionDraws(kind).draw(rows(2), explore=False)

    greedy = RLLIBS[kind].from_logits(torch.as_tensor(rows(2))).to_deterministic()
    expected = greedy.sample()

    assert np.allclose(actions, expected.numpy())
    assert logp is not None
    assert not logp.any()
    assert logp.shape == tuple(greedy.logp(expected).shape)


@pytest.mark.parametrize("logit", [0.0, -np.inf])
def test_an_exponential_time_of_zero_chooses_no_masked_action(logit: float) -> None:
    seed, row = 100_030, 18
    times = np.random.default_rng(seed).standard_exponential((64, 2), np.float32)
    assert times[row, 0] == 0
    logits = np.tile(np.array([logit, 0.0], np.float32), (64, 1))

    actions, logp = ActionDraws("categorical", seed).draw(logits, explore=True)

    assert actions[row] == (1 if logit == -np.inf else 0)
    assert logp is not None
    assert np.isfinite(logp).all()


def test_choices_fall_with_their_probabilities() -> None:
    actions, _ = ActionDraws("categorical", 2).draw(rows(), explore=True)

    probabilities = np.exp(INPUTS[0]) / np.exp(INPUTS[0]).sum()
    shares = np.bincount(actions, minlength=4) / NUM

    assert np.abs(shares - probabilities).max() < 4 * np.sqrt(0.25 / NUM)


def test_a_choice_of_no_probability_never_falls() -> None:
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32).repeat(1000, axis=0)

    actions, logp = ActionDraws("categorical", 3).draw(logits, explore=True)

    assert 1 not in actions
    assert logp is not None
    assert np.allclose(logp, np.log(0.5))


@pytest.mark.parametrize("kind", ["diag_gaussian", "squashed_gaussian"])
def test_gaussians_have_their_mean_and_deviation(kind: str) -> None:
    actions, _ = ActionDraws(kind, 4).draw(rows(), explore=True)

    drawn = np.arctanh(actions) if kind == "squashed_gaussian" else actions
    deviation = np.exp(INPUTS[0, 2:])

    assert np.abs(drawn.mean(axis=0) - INPUTS[0, :2]).max() < 4 * deviation.max() / np.sqrt(NUM)
    assert np.allclose(drawn.std(axis=0), deviation, rtol=0.03)


def test_epsilon_is_how_often_chance_decides_among_the_allowed() -> None:
    draws = ActionDraws("epsilon_greedy", 5)
    draws.epsilon = 0.4
    values = np.array([[1.0, 3.0, 2.0, -np.inf]], np.float32).repeat(NUM, axis=0)

    actions, logp = draws.draw(values, explore=True)
    shares = np.bincount(actions, minlength=4) / NUM

    assert logp is None
    assert shares[3] == 0
    assert np.allclose(shares[[0, 2]], 0.4 / 3, atol=0.015)
    assert (draws.draw(values, explore=False)[0] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_actions_again(kind: str) -> None:
    first, second = (ActionDraws(kind, 7) for _ in range(2))
    for draws in (first, second):
        draws.epsilon = 0.5

    for _ in range(2):
        ours = first.draw(rows(50), explore=True)[0]
        assert np.array_equal(ours, second.draw(rows(50), explore=True)[0])


def test_a_number_that_is_none_gives_no_log_probability() -> None:
    logits = np.array([[0.0, np.nan]], np.float32)

    _, logp = ActionDraws("categorical", 8).draw(logits, explore=True)

    assert logp is not None
    assert np.isnan(logp).all()
