"""A policy from an RLlib checkpoint that acts as RLlib's own evaluation does.

It runs the parts that an RLlib EnvRunner runs: the env-to-module pipeline, the RLModule and the
module-to-env pipeline, in the order of calls of ``SingleAgentEnvRunner._sample`` (RLlib 2.60).
``rllib.checkpoint`` loads them.

Three things differ on purpose, because a server is not an evaluation:

* ``explore`` is False by default, even if the training explored in evaluation;
* observation filters are not updated: observations of one client must not change the actions for
  other clients (RLlib's evaluation updates them, unless they have ``update_stats=False``);
* rewards are 0.0 and infos empty, since the protocol sends neither to a model. A pipeline that
  reads them acts on zeros; a warning is logged for RLlib's own connector that does.

**Loading a checkpoint runs code**; see ``rllib.checkpoint``.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.numpy import SMALL_NUMBER
from ray.rllib.utils.spaces.space_utils import unbatch
from ray.rllib.utils.torch_utils import convert_to_torch_tensor, flatten_inputs_to_1d_tensor
from tree import flatten as flatten_tree
from tree import map_structure

from rlmesh_ray.errors import (
    ConfigurationError,
    PolicyError,
    RlmeshError,
)
from rlmesh_ray.models.actions import (
    BatchBuckets,
    IsNan,
    array_of,
    nan_rows,
    refusable,
    refused_rows,
    require_spaces,
    spec_of,
    value_outside,
)
from rlmesh_ray.models.policy import (
    EpisodeStates,
    PolicyTraits,
    RouteRows,
    Rows,
    checked_horizon,
)
from rlmesh_ray.models.rllib.checkpoint import CheckpointParts, load_checkpoint, pieces
from rlmesh_ray.models.rllib.fast_path import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    ArrayConnectors,
    as_arrays,
    connector_types,
)
from rlmesh_ray.models.rllib.forward import BucketedForward, forward_with_logits
from rlmesh_ray.models.torch.module import (
    Pairs,
    check_weights,
    is_trusted,
    only_computes,
    replace_weights,
    torch_device,
    weights_of,
)
from rlmesh_ray.models.torch.policy import GreedyForward, LeafAction, dtype_of
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Leaf, drop_unit_axis, empty_columns, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, MultiDiscreteSpec

# A route key that no server uses.
_TRIAL = "\0"
# Names in the state of an EnvRunner (RLlib 2.60, ``SingleAgentEnvRunner.get_state``), which is the
# form of the policy's weights.
_MODULE, _MODULE_ID = "rl_module", "default_policy"
_ENV_STEPS = "num_env_steps_sampled_lifetime"
# The columns of a module's output that become actions, or state.
_ACTED_ON = {
    Columns.ACTION_DIST_INPUTS,
    Columns.ACTIONS,
    Columns.ACTIONS_FOR_ENV,
    Columns.STATE_OUT,
}


class RllibPolicy:
    """Acts as the Algorithm in a checkpoint does when it is evaluated.

    One forward pass serves all rows of a batch. For a module without state behind RLlib's default
    connectors the rows stay arrays all the way, and there is no state of lanes. Otherwise RLlib's
    pipelines run on one ``SingleAgentEpisode`` for each lane, as in RLlib's EnvRunner, which is cut
    from time to time so that it does not grow.

    Args:
        checkpoint: Folder that ``Algorithm.save_to_path`` (or Tune), ``RLModule.save_to_path`` or
            ``MultiRLModule.save_to_path`` wrote; new API stack, single agent.
        explore: Whether to sample actions instead of taking the likeliest.
        device: Torch's name of the module's device.
        buckets: Row counts that the module is run with, see ``TorchPolicy``. Connectors get no
            padding.
        inference: See ``TorchPolicy``. With ``"auto"`` the first batch waits where the module is
            compiled; with ``"compiled"`` that is done here, where connectors take zeros.
        horizon: How many actions the module chooses at once for each row; None: its attribute
            ``horizon``, or 1. Above 1, its actions (or the inputs of their distribution) are
            ``(N, horizon, ...)``.

    Raises:
        ConfigurationError: The folder is no such checkpoint, an option is not available, or the
            module cannot be compiled.
        PolicyError: It could not be unpickled, or built.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        explore: bool = False,
        device: str = "cpu",
        buckets: Sequence[int] = (),
        inference: str = "auto",
        horizon: int | None = None,
    ) -> None:
        of_device, sizes = torch_device(device), BatchBuckets(buckets)
        parts = self._parts = load_checkpoint(checkpoint, device)
        self._spaces = parts.spaces
        self._forward = BucketedForward(parts.module, explore, sizes, of_device, inference)
        self._forward.env_steps = parts.env_steps
        self._pipelines = {
            "env_to_module_connector": parts.env_to_module,
            "module_to_env_connector": parts.module_to_env,
        }
        is_array = allows_arrays(parts)
        own = getattr(parts.module, "horizon", None)
        has_state = parts.module.is_stateful()
        self._horizon = checked_horizon(own, horizon, "the RLModule", has_state=has_state)
        if self._horizon > 1 and not is_array:
            raise ConfigurationError(
                f"horizon={self._horizon} needs RLlib's default connectors, and the checkpoint has "
                "others, which handle one action at a time"
            )
        kind = ArrayInference if is_array else EpisodeInference
        self._actor = kind(parts, self._run_module, explore=explore)
        self.traits = PolicyTraits(
            # Custom connectors may change their state before they raise.
            is_repeatable=all(
                map(is_trusted, map(type, pieces(parts.env_to_module, parts.module_to_env)))
            ),
            only_computes=is_array
            and not (inference == "compiled" and of_device.type != "cpu")
            and only_computes(parts.module, of_device)
            and _samples_as_known(parts.module),
            observation_space=spec_of(self._spaces[0]),
            action_space=spec_of(self._spaces[1]),
            kind="RLlib checkpoint",
            algorithm=parts.algorithm,
            checks_concurrently=True,
            horizon=self._horizon,
            torch_reason=self._forward.inference.torch_reason,
        )
        action_space = self.traits.action_space
        self._has_numbers = action_space is not None and any(
            isinstance(leaf.spec, BoxSpec) and not leaf.shape for leaf in leaves(action_space)
        )
        """Whether some actions are a Box of shape (), to which RLlib gives an axis."""
        if inference == "compiled" and of_device.type == "cpu":
            with contextlib.suppress(PolicyError):  # connectors may refuse zeros
                self._set_pipelines(self._states())  # which acts once

    def check_contract(self, contract: EnvContract) -> None:
        """Compare the environment's spaces with those that the policy was trained on.

        Raises:
            ContractMismatchError: They differ.
        """
        require_spaces(
            self._spaces,
            contract,
            "the checkpoint was trained on",
            "serve a checkpoint that was trained on this environment",
        )

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose actions, unsquashed and clipped as the checkpoint's pipeline does it.

        A row for which the module's output has NaN in it gets an action outside its space: the
        server's check refuses its request, and no other. The states of the request's lanes are
        unchanged.

        Raises:
            PolicyError: A lane occurs twice, a connector or the module raised, or all rows have
                NaN. The states of the rows' lanes are unchanged, except that ended episodes begin
                anew.
        """
        try:
            actions, is_nan = self._actor.act(rows)
            if self._has_numbers:
                spec, num_axes = contract.action_space, 1 if self._horizon == 1 else 2
                parts = zip(leaves(spec), flatten(spec, actions), strict=True)
                actions = unflatten(spec, [drop_unit_axis(*part, num_axes) for part in parts])
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(
                f"the RLlib module or one of its connectors raised {type(error).__name__}: {error}"
            ) from error
        if is_nan is None:
            return actions
        if self._horizon > 1:
            raise PolicyError(
                f"the module's output has NaN in it for {is_nan.sum()} of {len(is_nan)} rows"
            )
        return refusable(from_gymnasium(self._spaces[1]), actions, is_nan)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._actor.forget(route_key, env_index)

    def greedy_forward(self, contract: EnvContract) -> GreedyForward:
        return greedy_forward(self._parts, contract)

    def get_weights(self) -> dict[str, Any]:
        return {
            _MODULE: {_MODULE_ID: weights_of(self._parts.module)},
            **self._states(),
            _ENV_STEPS: self._forward.env_steps,
        }

    def set_weights(self, weights: object) -> None:
        """Replace the module's weights, in place, and the connectors' states, as far as given.

        Filters use the new statistics, and are still not updated by clients' observations. Running
        episodes continue.

        Args:
            weights: The state of an EnvRunner: ``rl_module`` (the module's state, or a dict with it
                as ``default_policy``; tensors for learning only may be missing), the pipelines'
                states and ``num_env_steps_sampled_lifetime``; other keys are ignored.

        Raises:
            PolicyError: It has none of these, or a part that does not fit; nothing has changed.
        """
        known = {_MODULE, *self._pipelines, _ENV_STEPS}
        if not isinstance(weights, Mapping) or not known & weights.keys():
            raise PolicyError(
                "weights of an RLlib policy are the state of an EnvRunner: a mapping with "
                f"{_MODULE} and the connectors' states"
            )
        env_steps = weights.get(_ENV_STEPS, self._forward.env_steps)
        if not isinstance(env_steps, int | np.integer):
            raise PolicyError(f"{_ENV_STEPS} is a {type(env_steps).__name__}; it must be a count")
        pairs = _module_pairs(self._parts.module, weights[_MODULE]) if _MODULE in weights else []
        self._set_pipelines({n: weights[n] for n in self._pipelines.keys() & weights.keys()})
        replace_weights(pairs)
        self._forward.env_steps = int(env_steps)
        self._forward.inference.load()

    def _run_module(self, batch: dict[str, Any]) -> tuple[dict[str, Any], IsNan | None]:
        outputs = self._forward(batch)
        acted_on = {key: outputs[key] for key in _ACTED_ON & outputs.keys()}
        is_nan = nan_rows(
            array_of(each) for each in flatten_tree(acted_on) if each.is_floating_point()
        )
        if is_nan is not None:
            outputs |= map_structure(lambda output: zeroed(output, is_nan), acted_on)
        return outputs, is_nan

    def _states(self) -> dict[str, Any]:
        return {name: copy.deepcopy(each.get_state()) for name, each in self._pipelines.items()}

    def _set_pipelines(self, states: Mapping[str, Any]) -> None:
        """Replace states, and act once, so that those that do not fit raise before a request."""
        before = self._states()
        try:
            for name, state in states.items():
                _require_pieces(name, state, self._pipelines[name])
                self._pipelines[name].set_state(copy.deepcopy(state))
            if states:
                self._try()
            for name, state in states.items():
                # Undo the changes that the trial has made.
                self._pipelines[name].set_state(copy.deepcopy(state))
        except Exception as error:
            # Custom connectors may raise any error.
            for name, state in before.items():
                self._pipelines[name].set_state(state)
            if isinstance(error, RlmeshError):
                raise
            raise PolicyError(
                f"the connectors cannot act with their new state ({type(error).__name__}: "
                f"{error}); nothing has changed"
            ) from error

    def _try(self) -> None:
        spec = from_gymnasium(self._spaces[0])
        observations = unflatten(spec, empty_columns(spec, 1))
        try:
            self._actor.act(
                Rows(observations, [RouteRows(_TRIAL, [PredictSlot(0, "", 0, reset=True)])])
            )
        finally:
            self._actor.forget(_TRIAL, None)


def _samples_as_known(module: Any) -> bool:
    try:
        kinds = module.get_inference_action_dist_cls(), module.get_exploration_action_dist_cls()
    except (NotImplementedError, ValueError):
        return False  # the module has none, and chooses its actions itself
    return all(map(is_trusted, kinds))


def zeroed(output: torch.Tensor, is_nan: IsNan) -> torch.Tensor:
    """Return a copy with zeros in these rows; integers, which cannot be NaN, stay."""
    if not output.is_floating_point():
        return output
    rows = torch.from_numpy(is_nan).to(output.device)
    return output.masked_fill(rows.view(-1, *[1] * (output.dim() - 1)), 0.0)


# --- weights -------------------------------------------------------------------------------


def _module_pairs(module: Any, state: object) -> Pairs:
    if isinstance(state, Mapping) and _MODULE_ID in state:
        state = state[_MODULE_ID]
    own = module.state_dict().keys()
    for_learning = _for_learning(module)
    if isinstance(state, Mapping):
        # A module that was built for inference alone does not have the other tensors.
        state = {k: v for k, v in state.items() if k in own or not for_learning(str(k))}
    return check_weights(module, state, optional=[k for k in own if for_learning(k)])


def _for_learning(module: Any) -> Callable[[str], bool]:
    attributes: list[str] = getattr(module, "get_non_inference_attributes", list)()
    prefixes = tuple(f"{attribute}." for attribute in attributes)
    return lambda name: name in attributes or name.startswith(prefixes)


def _require_pieces(name: str, state: Any, pipeline: Any) -> None:
    """Refuse states of connectors that the pipeline lacks; RLlib would ignore them silently."""
    pieces = [type(piece).__name__ for piece in pipeline.connectors]
    unknown = sorted(map(str, set(state) - set(pieces))) if isinstance(state, Mapping) else [name]
    if unknown:
        raise PolicyError(
            f"{name} has state of {', '.join(unknown)}, but the policy's pieces are "
            f"{', '.join(pieces)}; nothing has changed"
        )


# --- arrays where they give the same, else episodes -----------------------------------------------

# Episodes grow by one step a row; cutting costs as much as a few steps.
STEPS_BETWEEN_CUTS = 16
RunModule = Callable[[dict[str, Any]], tuple[dict[str, Any], IsNan | None]]
"""Runs the policy's module: from a batch to its outputs, and the rows that had NaN in them.

Rows with NaN are zeros in the outputs: sampling fails for all rows if one has NaN."""
Acted = tuple[object, IsNan | None]
"""A batch of actions, one for each row; and the rows for which the module's output was NaN: their
actions are invalid, and the states of all lanes of their requests unchanged. None: there are no
such rows."""


def allows_arrays(parts: CheckpointParts) -> bool:
    """Return whether ``ArrayInference`` chooses the same actions as ``EpisodeInference``."""
    return not parts.module.is_stateful() and _own_connectors(parts) == []


def _own_connectors(parts: CheckpointParts) -> list[Any] | None:
    """Return the connectors before RLlib's default ones; None: not all of these are there."""
    before = max(len(connector_types(parts.env_to_module)) - len(DEFAULT_ENV_TO_MODULE), 0)
    is_default = (
        connector_types(parts.env_to_module)[before:] == DEFAULT_ENV_TO_MODULE
        and connector_types(parts.module_to_env) == DEFAULT_MODULE_TO_ENV
    )
    return parts.env_to_module.connectors[:before] if is_default else None


class ArrayInference:
    """A module without state between RLlib's default connectors, on whole arrays.

    Args:
        parts: What the checkpoint holds; see ``allows_arrays``.
        run: Runs its module.
        explore: Whether to sample actions instead of taking the likeliest.
    """

    def __init__(self, parts: CheckpointParts, run: RunModule, *, explore: bool) -> None:
        self._run = run
        self._connectors = ArrayConnectors(
            parts.env_to_module,
            parts.module_to_env,
            parts.module,
            parts.spaces[1],
            explore=explore,
        )

    def act(self, rows: Rows) -> Acted:
        given = rows.observations
        is_array = isinstance(given, np.ndarray)
        observations = _writable(given) if is_array else map_structure(_writable, given)
        outputs, is_nan = self._run(self._connectors.to_module(observations))
        self._connectors.add_actions(outputs)
        kept = {Columns.ACTIONS, Columns.ACTIONS_FOR_ENV} & outputs.keys()
        arrays = as_arrays({key: outputs[key] for key in kept})
        return self._connectors.actions_for_env(arrays), is_nan

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: this keeps no state of lanes."""


def _writable(column: Any) -> Any:
    """Return a writable array, a copy if needed: received values are read-only, unlike tensors."""
    return np.require(column, requirements=["C", "W"])


@dataclass(slots=True)
class _LaneEpisode:
    """The running episode of a lane, and the module's last output."""

    episode: Any
    num_kept: int | None = None
    """Number of its steps for which actions were chosen; None: not even for the first observation.
    """
    action: Any = None
    outputs: dict[str, Any] = field(default_factory=dict)

    def advance(self, observation: Any) -> None:
        if not self.episode.is_reset:
            self.episode.add_env_reset(observation=observation, infos={})
        else:
            self.episode.add_env_step(
                observation=observation,
                action=self.action,
                reward=0.0,
                infos={},
                extra_model_outputs=self.outputs,
            )

    def keep(self, action: Any, outputs: dict[str, Any], lookback: int) -> None:
        self.action, self.outputs = action, outputs
        if len(self.episode) >= STEPS_BETWEEN_CUTS:
            self.episode = self.episode.cut(len_lookback_buffer=lookback)
        self.num_kept = len(self.episode)

    def undo(self) -> None:
        """Remove an observation for which no action was chosen, if there is one."""
        now = self.episode
        if self.num_kept is None:
            self.episode = _fresh_episode(now.observation_space, now.action_space)
        else:
            self.episode = now.slice(slice(0, self.num_kept))
            self.episode.custom_data.update(now.custom_data)


class EpisodeInference:
    """Any pipeline and any module, on episodes, as RLlib's EnvRunner calls them.

    Args:
        parts: What the checkpoint holds.
        run: Runs its module.
        explore: As of ``ArrayInference``.
    """

    def __init__(self, parts: CheckpointParts, run: RunModule, *, explore: bool) -> None:
        self._parts = parts
        self._run, self._explore = run, explore
        self._shared_data: dict[str, Any] = {}
        self._lanes = EpisodeStates(self._fresh_lane)

    def act(self, rows: Rows) -> Acted:
        """Choose one action for each row.

        If it raises, the states of lanes are unchanged; connectors with a state may have changed
        it.

        Raises:
            PolicyError: A lane occurs twice.
        """
        lanes = self._lanes.of(rows)
        try:
            return self._act(lanes, rows)
        except Exception:
            for lane in lanes:
                lane.undo()
            raise

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._lanes.forget(route_key, env_index)

    def _act(self, lanes: Sequence[_LaneEpisode], rows: Rows) -> Acted:
        observations = unbatch(rows.observations)
        for lane, observation in zip(lanes, observations, strict=True):
            lane.advance(observation)
        outputs, is_nan = self._outputs([lane.episode for lane in lanes], observations)
        actions = outputs.pop(Columns.ACTIONS)
        actions_for_env = outputs.pop(Columns.ACTIONS_FOR_ENV, actions)
        of_lanes = [
            (action, {key: column[row] for key, column in outputs.items()})
            for row, action in enumerate(unbatch(actions))
        ]
        is_lost = np.zeros(len(lanes), np.bool_) if is_nan is None else refused_rows(is_nan, rows)
        # The state of a lane is stored after all calls that can fail, for all lanes.
        for lane, of_lane, is_undone in list(zip(lanes, of_lanes, is_lost, strict=True)):
            if is_undone:
                lane.undo()
            else:
                lane.keep(*of_lane, self._parts.lookback)
        return actions_for_env, is_nan

    def _fresh_lane(self) -> _LaneEpisode:
        return _LaneEpisode(_fresh_episode(*self._parts.spaces))

    def _outputs(
        self, episodes: list[Any], observations: list[Any]
    ) -> tuple[dict[str, Any], IsNan | None]:
        context = {
            "rl_module": self._parts.module,
            "episodes": episodes,
            "explore": self._explore,
            "shared_data": self._shared_data,
            "metrics": None,
        }
        infos: list[dict[str, Any]] = [{} for _ in episodes]
        # Batched pieces take the observations from the arguments, not from the episodes.
        batch = self._parts.env_to_module(
            batch={}, **context, **{Columns.OBS: observations, Columns.INFOS: infos}
        )
        batch, is_nan = self._run(batch)
        return dict(self._parts.module_to_env(batch=batch, **context)), is_nan


def _fresh_episode(observation_space: Any, action_space: Any) -> Any:
    return SingleAgentEpisode(observation_space=observation_space, action_space=action_space)


# --- a checkpoint as a function of tensors, for export --------------------------------------------

# RLlib's default connectors are arithmetic on whole batches. So are FlattenObservations and
# MeanStdFilter, which may stand before them; anything else is refused.

Tensor = torch.Tensor
Connector = Callable[[Any], Any]
"""From a batch of observations, nested as the space is, to another."""


def greedy_forward(parts: CheckpointParts, contract: EnvContract) -> GreedyForward:
    """Return a checkpoint's policy as a function of tensors.

    Raises:
        ConfigurationError: It has a memory, or connectors that are not known here.
    """
    module = parts.module
    if module.is_stateful():
        raise ConfigurationError("its module has a memory, which an ONNX file cannot have")
    connectors = _connectors_of(parts)
    fitting = next(
        piece
        for piece in parts.module_to_env.connectors
        if isinstance(piece, NormalizeAndClipActions)
    )
    fits = [_fit_of(leaf, fitting) for leaf in leaves(contract.action_space)]

    def act(called: Any, *columns: Tensor) -> list[LeafAction]:
        observations = unflatten(contract.observation_space, columns)
        for connector in connectors:
            observations = connector(observations)
        # As RLlib's NumpyToTensor does.
        batch = convert_to_torch_tensor({Columns.OBS: observations})
        inputs, actions = _chosen(called, forward_with_logits(called, batch, explore=False))
        # A row with NaN must not become an action.
        is_nan = inputs.isnan().any(dim=-1)
        found = flatten(contract.action_space, actions)
        return [
            LeafAction(fit(action, is_nan), partial(_values, leaf, inputs))
            for leaf, fit, action in zip(leaves(contract.action_space), fits, found, strict=True)
        ]

    return GreedyForward(module, act)


def _chosen(module: Any, outputs: dict[str, Any]) -> tuple[Tensor, Any]:
    if Columns.ACTIONS in outputs:
        raise ConfigurationError(f"{type(module).__name__} chooses its actions itself")
    inputs = outputs[Columns.ACTION_DIST_INPUTS]
    distribution = module.get_inference_action_dist_cls().from_logits(inputs)
    return inputs, distribution.to_deterministic().sample()


def _values(leaf: Leaf, inputs: Tensor) -> Sequence[Tensor]:
    match leaf.spec:
        case DiscreteSpec(n=n) if not leaf.path and inputs.shape[-1] == n:
            return [inputs]
        case MultiDiscreteSpec(nvec=nvec) if not leaf.path and inputs.shape[-1] == sum(nvec):
            return torch.split(inputs, list(nvec), dim=-1)
    return []


# --- from the environment to the module ----------------------------------------------------


def _connectors_of(parts: CheckpointParts) -> list[Connector]:
    """Return the connectors before RLlib's default ones.

    Raises:
        ConfigurationError: There is one that is not known.
    """
    own = _own_connectors(parts)
    unknown = sorted({type(each).__name__ for each in own or () if type(each) not in _KNOWN})
    if own is None or unknown:
        named = f" ({', '.join(unknown)})" if unknown else ""
        raise ConfigurationError(
            f"its connectors{named} are other ones than RLlib's default, FlattenObservations and "
            "MeanStdFilter, which a graph can express"
        )
    return [_KNOWN[type(piece)](piece) for piece in own]


def _flattening(piece: Any) -> Connector:
    if piece._multi_agent or piece._as_learner_connector:
        raise ConfigurationError("FlattenObservations is set up for several agents or a learner")

    def flattened(observations: Any) -> Tensor:
        kept = piece._remove_keys_from_dict(observations, None)
        rows: Tensor = flatten_inputs_to_1d_tensor(kept, piece._input_obs_base_struct)
        return rows

    return flattened


def _filtering(piece: Any) -> Connector:
    piece.get_state()  # makes the filters, if there are none yet
    filters = piece._filters
    if piece._multi_agent or not isinstance(filters[None].shape, np.ndarray):
        raise ConfigurationError("MeanStdFilter is set up for several agents or several arrays")
    kept = filters[None]
    mean, deviation = (
        torch.as_tensor(np.asarray(each, np.float64))
        for each in (kept.running_stats.mean, kept.running_stats.std + SMALL_NUMBER)
    )

    def filtered(observations: Tensor) -> Tensor:
        values = observations.double()
        if kept.demean:
            values = values - mean
        if kept.destd:
            values = values / deviation
        if kept.clip:
            values = values.clamp(-kept.clip, kept.clip)
        return values.to(observations.dtype)

    return filtered


_KNOWN: dict[type[Any], Callable[[Any], Connector]] = {
    FlattenObservations: _flattening,
    MeanStdFilter: _filtering,
}


# --- from the module to the environment ----------------------------------------------------


def _fit_of(leaf: Leaf, fitting: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what makes a module's actions those of the environment.

    It does what RLlib's NormalizeAndClipActions does, gives them the leaf's shape (see
    ``drop_unit_axis``), and takes actions out of the space in rows of NaN.

    Args:
        leaf: A leaf of the action space.
        fitting: The connector.
    """
    fitted = _fitted_to(leaf.spec, fitting) if isinstance(leaf.spec, BoxSpec) else None
    outside = value_outside(leaf)
    mark = None if outside is None else np.array(outside).astype(leaf.dtype).item()

    def fit(action: Tensor, is_nan: Tensor) -> Tensor:
        action = (fitted(action) if fitted else action).to(dtype_of(leaf))
        if isinstance(leaf.spec, BoxSpec) and not leaf.shape and action.dim() == 2:
            action = action.squeeze(-1)
        if mark is None:
            return action
        return action.masked_fill(is_nan.view(-1, *[1] * (action.dim() - 1)), mark)

    return fit


def _fitted_to(spec: BoxSpec, fitting: Any) -> Callable[[Tensor], Tensor] | None:
    bounds = [np.array(bound, spec.dtype) for bound in spec.bounds()]
    low, high = map(torch.from_numpy, bounds)

    def clipped(action: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(action, low), high)

    if not fitting.normalize_actions:
        return clipped if fitting.clip_actions else None
    if np.isinf(bounds).any():
        return None
    if not low.is_floating_point():
        return lambda action: low + action
    return lambda action: clipped(low + (action + 1.0) * (high - low) / 2.0)
