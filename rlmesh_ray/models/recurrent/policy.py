"""A policy that is a recurrent torch module."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.actions import action_layout, zero_observations
from rlmesh_ray.models.nan_rows import IsNan, nan_rows, refused_rows
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.models.recurrent.lane_states import EpisodeStates
from rlmesh_ray.models.recurrent.state_tensors import StateTable
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.spaces.contract import EnvContract


class RecurrentTorchPolicy(TorchPolicy):
    """Runs a module with a recurrent state, one for each lane's episode.

    The module has two methods::

        initial_state() -> state                          # for one lane, without batch dimension
        forward(observations, state) -> (outputs, state)  # both states batched, N rows

    A state is a tensor, or a dict or tuple of tensors (nested as well). ``forward`` gets and
    returns it with one batch dimension first, in the structure, shapes and dtypes of
    ``initial_state`` (an LSTM of torch needs layers first: transpose). Observations and outputs
    are those of ``TorchPolicy``. A state must not depend on other rows than its own.

    Args:
        module: The module; it is switched to evaluation mode.
        device: See ``TorchPolicy``.
        buckets: See ``TorchPolicy``; rows of padding have states of zeros, which are dropped.
        inference: See ``TorchPolicy``.

    Raises:
        ConfigurationError: See ``TorchModule``; or ``initial_state`` returns no state.
        PolicyError: ``initial_state`` raised.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: str | None = None,
        buckets: Sequence[int] = (),
        inference: str = "auto",
    ) -> None:
        super().__init__(module, device=device, buckets=buckets, inference=inference)
        # A trial run takes rows of the table, so it must not run beside a batch.
        self.traits = replace(self.traits, checks_concurrently=False)
        self._initial_state: Any = module.initial_state
        self._table = StateTable(self._initial, self._module.device)
        self._lanes = EpisodeStates(self._table.allocate, self._table.release)

    def check_contract(self, contract: EnvContract) -> None:
        """Run the module on zeros: one row or two, or each size that has to be compiled.

        Raises:
            ContractMismatchError: The module does not accept the contract's observations, or
                returns states that differ from the initial one in form, or its output cannot be
                actions of the action space.
        """
        for part in self._module.trial_parts(contract.num_envs):
            observations = zero_observations(contract, part.num_rows)
            row = self._table.allocate()
            try:
                states = self._table.gather(self._table.index([row] * part.num_rows, part))
                returned = self._module.try_out(self._module.tensors(observations, part), states)
                result, after = _outputs_and_state(returned)
                action_layout(contract.action_space).check(result, part)
                self._table.kept(after, part)
            except (ConfigurationError, PolicyError) as error:
                raise self._module.misfit(error, contract, part) from error
            finally:
                self._table.release(row)

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose the greedy actions, in one forward pass for each part, and keep the new states.

        The states of a route stay unchanged if the output for one of its rows has NaN in it.

        Raises:
            PolicyError: A lane occurs twice, the module raised, or its output has another form. All
                lanes' states are unchanged.
        """
        layout = action_layout(contract.action_space)
        lanes = self._lanes.of(rows)
        actions, changes = [], []
        is_refused = np.zeros(len(lanes), np.bool_)
        for part in self._module.parts(len(lanes)):
            index = self._table.index(lanes, part)
            returned = self._module.run(
                self._module.tensors(rows.observations, part), self._table.gather(index)
            )
            result, after = _outputs_and_state(returned)
            actions.append(layout.actions(result, part))
            outputs = layout.outputs(result, part)
            is_nan = nan_rows(torch.from_numpy(output.column) for output in outputs)
            if is_nan is not None:
                is_refused[part.rows] = is_nan
            changes.append((part, index, self._table.kept(after, part)))
        if is_refused.any():
            is_refused = refused_rows(is_refused, rows)
        # Only now: if a part fails, the states of all parts must stay unchanged.
        for part, index, states in changes:
            self._keep(index, states, is_refused[part.rows])
        return layout.joined(actions)

    def _keep(self, index: torch.Tensor, states: Sequence[torch.Tensor], is_refused: IsNan) -> None:
        if is_refused.any():
            answered = torch.from_numpy(np.flatnonzero(~is_refused)).to(index.device)
            index, states = index[answered], [leaf[answered] for leaf in states]
        self._table.scatter(index, states)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free the state of a lane, or of all lanes of a route."""
        self._lanes.forget(route_key, env_index)

    def greedy_forward(self, contract: EnvContract) -> NoReturn:
        """Refuse: a graph has no memory.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError("the module has a memory, which an ONNX file cannot have")

    def _initial(self) -> Any:
        try:
            with torch.inference_mode():
                return self._initial_state()
        except Exception as error:
            raise PolicyError(
                f"the module's initial_state() raised {type(error).__name__}: {error}"
            ) from error


def _outputs_and_state(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise PolicyError(
            "the module's forward(observations, state) must return (outputs, state), not a "
            f"{type(returned).__name__}"
        )
    return returned
