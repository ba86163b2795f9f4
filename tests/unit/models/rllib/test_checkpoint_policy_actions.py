"""Actions of a served RLlib module on whole arrays, against RLlib's own fitting."""

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.connectors.module_to_env import GetActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space, unsquash_action

from rlmesh_ray.models.policy import Rows
from rlmesh_ray.models.rllib.checkpoint_policy import ArrayInference

Discrete, Tuple = gymnasium.spaces.Discrete, gymnasium.spaces.Tuple
BOX = gymnasium.spaces.Box(-2.0, 2.0, (3,), np.float32)


def acted(space: gymnasium.Space[Any], actions: Any) -> Any:
    """Return what becomes of a module's own actions."""
    fitting = SimpleNamespace(normalize_actions=True, clip_actions=False)
    parts = SimpleNamespace(
        module=TorchRLModule(observation_space=BOX, action_space=space, model_config={}),
        spaces=(BOX, space),
        env_to_module=SimpleNamespace(connectors=[SimpleNamespace(_device=None)]),
        module_to_env=SimpleNamespace(connectors=[GetActions(), None, None, None, fitting]),
    )

    def run(_batch: Any) -> Any:
        return {Columns.ACTIONS: actions}, None

    actor = ArrayInference(parts, run, explore=False)  # type: ignore[arg-type]  # what it looks at
    return actor.act(Rows(np.zeros((2, 3), np.float32), []))[0]


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (Discrete(4), torch.tensor([1, 3])),
        (BOX, torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.1, -0.2]])),
        (Tuple([Discrete(2), BOX]), (torch.tensor([1, 0]), torch.zeros(2, 3))),
    ],
)
def test_actions_are_fitted_as_rllib_does(space: gymnasium.Space[Any], actions: Any) -> None:
    struct = get_base_struct_from_space(space)
    arrays = (
        tuple(part.numpy() for part in actions) if isinstance(actions, tuple) else actions.numpy()
    )
    expected = unsquash_action(arrays, struct)

    actual = acted(space, actions)

    for one, other in zip(
        actual if isinstance(actual, tuple) else [actual],
        expected if isinstance(expected, tuple) else [expected],
        strict=True,
    ):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (Tuple([Discrete(2), Discrete(3)]), torch.zeros(2, 2, dtype=torch.int64)),
        (Discrete(2), {"left": torch.zeros(2, dtype=torch.int64)}),
    ],
)
def test_actions_of_another_structure_are_refused(
    space: gymnasium.Space[Any], actions: Any
) -> None:
    with pytest.raises((TypeError, ValueError)):
        acted(space, actions)
