"""From observations to actions for all lanes of a slot at once.

RLlib's default connectors take the batch apart lane by lane and put it together again, which is
most of the time that sampling takes. The results here are the same to the last bit; it is used
only where that is certain, see ``ineligibility``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER
from ray.rllib.utils.numpy import flatten_inputs_to_1d_tensor

from rlmesh_ray.models.fast_path.action_sampling import as_arrays
from rlmesh_ray.models.fast_path.array_connectors import ArrayConnectors
from rlmesh_ray.models.fast_path.module_forward import FastForward
from rlmesh_ray.rllib.fast_path.eligibility import flattener_of


class ActionBatch(NamedTuple):
    """A module's output for all lanes: one row for each lane everywhere."""

    actions: NDArray[Any]
    actions_for_env: NDArray[Any]
    extras: dict[str, Any]
    """The module's other outputs: arrays, with few exceptions."""

    def split(self, widths: Sequence[int]) -> "list[ActionBatch] | None":
        """Return batches of so many lanes each; None: an output has no row for each lane."""
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
    """The module and the connectors of a runner on arrays, for one call of ``sample``.

    Args:
        runner: A runner without an ``ineligibility``.
        explore: Whether the module explores.
    """

    def __init__(self, runner: Any, *, explore: bool) -> None:
        self._explore = explore
        self._inference = runner.inference_choice(explore=explore, draws=True)
        self._forward = FastForward(runner.module)
        to_module, to_env = runner.pipelines
        self._connectors = ArrayConnectors(
            to_module, to_env, runner.module, runner.env.single_action_space
        )
        self.flattener = flattener = flattener_of(runner)
        """Flattens observations before they are stored; None: they are stored as they are."""
        self.observation_space: gymnasium.Space[Any] = (
            flattener.observation_space if flattener else runner.env.single_observation_space
        )
        """Space of one lane's observations, as they are stored."""
        self._num_runners = runner.config.num_env_runners or 1
        self._steps_before = runner.num_env_steps_sampled_lifetime // self._num_runners
        self._timer = runner.metrics.log_time(RLMODULE_INFERENCE_TIMER)

    def flattened(self, observation: Any) -> NDArray[Any]:
        """Return observations as an episode stores them: an array with one row for each lane.

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

    def choose(self, observations: NDArray[Any], sampled: int) -> ActionBatch:
        """Run the module, and return its actions.

        Args:
            observations: One row for each lane.
            sampled: Environment steps of this call of ``sample`` so far.
        """
        t = (self._steps_before + sampled) * self._num_runners
        with self._timer:
            arrays = self._inference.run(self._in_torch, observations, t)
        actions_for_env = self._connectors.actions_for_env(arrays)
        arrays.pop(Columns.ACTIONS_FOR_ENV, None)
        return ActionBatch(arrays.pop(Columns.ACTIONS), actions_for_env, arrays)

    def _in_torch(self, observations: NDArray[Any], t: int) -> dict[str, Any]:
        """Return the module's outputs and actions, as RLlib computes them."""
        to_module = self._connectors.to_module(observations)
        if self._explore:
            output = self._forward.explore(to_module, t)
        else:
            output = self._forward.infer(to_module)
        self._connectors.add_actions(output, explore=self._explore)
        return as_arrays(output)
