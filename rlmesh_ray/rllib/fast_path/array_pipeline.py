"""From observations to actions for all lanes of a slot at once.

RLlib's default connectors take the batch apart lane by lane and put it together again, which is
most of the time that sampling takes. What comes out here is the same, to the last bit; it is used
only where that is certain, see ``array_obstacle``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER
from ray.rllib.utils.numpy import flatten_inputs_to_1d_tensor
from ray.rllib.utils.spaces.space_utils import clip_action, unsquash_action

from rlmesh_ray.models.fast_path.action_sampling import ActionSampler, as_arrays
from rlmesh_ray.models.fast_path.module_forward import FastForward, batch_of
from rlmesh_ray.rllib.fast_path.eligibility import flattener_of


class ActionBatch(NamedTuple):
    """What a module has chosen for all lanes; one row a lane everywhere."""

    actions: NDArray[Any]
    actions_for_env: NDArray[Any]
    extras: dict[str, Any]
    """Everything else that it gave: arrays, if the module is not a strange one."""

    def split(self, widths: Sequence[int]) -> "list[ActionBatch] | None":
        """Return the choices of so many lanes each; None: something has no row for each lane."""
        columns = (self.actions, self.actions_for_env, *self.extras.values())
        if any(not isinstance(c, np.ndarray) or len(c) != sum(widths) for c in columns):
            return None
        ends = np.cumsum(widths).tolist()
        return [
            ActionBatch(
                self.actions[end - width : end],
                self.actions_for_env[end - width : end],
                {name: column[end - width : end] for name, column in self.extras.items()},
            )
            for width, end in zip(widths, ends, strict=True)
        ]


class ArrayPipeline:
    """Module and connectors of a runner, without episodes. Good for one call of ``sample``.

    Args:
        runner: One for which there is no ``ineligibility``.
        explore: Whether the module explores.
    """

    def __init__(self, runner: Any, *, explore: bool) -> None:
        self._explore = explore
        self._forward = FastForward(runner.module)
        self._drawing = ActionSampler(
            runner.module, runner._module_to_env.connectors[0]._get_actions
        )
        self._fitting = runner._module_to_env.connectors[-2]
        self._space = runner.env.single_action_space
        self.flattener = flattener = flattener_of(runner)
        """What observations pass before they are kept; None: they are kept as they come."""
        self.observation_space: gymnasium.Space[Any] = (
            flattener.observation_space if flattener else runner.env.single_observation_space
        )
        """Of one lane's observations, as they are kept."""
        self._device = runner._env_to_module.connectors[-1]._device
        self._num_runners = runner.config.num_env_runners or 1
        self._steps_before = runner.num_env_steps_sampled_lifetime // self._num_runners
        self._timer = runner.metrics.log_time(RLMODULE_INFERENCE_TIMER)

    def kept(self, observation: Any) -> NDArray[Any]:
        """Return what an episode keeps of observations, one row a lane: an array.

        RLlib's FlattenObservations encodes one lane after the other, with a function that can
        encode a batch as well.
        """
        flattener = self.flattener
        if flattener is None:
            rows: NDArray[Any] = observation
            return rows
        rows = flatten_inputs_to_1d_tensor(
            flattener._remove_keys_from_dict(observation, None), flattener._input_obs_base_struct
        )
        return rows

    def to_module(self, observations: NDArray[Any]) -> dict[str, torch.Tensor]:
        """Return the forward pass's input; it may share the memory of ``observations``."""
        return batch_of(observations, self._device)

    def joined(self, inputs: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the input of one forward pass for the lanes of several slots."""
        return {Columns.OBS: torch.cat([one[Columns.OBS] for one in inputs])}

    def choose(self, to_module: dict[str, torch.Tensor], sampled: int) -> ActionBatch:
        """Run the module, and return the actions that follow from what it gives.

        Args:
            to_module: What the method of that name gave.
            sampled: Environment steps that have come in this call of ``sample``.
        """
        with self._timer:
            if self._explore:
                t = (self._steps_before + sampled) * self._num_runners
                output = self._forward.explore(to_module, t)
            else:
                output = self._forward.infer(to_module)
        self._drawing.add_to(output, explore=self._explore)
        arrays = as_arrays(output)
        actions = arrays.pop(Columns.ACTIONS)
        fitted = arrays.pop(Columns.ACTIONS_FOR_ENV, actions)
        return ActionBatch(actions, self._fitted(actions, fitted), arrays)

    def _fitted(self, actions: NDArray[Any], fitted: NDArray[Any]) -> NDArray[Any]:
        """Return what the environment gets: RLlib fits the actions themselves, if at all."""
        if not self._fitting.normalize_actions and not self._fitting.clip_actions:
            return fitted
        if type(self._space) is not gymnasium.spaces.Box:
            return actions  # there is nothing to fit about them
        fit = unsquash_action if self._fitting.normalize_actions else clip_action
        own: NDArray[Any] = fit(actions, self._space)
        return own
