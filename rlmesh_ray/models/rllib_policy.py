"""A policy from an RLlib checkpoint that acts as RLlib's own evaluation does.

What runs is what an RLlib EnvRunner runs: the env-to-module pipeline, the RLModule and the
module-to-env pipeline (RLlib 2.60, ``SingleAgentEnvRunner._sample`` is the model for the sequence
of calls). ``rllib_checkpoint`` loads them.

Three things differ on purpose, because a server is not an evaluation:

* ``explore`` is False unless asked for, whatever the training said;
* observation filters stand still: what one client sends must not change how others are served
  (RLlib's evaluation goes on updating them, unless they have ``update_stats=False``);
* rewards are 0.0 and infos empty, since the wire carries neither to a model. A pipeline that
  reads them acts on zeros; a warning is logged for RLlib's own piece that does.

**Loading a checkpoint runs code**; see ``rllib_checkpoint``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.connectors import env_to_module as to_module
from ray.rllib.connectors import module_to_env as to_env
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unbatch,
    unsquash_action,
)
from tree import map_structure

from rlmesh_ray.errors import ContractMismatchError, PolicyError
from rlmesh_ray.models.buckets import Buckets
from rlmesh_ray.models.policy import RouteRows, Rows, Traits
from rlmesh_ray.models.rllib_checkpoint import CheckpointParts, load_checkpoint
from rlmesh_ray.models.rllib_forward import RlModuleForward
from rlmesh_ray.models.rllib_weights import RllibWeights
from rlmesh_ray.models.slots import SlotStates
from rlmesh_ray.models.torch_module import torch_device
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import empty_columns, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium, to_gymnasium

# Episodes grow by one step a row; cutting costs as much as a few steps.
_STEPS_BETWEEN_CUTS = 16
# No route of a server has such a name.
_TRIAL = "\0"

_DEFAULT_ENV_TO_MODULE = (
    to_module.AddObservationsFromEpisodesToBatch,
    to_module.AddTimeDimToBatchAndZeroPad,
    to_module.AddStatesFromEpisodesToBatch,
    to_module.BatchIndividualItems,
    to_module.NumpyToTensor,
)
_DEFAULT_MODULE_TO_ENV = (
    to_env.GetActions,
    to_env.TensorToNumpy,
    to_env.UnBatchToIndividualItems,
    to_env.RemoveSingleTsTimeRankFromBatch,
    to_env.NormalizeAndClipActions,
    to_env.ListifyDataForVectorEnv,
)


class RllibPolicy:
    """Acts as the Algorithm in a checkpoint does when it is evaluated.

    One forward pass serves all rows of a batch. For a module without state behind RLlib's default
    connectors the rows stay arrays all the way, and nothing is remembered about lanes. Otherwise
    RLlib's pipelines run on one ``SingleAgentEpisode`` for each lane, as in RLlib's EnvRunner,
    cut short so that it does not grow.

    Args:
        checkpoint: Folder that ``Algorithm.save_to_path`` (or Tune), ``RLModule.save_to_path`` or
            ``MultiRLModule.save_to_path`` wrote; new API stack, single agent.
        explore: Whether to sample actions instead of taking the likeliest.
        device: Where the module runs, as torch names it.
        buckets: Row counts that the module is run with, see ``TorchPolicy``. Connectors see no
            padding.
        compile: Whether to run the module through ``torch.compile``; the first batch of each size
            waits for it.

    Raises:
        ConfigurationError: The folder is no such checkpoint, or an option cannot be had.
        PolicyError: It could not be unpickled, or built.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        explore: bool = False,
        device: str = "cpu",
        buckets: Sequence[int] = (),
        compile: bool = False,
    ) -> None:
        of_device, sizes = torch_device(device), Buckets(buckets)
        parts = load_checkpoint(checkpoint, device)
        self._spaces = parts.spaces
        forward = RlModuleForward(parts.module, explore, sizes, of_device if compile else None)
        self._weights = RllibWeights(
            parts.module,
            {
                "env_to_module_connector": parts.env_to_module,
                "module_to_env_connector": parts.module_to_env,
            },
            parts.env_steps,
            self._try,
        )
        is_plain = _is_plain(parts)
        # Other connectors may be anybody's code, and move on with the episodes before they fail.
        is_on_cpu = of_device.type == "cpu"
        self.traits = Traits(is_repeatable=is_plain, only_computes=is_plain and is_on_cpu)
        actor = _ArrayActor if is_plain else _EpisodeActor
        self._actor = actor(parts, _Run(forward, self._weights, explore))

    def check_contract(self, contract: EnvContract) -> None:
        """Compare the environment's spaces with those that the policy was trained on.

        Raises:
            ContractMismatchError: They differ.
        """
        theirs = (to_gymnasium(contract.observation_space), to_gymnasium(contract.action_space))
        if theirs != self._spaces:
            raise ContractMismatchError(
                f"the checkpoint was trained on observations {self._spaces[0]} and actions "
                f"{self._spaces[1]}, but {contract.id} has observations {theirs[0]} and actions "
                f"{theirs[1]}: serve a checkpoint that was trained on this environment"
            )

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose actions, unsquashed and clipped as the checkpoint's pipeline does it.

        Raises:
            PolicyError: A lane occurs twice, or a connector or the module raised. In the latter
                case the rows' lanes are forgotten.
        """
        try:
            return self._actor.actions(rows)
        except PolicyError:
            raise
        except Exception as error:
            for route in rows.routes:
                for slot in route.slots:
                    self._actor.forget(route.route_key, slot.env_index)
            raise PolicyError(
                f"the RLlib module or one of its connectors raised {type(error).__name__}: {error}"
            ) from error

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free the episode of a lane, or of all lanes of a route."""
        self._actor.forget(route_key, env_index)

    def get_weights(self) -> dict[str, Any]:
        """Return a copy of the module's and the connectors' state, as an EnvRunner has it."""
        return self._weights.get()

    def set_weights(self, weights: object) -> None:
        """Replace the module's weights, in place, and the connectors' states.

        Filters use the statistics that they are given, and still learn nothing from clients.
        Running episodes go on.

        Args:
            weights: The state of an EnvRunner; see ``RllibWeights.set``.

        Raises:
            PolicyError: Something in it does not fit; nothing has changed.
        """
        self._weights.set(weights)

    def _try(self) -> None:
        """Act on one row of zeros, as a lane that nobody has."""
        spec = from_gymnasium(self._spaces[0])
        observations = unflatten(spec, empty_columns(spec, 1))
        try:
            self._actor.actions(
                Rows(observations, [RouteRows(_TRIAL, [PredictSlot(0, "", 0, reset=True)])])
            )
        finally:
            self._actor.forget(_TRIAL, None)


@dataclass(frozen=True, slots=True)
class _Run:
    """How an actor runs the module."""

    forward: RlModuleForward
    weights: RllibWeights
    explore: bool

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.forward(batch, self.weights.env_steps)


class _ArrayActor:
    """RLlib's default connectors round a module without state, on whole arrays.

    Only for exactly these pieces, of which those that take a batch apart and put it together
    again are left out. The others are RLlib's own.
    """

    def __init__(self, parts: CheckpointParts, run: _Run) -> None:
        self._run = run
        self._to_tensor = parts.env_to_module.connectors[-1]
        self._get_actions, self._to_numpy = parts.module_to_env.connectors[:2]
        final = parts.module_to_env.connectors[4]
        self._action_struct = get_base_struct_from_space(parts.spaces[1])
        self._fit: Any = None
        if final.normalize_actions:
            self._fit = unsquash_action
        elif final.clip_actions:
            self._fit = clip_action
        # The pieces ask an episode whether it is a multi-agent one, and nothing else.
        self._context = {
            "rl_module": parts.module,
            "episodes": [SingleAgentEpisode()],
            "explore": run.explore,
            "shared_data": {},
        }

    def actions(self, rows: Rows) -> object:
        # Values from the wire are read-only, which a tensor cannot be.
        observations = map_structure(
            lambda part: np.require(part, requirements=["C", "W"]), rows.observations
        )
        batch = self._to_tensor(batch={Columns.OBS: observations}, **self._context)
        batch = self._run(batch)
        batch = self._get_actions(batch=batch, **self._context)
        kept = {Columns.ACTIONS, Columns.ACTIONS_FOR_ENV} & batch.keys()
        batch = self._to_numpy(batch={key: batch[key] for key in kept}, **self._context)
        if self._fit is None:
            return batch.get(Columns.ACTIONS_FOR_ENV, batch[Columns.ACTIONS])
        return self._fit(batch[Columns.ACTIONS], self._action_struct)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Nothing is remembered."""


@dataclass(slots=True)
class _Lane:
    """The running episode of a lane, and what the module said last."""

    episode: Any
    action: Any = None
    outputs: dict[str, Any] = field(default_factory=dict)


class _EpisodeActor:
    """Any pipeline and any module, on episodes, as RLlib's EnvRunner calls them."""

    def __init__(self, parts: CheckpointParts, run: _Run) -> None:
        self._parts = parts
        self._run = run
        self._shared_data: dict[str, Any] = {}
        self._lanes = SlotStates(self._fresh_lane)

    def actions(self, rows: Rows) -> object:
        lanes = self._lanes.of(rows)
        observations = unbatch(rows.observations)
        for lane, observation in zip(lanes, observations, strict=True):
            _advance(lane, observation)
        outputs = self._outputs([lane.episode for lane in lanes], observations)
        actions = outputs.pop(Columns.ACTIONS)
        actions_for_env = outputs.pop(Columns.ACTIONS_FOR_ENV, actions)
        for row, (lane, action) in enumerate(zip(lanes, unbatch(actions), strict=True)):
            lane.action = action
            lane.outputs = {key: column[row] for key, column in outputs.items()}
            if len(lane.episode) >= _STEPS_BETWEEN_CUTS:
                lane.episode = lane.episode.cut(len_lookback_buffer=self._parts.lookback)
        return actions_for_env

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._lanes.forget(route_key, env_index)

    def _fresh_lane(self) -> _Lane:
        observation_space, action_space = self._parts.spaces
        spaces = {"observation_space": observation_space, "action_space": action_space}
        return _Lane(SingleAgentEpisode(**spaces))

    def _outputs(self, episodes: list[Any], observations: list[Any]) -> dict[str, Any]:
        context = {
            "rl_module": self._parts.module,
            "episodes": episodes,
            "explore": self._run.explore,
            "shared_data": self._shared_data,
            "metrics": None,
        }
        infos: list[dict[str, Any]] = [{} for _ in episodes]
        # Batched pieces take the observations from the arguments, not from the episodes.
        batch = self._parts.env_to_module(
            batch={}, **context, **{Columns.OBS: observations, Columns.INFOS: infos}
        )
        batch = self._run(batch)
        return dict(self._parts.module_to_env(batch=batch, **context))


def _advance(lane: _Lane, observation: Any) -> None:
    if not lane.episode.is_reset:
        lane.episode.add_env_reset(observation=observation, infos={})
    else:
        lane.episode.add_env_step(
            observation=observation,
            action=lane.action,
            reward=0.0,
            infos={},
            extra_model_outputs=lane.outputs,
        )


def _is_plain(parts: CheckpointParts) -> bool:
    """Whether arrays may go past the episodes, with the same result."""
    return (
        not parts.module.is_stateful()
        and _types(parts.env_to_module.connectors) == _DEFAULT_ENV_TO_MODULE
        and _types(parts.module_to_env.connectors) == _DEFAULT_MODULE_TO_ENV
    )


def _types(pieces: Sequence[Any]) -> tuple[type, ...]:
    return tuple(type(piece) for piece in pieces)
