"""Executes the work of a world in its environment: resets and steps of lanes."""

import logging
from collections.abc import Mapping
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, ErrorResponse, SequenceState
from rlmesh_ray.dialects.dm_env_rpc.protocol.sequences import (
    LanesReset,
    LanesStepped,
    Outcome,
    ResetLanes,
    StepLanes,
    Work,
    WorkFailed,
)
from rlmesh_ray.dialects.dm_env_rpc.server.action_defaults import LaneActions
from rlmesh_ray.dialects.dm_env_rpc.server.agent_slots import AgentSlot
from rlmesh_ray.dialects.dm_env_rpc.server.env_driver import EnvDriver
from rlmesh_ray.dialects.dm_env_rpc.server.settings import ResetOptions
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

_LOG = logging.getLogger(__name__)


class WorkExecutor:
    """The environment of a world, and its reset options.

    Args:
        host: Drives the environment.
        contract: The endpoint's.
        slots: The world's.
    """

    def __init__(
        self, host: EnvDriver, contract: EnvContract, slots: tuple[AgentSlot, ...]
    ) -> None:
        self._host = host
        self._num_lanes = contract.num_envs
        self._slots = slots
        self._actions = LaneActions(contract)
        self._has_ended = False
        # With one lane, only a reset begins the next episode.
        self.resets_itself = contract.autoreset_mode is AutoresetMode.NEXT_STEP
        """Whether stepping an ended lane begins its next episode."""
        self.is_batched = False
        """Whether one agent drives all lanes."""
        self.options: Mapping[str, object] = {}
        """Options of every reset."""
        self.reset_options = ResetOptions()
        """Seed and options of the next reset of all lanes."""

    def restart(self, reset_options: ResetOptions) -> None:
        """Set the options of the next reset of all lanes.

        Raises:
            CodecError: They have seeds for another number of lanes.
        """
        reset_options.check(self._num_lanes)
        self.reset_options = reset_options
        self.options = reset_options.options or self.options

    async def outcome(self, work: Work) -> Outcome:
        """Do ``work``; any error is returned as WorkFailed."""
        try:
            match work:
                case ResetLanes(lanes, reset_options):
                    asked = (
                        reset_options if isinstance(reset_options, ResetOptions) else ResetOptions()
                    )
                    return await self._reset(asked.lanes if self.is_batched else lanes, asked)
                case StepLanes(actions) if self.is_batched:
                    return await self._step_batch(actions)
                case StepLanes(actions):
                    return await self._step(actions)
        except CapacityError as error:
            return WorkFailed(ErrorResponse(Code.RESOURCE_EXHAUSTED, error.message), True)
        except Exception as error:  # noqa: BLE001  # outermost frame: agents wait for an answer
            _LOG.exception("a world has failed")
            return WorkFailed(ErrorResponse(Code.INTERNAL, f"the endpoint failed: {error!r}"), True)

    async def _reset(self, lanes: tuple[int, ...], asked: ResetOptions) -> Outcome:
        seeds = asked.seed
        if isinstance(seeds, int):
            seeds = tuple(range(seeds, seeds + (len(lanes) or self._num_lanes)))
        self._has_ended = False
        options = {**self.options, **asked.options}
        frame = await self._host.reset_lanes(lanes, seeds or (), options)
        if isinstance(frame, WorkFailed):
            return frame
        if not lanes and asked is self.reset_options:
            self.reset_options = ResetOptions()
        return LanesReset(frame)

    async def _step(self, actions: Mapping[int, Any]) -> Outcome:
        if len(actions) < len(self._slots):
            self._actions.fill()
        for number, values in actions.items():
            self._actions.put(self._slots[number].row, values)
        frame = await self._host.step_lanes(self._actions.columns())
        if isinstance(frame, WorkFailed):
            return frame
        states = {number: self._slots[number].tensors.state(frame) for number in actions}
        has_ended = (frame.terminated | frame.truncated).tolist()
        return LanesStepped(frame, states, has_ended)

    async def _step_batch(self, actions: Mapping[int, Any]) -> Outcome:
        if self._has_ended and not self.resets_itself:
            # As with lanes that reset themselves, this action is ignored.
            self._has_ended = False
            frame = await self._host.reset_lanes((), (), self.options)
        else:
            self._actions.put(slice(None), actions[0])
            frame = await self._host.step_lanes(self._actions.columns())
        if isinstance(frame, WorkFailed):
            return frame
        self._has_ended = bool(frame.terminated.any() or frame.truncated.any())
        return LanesStepped(frame, {0: SequenceState.RUNNING}, [False])
