"""Actions drawn for whole batches, against RLlib's own connectors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.connectors.module_to_env import GetActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.numpy import convert_to_numpy

from rlmesh_ray.models.rllib.fast_path import ActionSampler, as_arrays
from rlmesh_ray.testing.equality import assert_identical

get_actions = GetActions()._get_actions

SPACES: dict[str, gymnasium.Space[Any]] = {
    "discrete": gymnasium.spaces.Discrete(5),
    "box": gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32),
}
WIDTHS = {"discrete": 5, "box": 6}


class Peculiar(TorchCategorical):
    """A custom distribution, which negates the logits."""

    @classmethod
    def from_logits(cls, logits: Any, **kwargs: Any) -> Any:
        return TorchCategorical.from_logits(-logits, **kwargs)


class WithItsOwn(TorchRLModule):
    def get_exploration_action_dist_cls(self) -> Any:
        return Peculiar


def module_for(kind: str, of: type[TorchRLModule] = TorchRLModule) -> Any:
    return of(observation_space=SPACES["box"], action_space=SPACES[kind], model_config={})


def both(
    module: Any, output: Callable[[], dict[str, Any]], *, explore: bool = True
) -> tuple[Any, Any]:
    """Return RLlib's arrays and ours, each with what was left in the generator."""
    results = []
    for add in (
        lambda out: get_actions(out, module, explore),
        lambda out: ActionSampler(module, get_actions, explore=explore).add_to(out),
    ):
        torch.manual_seed(3)
        made = output()
        add(made)
        results.append((made, torch.get_rng_state().numpy()))
    (theirs, their_state), (ours, our_state) = results
    return (convert_to_numpy(theirs), their_state), (as_arrays(ours), our_state)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("num_lanes", [1, 2, 33, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("explore", [False, True])
def test_actions_are_rllibs_own(
    kind: str, num_lanes: int, dtype: torch.dtype, explore: bool
) -> None:
    random = torch.Generator().manual_seed(num_lanes)
    inputs = 3 * torch.randn(num_lanes, WIDTHS[kind], generator=random, dtype=dtype)

    theirs, ours = both(
        module_for(kind), lambda: {Columns.ACTION_DIST_INPUTS: inputs}, explore=explore
    )

    assert_identical(ours, theirs, "actions")


def test_rllibs_default_distributions_are_the_two_that_are_known() -> None:
    kinds = {kind: module_for(kind).get_exploration_action_dist_cls() for kind in SPACES}

    assert kinds == {"discrete": TorchCategorical, "box": TorchDiagGaussian}


@pytest.mark.parametrize("width", [1, 5])
def test_a_mean_without_its_deviations_is_refused_as_by_rllib(width: int) -> None:
    module, inputs = module_for("box"), torch.zeros(4, width)
    raised = []

    for add in (
        lambda: get_actions({Columns.ACTION_DIST_INPUTS: inputs}, module, False),
        lambda: ActionSampler(module, get_actions, explore=False).add_to(
            {Columns.ACTION_DIST_INPUTS: inputs}
        ),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            add()
        raised.append(caught.type)

    assert raised[0] is raised[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_probability_is_refused_as_by_torch(value: float) -> None:
    inputs = torch.zeros(4, 5)
    inputs[2, 3] = value
    module = module_for("discrete")

    for add in (
        lambda: get_actions({Columns.ACTION_DIST_INPUTS: inputs}, module, True),
        lambda: ActionSampler(module, get_actions, explore=True).add_to(
            {Columns.ACTION_DIST_INPUTS: inputs}
        ),
    ):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            add()


def test_an_impossible_action_has_no_effect_on_other_actions() -> None:
    inputs = torch.zeros(64, 5)
    inputs[:, 2] = -torch.inf  # as modules with action masks have it

    theirs, ours = both(module_for("discrete"), lambda: {Columns.ACTION_DIST_INPUTS: inputs})

    assert_identical(ours, theirs, "actions")
    assert 2 not in ours[0][Columns.ACTIONS]


@pytest.mark.parametrize("num_choices", [1, 2, 7, 18, 400])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4, 1e37])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x[::2]])
def test_however_many_choices_there_are_their_probabilities_are_rllibs(
    num_choices: int, scale: float, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    random = torch.Generator().manual_seed(num_choices)
    inputs = view(scale * torch.randn(32, num_choices, generator=random))

    theirs, ours = both(module_for("discrete"), lambda: {Columns.ACTION_DIST_INPUTS: inputs})

    assert_identical(ours, theirs, "actions")


def test_a_distribution_of_the_modules_own_is_asked() -> None:
    inputs = torch.tensor([[50.0, -50.0, 0.0, 0.0, 0.0]])

    theirs, ours = both(
        module_for("discrete", WithItsOwn), lambda: {Columns.ACTION_DIST_INPUTS: inputs}
    )

    assert_identical(ours, theirs, "actions")
    assert ours[0][Columns.ACTIONS] == [1]


def test_so_is_one_that_was_put_into_the_module() -> None:
    module = module_for("discrete")
    module.action_dist_cls = Peculiar
    inputs = torch.tensor([[50.0, -50.0, 0.0, 0.0, 0.0]])

    theirs, ours = both(module, lambda: {Columns.ACTION_DIST_INPUTS: inputs})

    assert_identical(ours, theirs, "actions")
    assert ours[0][Columns.ACTIONS] == [1]


@pytest.mark.parametrize("given", [(Columns.ACTIONS,), (Columns.ACTION_LOGP,)])
def test_what_the_module_has_given_itself_stays(given: tuple[str, ...]) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))

    theirs, ours = both(
        module_for("discrete"),
        lambda: {Columns.ACTION_DIST_INPUTS: inputs, **{key: torch.ones(4) for key in given}},
    )

    assert_identical(ours, theirs, "actions")


def test_tensors_that_still_have_gradients_are_drawn_from() -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()

    theirs, ours = both(module_for("discrete"), lambda: {Columns.ACTION_DIST_INPUTS: inputs})

    assert_identical(ours, theirs, "actions")


@pytest.mark.parametrize(
    "output",
    [
        {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, 3, dtype=torch.float16)},
        {"a": torch.arange(2), "b": torch.ones(2, dtype=torch.int32)},
        {"a": torch.ones(2, dtype=torch.bool), "b": torch.ones(2, dtype=torch.uint8)},
        {"a": torch.ones(2), "b": {"c": torch.arange(2)}},
        {"a": torch.tensor(3), "b": torch.tensor(2.5)},
        {"a": [1, 2], "b": None, "c": np.arange(2)},
        {},
    ],
)
def test_arrays_are_those_of_rllib(output: dict[str, Any]) -> None:
    assert_identical(as_arrays(output), convert_to_numpy(output), "arrays")


def test_arrays_are_not_overwritten_with_the_tensors() -> None:
    output = SimpleNamespace(a=torch.ones(2), b=torch.ones(2, dtype=torch.bool))

    arrays = as_arrays(vars(output))
    output.a.zero_()
    output.b.zero_()

    assert arrays["a"].all()
    assert arrays["b"].all()
