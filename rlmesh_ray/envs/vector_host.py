"""Runs the environment of one session: columns in, columns out, every value checked.

What the environment raises passes through; what its values and the client's break of the
conformance rules comes back as a Failure (edition 2026.06, "Value Conformance").
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gymnasium.vector import VectorEnv

from rlmesh_ray.envs.commands import (
    CallCommand,
    CallReply,
    RenderReply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
    TextColumns,
)
from rlmesh_ray.envs.hosted import HostedVector, autoreset_mode
from rlmesh_ray.envs.lanes import LaneVectorEnv
from rlmesh_ray.envs.picture import as_frames, encode_png
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.block import Block, Results
from rlmesh_ray.spaces.conformance import Checker, Deviation, Policy
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium

WARNING_KEY = "rlmesh.conformance.warning"
"""Reserved key of the infos (edition 2026.06, "Conformance warnings")."""


class Lanes(Protocol):
    """A vector that is driven by columns: LaneVectorEnv or HostedVector."""

    observations: list[Column]
    results: Results
    final_infos: dict[int, dict[str, Any]]

    def use(self, observations: list[Column], results: Results) -> None:
        """Write into these buffers from now on."""

    def reset_lanes(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int | None],
        options: Mapping[str, object] | None,
    ) -> dict[str, Any]:
        """Start new episodes in ``lanes``; return their infos."""

    def step_columns(self, actions: Sequence[Column]) -> dict[str, Any]:
        """Step all lanes; return their infos."""

    def store(self) -> None:
        """Put the new observations into the buffers; the environment has done its part."""

    def call_lanes(
        self, name: str, arguments: Sequence[object], lanes: Sequence[int]
    ) -> Sequence[object]:
        """Call attribute ``name`` of the environment of each of ``lanes``; return the results."""

    def render(self) -> Any:
        """Return frames."""

    def close(self) -> None:
        """Release the environment."""


class VectorHost:
    """One environment, driven by the commands of one session.

    Args:
        vector: Owned from now on.
        policy: How range deviations are dealt with.
        name: The contract's id, if the environment knows no better one.

    Raises:
        UnsupportedSpaceError: The contract cannot express the environment's spaces.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any], policy: Policy, name: str) -> None:
        self._lanes: Lanes = vector if isinstance(vector, LaneVectorEnv) else HostedVector(vector)
        self._draws = vector.render_mode == "rgb_array"
        self._was_reset = False
        self._warned: set[tuple[str, str]] = set()
        self.contract = describe(vector, name)
        """What the environment is."""
        self._action_checker = Checker(leaves(self.contract.action_space), policy)
        self._observation_checker = Checker(leaves(self.contract.observation_space), policy)
        self._actions: list[Column] = []

    def use(self, block: Block) -> None:
        """Take actions from ``block`` and leave everything else there, from now on."""
        self._actions = block.actions
        self._lanes.use(block.observations, block.results)

    def reset(self, command: ResetCommand) -> ResetReply | Failure:
        """Start new episodes, in all lanes or in some."""
        lanes = command.lanes or range(self.contract.num_envs)
        infos = self._lanes.reset_lanes(lanes, command.seeds, command.options)
        try:
            deviations = self._stored()
        except ConformanceError as error:
            return _bad_observation(error)
        self._was_reset = True
        return ResetReply(self._with_warnings(infos, deviations), self._texts())

    def step(self, command: StepCommand) -> StepReply | Failure:
        """Apply the actions in the block, if they conform."""
        actions = self._own_actions(command.text_columns)
        try:
            deviations = _prefixed("action", self._action_checker.check(actions))
        except ConformanceError as error:
            return Failure(FailureKind.BAD_ACTION, f"action: {error}")
        infos = self._lanes.step_columns(actions)
        try:
            deviations += self._stored()
        except ConformanceError as error:
            return _bad_observation(error)
        return StepReply(
            self._with_warnings(infos, deviations), self._lanes.final_infos, self._texts()
        )

    def call(self, command: CallCommand) -> CallReply:
        """Call into the lanes, also before the first reset."""
        lanes = command.lanes or range(self.contract.num_envs)
        return CallReply(tuple(self._lanes.call_lanes(command.name, command.arguments, lanes)))

    def render(self) -> RenderReply:
        """Draw all lanes; no frame before the first reset or in another render mode."""
        if not self._draws or not self._was_reset:
            return RenderReply(None)
        frames = as_frames(self._lanes.render())
        return RenderReply(encode_png(frames) if frames else None)

    def close(self) -> None:
        """Close the environment."""
        self._lanes.close()

    def _own_actions(self, text_columns: TextColumns) -> list[Column]:
        """Return copies: an environment may keep its action, the block's is overwritten."""
        texts = iter(text_columns)
        return [
            next(texts) if isinstance(column, tuple) else column.copy() for column in self._actions
        ]

    def _stored(self) -> list[tuple[str, Deviation]]:
        self._lanes.store()
        deviations = self._observation_checker.check(self._lanes.observations)
        return _prefixed("observation", deviations)

    def _texts(self) -> TextColumns:
        return tuple(column for column in self._lanes.observations if isinstance(column, tuple))

    def _with_warnings(
        self, infos: dict[str, Any], deviations: list[tuple[str, Deviation]]
    ) -> dict[str, Any]:
        """Add what this session has not been told yet (once per kind and path)."""
        texts = []
        for place, deviation in deviations:
            if (deviation.kind, place) not in self._warned:
                self._warned.add((deviation.kind, place))
                texts.append(f"{place}: {deviation.message}")
        return {**infos, WARNING_KEY: texts} if texts else infos


def describe(vector: VectorEnv[Any, Any, Any], name: str) -> EnvContract:
    """Return the contract of ``vector``.

    Args:
        vector: The environment.
        name: Its id, if it has no spec.

    Raises:
        ConfigurationError: Its autoreset mode or its spaces cannot be expressed.
    """
    metadata = {key: value for key, value in vector.metadata.items() if key != "autoreset_mode"}
    return EnvContract(
        id=vector.spec.id if vector.spec else name,
        observation_space=from_gymnasium(vector.single_observation_space),
        action_space=from_gymnasium(vector.single_action_space),
        num_envs=vector.num_envs,
        autoreset_mode=autoreset_mode(vector),
        render_mode=vector.render_mode or "",
        metadata=metadata,
    )


def _prefixed(root: str, deviations: Iterable[Deviation]) -> list[tuple[str, Deviation]]:
    return [
        (f"{root}.{deviation.path}" if deviation.path else root, deviation)
        for deviation in deviations
    ]


def _bad_observation(error: ConformanceError) -> Failure:
    return Failure(FailureKind.BAD_OBSERVATION, f"observation: {error}")
