"""Lanes as agents, each on a stream of its own: a vector step is one round trip.

All requests are sent before the first answer is awaited. After an answer that is an error the other
answers are received, too, so that all streams stay at the same request.

If the lanes are those of one vector, the server steps them together, once all agents with a running
sequence have sent a Step. It would wait for a lane that has just begun a sequence, whose next Step
depends on the answers to the others. So lanes whose episodes have ended begin the next ones after
these answers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.frames import RequestKind, WorldResponse
from rlmesh_ray.dialects.dm_env_rpc.client.lane_states import LaneStates, TerminationRules
from rlmesh_ray.dialects.dm_env_rpc.client.lane_tensors import LaneTensors
from rlmesh_ray.dialects.dm_env_rpc.client.settings import Settings
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import JoiningAgent
from rlmesh_ray.dialects.dm_env_rpc.client.world_transport import VectorStep, require_unchanged
from rlmesh_ray.errors import LocalProtocolError, RemoteEnvError, RemoteProtocolError
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import SpaceSpec


@dataclass(frozen=True, slots=True)
class ServerQuirks:
    """Properties of a server that its client must know."""

    rules: TerminationRules
    """When TERMINATED is a truncation."""
    seed: str | None
    """The reset setting that takes a lane's seed, if there is one."""
    begin_last: bool
    """Whether lanes begin sequences after the other lanes were answered; see the module."""


class LaneStreams:
    """The streams of a session's lanes; see the module.

    Args:
        agents: Joined; one a lane.
        tensors: One for each agent.
        observation_space: A lane's.
        quirks: The server's.
        address: The server's, for messages.
    """

    def __init__(
        self,
        agents: Sequence[JoiningAgent],
        tensors: Sequence[LaneTensors],
        observation_space: SpaceSpec,
        quirks: ServerQuirks,
        address: str,
    ) -> None:
        self._lanes = list(zip(agents, tensors, strict=True))
        self._space = observation_space
        self._states = LaneStates(len(self._lanes), quirks.rules)
        self._seed = quirks.seed
        self._begin_last = quirks.begin_last
        self._held: dict[int, list[bytes]] = {}
        """By lane: requests to send once the steps of the other lanes have been answered."""
        self._address = address
        self._answers: list[WorldResponse | None] = [None] * len(self._lanes)
        """The answer to the latest step of each lane."""
        # For each request in flight: None for a step; for a reset its lanes, and whether a Reset
        # was sent before the Step.
        self._sent: deque[dict[int, bool] | None] = deque()

    def send_reset(self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings) -> None:
        """Begin new sequences in ``lanes``; see ``WorldTransport``."""
        if self._held and not self._held.keys() >= set(lanes):
            raise _unanswered()
        requests: dict[int, list[bytes]] = {}
        for position, lane in enumerate(lanes):
            own = {**settings, self._seed: seeds[position]} if seeds and self._seed else settings
            # The state after a step in flight is unknown; an unneeded Reset has no effect.
            is_needed = own or self._sent or self._states.is_running(lane)
            requests[lane] = [frames.reset_request(own)] if is_needed else []
        for lane, resets in requests.items():  # after all of them could be encoded
            agent, tensors = self._lanes[lane]
            if lane in self._held:
                self._held[lane] += [*resets, tensors.blind_step]
                continue
            for frame in (*resets, tensors.blind_step):
                agent.open_stream.send(frame)
        self._sent.append({lane: bool(resets) for lane, resets in requests.items()})

    def receive_reset(self, end_s: float) -> list[Column]:
        """Return all lanes' observations after a reset; see ``WorldTransport``."""
        begun = self._sent.popleft()
        assert begun is not None, "the oldest request is a reset"
        failures = [self._begin(lane, has_reset, end_s) for lane, has_reset in begun.items()]
        _raise_first(failures)
        rows = self._rows()
        for lane, answer in enumerate(self._answers):
            if answer is not None:
                self._lanes[lane][1].read(answer, rows, lane)
                continue
            for leaf, row in zip(leaves(self._space), rows, strict=True):  # never reset
                row[lane] = filler_of_leaf(leaf)
        return _columns(rows)

    def send_step(self, actions: Sequence[Column]) -> None:
        """Apply one action a lane; see ``WorldTransport``."""
        if self._held:
            raise _unanswered()
        is_known = not self._sent
        running = list(map(self._states.is_running, range(len(self._lanes))))
        requests = [
            tensors.step_request(actions, lane)
            if not is_known or running[lane]
            else tensors.blind_step
            for lane, (_, tensors) in enumerate(self._lanes)
        ]
        hold = is_known and self._begin_last and any(running)
        for lane, (agent, _) in enumerate(self._lanes):  # after all of them could be encoded
            if hold and not running[lane]:
                self._held[lane] = [requests[lane]]
            else:
                agent.open_stream.send(requests[lane])
        self._sent.append(None)

    def receive_step(self, end_s: float) -> VectorStep:
        """Return the result of a step; see ``WorldTransport``."""
        assert self._sent.popleft() is None, "the oldest request is a step"
        width = len(self._lanes)
        rows = self._rows()
        rewards = np.zeros(width)
        ended = np.zeros((2, width), np.bool_)
        failures: list[RemoteEnvError | None] = []

        def receive(lanes: Sequence[int]) -> None:
            for lane in lanes:
                try:
                    answer = self._receive(lane, RequestKind.STEP, end_s)
                except RemoteEnvError as error:
                    failures.append(error)
                    continue
                rewards[lane], ended[0, lane], ended[1, lane] = self._note(lane, answer)
                self._lanes[lane][1].read(answer, rows, lane)

        held, self._held = self._held, {}
        receive([lane for lane in range(width) if lane not in held])
        for lane, requests in held.items():
            for frame in requests:
                self._lanes[lane][0].open_stream.send(frame)
        receive(list(held))
        _raise_first(failures)
        return VectorStep(_columns(rows), rewards, ended[0], ended[1])

    def _begin(self, lane: int, has_reset: bool, end_s: float) -> RemoteEnvError | None:
        failure: RemoteEnvError | None = None
        if has_reset:
            try:
                answer = self._receive(lane, RequestKind.RESET, end_s)
            except RemoteEnvError as error:
                failure = error
            else:
                agent = self._lanes[lane][0]
                require_unchanged(agent.specs_message, answer.payload.specs, self._address, lane)
                self._states.reset(lane)
        try:
            self._note(lane, self._receive(lane, RequestKind.STEP, end_s))
        except RemoteEnvError as error:
            return failure or error
        return failure

    def _receive(self, lane: int, kind: RequestKind, end_s: float) -> WorldResponse:
        try:
            return self._lanes[lane][0].open_stream.receive(kind, end_s)
        except RemoteEnvError as error:
            raise RemoteEnvError(
                error.code, f"lane {lane}: {error.message}", True, error.debug_info
            ) from error
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"lane {lane}: {error.message}") from error

    def _note(self, lane: int, answer: WorldResponse) -> tuple[float, bool, bool]:
        self._answers[lane] = answer
        scalars = self._lanes[lane][1].scalars(answer)
        state = answer.payload.state
        step = self._states.step(lane, state, scalars.reward, scalars.discount)
        return step.reward, step.terminated, step.truncated

    def _rows(self) -> list[Any]:
        """Return new arrays over all lanes, and lists for leaves of text."""
        columns = empty_columns(self._space, len(self._lanes))
        return [list(column) if isinstance(column, tuple) else column for column in columns]


def _columns(rows: Sequence[Any]) -> list[Column]:
    return [tuple(row) if isinstance(row, list) else row for row in rows]


def _unanswered() -> LocalProtocolError:
    return LocalProtocolError(
        "the lanes of one world are stepped one step after the other: receive the answer to the "
        "last one first"
    )


def _raise_first(failures: Sequence[RemoteEnvError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure
