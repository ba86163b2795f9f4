"""The agents of a session, each on a stream of its own: a vector step is one round trip.

An agent is a lane, or all lanes of a world of this package's servers (the join setting
``batched``): then every tensor has one more axis, in front, ``terminated`` and ``truncated`` are
flags by lane, the state of the sequence is always RUNNING, lanes reset themselves as in the
autoreset mode NEXT_STEP, and a reset with the setting ``lanes`` resets only those.

All requests are sent before the first answer is awaited. After an answer that is an error the other
answers are received, too, so that all streams stay at the same request.

If the lanes are those of one vector, the server steps them together, once all agents with a running
sequence have sent a Step. It would wait for a lane that has just begun a sequence, whose next Step
depends on the answers to the others. So lanes whose episodes have ended begin the next ones after
these answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.lane_tensors import LaneTensors
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings, Settings
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import JoiningAgent
from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import SequenceState
from rlmesh_ray.errors import (
    ContractMismatchError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.multi_agent import filler_of_leaf


@dataclass(frozen=True, slots=True)
class VectorStep:
    """Result of a step; every column has one entry a lane."""

    observation: list[Column]
    """One column a leaf; they share no memory with others."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class LaneState:
    """The state of a lane's sequence, and gymnasium's flags from it.

    Rule 1: A step from a state that is not RUNNING begins the next sequence and ignores the action.
    That is the autoreset mode NEXT_STEP: such a step has no reward and ends nothing.
    Rule 2: The answer to such a step must be RUNNING, since a sequence has at least one step.
    Rule 3: A step from RUNNING to TERMINATED terminates the episode, one to INTERRUPTED truncates
    it.
    Rule 4: TERMINATED with a discount above 0 is a truncation, too, as in dm_env. Servers that have
    no truncations send TERMINATED at time limits, which the settings identify.

    Args:
        lane: Index, for messages.
        settings: When TERMINATED is a truncation.
    """

    def __init__(self, lane: int, settings: DmEnvRpcSettings) -> None:
        self._lane = lane
        self._settings = settings
        self._state = SequenceState.TERMINATED
        self._num_steps = 0

    @property
    def is_running(self) -> bool:
        """Whether the next step applies the lane's action."""
        return self._state is SequenceState.RUNNING

    def reset(self) -> None:
        """Note that the server has reset the lane: its next step begins a sequence."""
        if self.is_running:
            self._state = SequenceState.INTERRUPTED

    def step(self, state: int, reward: float, discount: float | None) -> tuple[float, bool, bool]:
        """Return reward, terminated and truncated of a step.

        Args:
            state: The state's number on the wire.
            reward: The server's; ignored if the step begins a sequence.
            discount: The server's; None: it sends none.

        Raises:
            RemoteProtocolError: There is no such state, or it must not follow the last one.
        """
        before = self._state
        try:
            now = SequenceState(state)
        except ValueError:
            raise RemoteProtocolError(
                f"lane {self._lane} answered a step with the state {state}, which dm_env_rpc does "
                "not have"
            ) from None
        if before is SequenceState.RUNNING:
            self._state = now
            self._num_steps += 1
            is_cut = now is SequenceState.INTERRUPTED
            if now is SequenceState.TERMINATED:
                is_cut = self._is_truncation(discount)
            return reward, now is SequenceState.TERMINATED and not is_cut, is_cut
        if now is not SequenceState.RUNNING:
            raise RemoteProtocolError(
                f"lane {self._lane} went from {before.name} to {now.name}: a sequence must begin "
                "with RUNNING, and have a step at least"
            )
        self._state, self._num_steps = now, 0
        return 0.0, False, False

    def _is_truncation(self, discount: float | None) -> bool:
        settings = self._settings
        if settings.truncate_on_terminated or (discount is not None and discount > 0.0):
            return True
        limit = settings.time_limit_steps
        return limit is not None and self._num_steps >= limit


class LaneStreams:
    """The streams of a session; see the module. Answers are received in the order of requests.

    Args:
        agents: Joined; one a lane, or a batched one.
        tensors: One for each agent.
        states: One for each lane; none for a batched agent.
        contract: The session's.
        seed: The reset setting that takes a lane's seed, if there is one.
        begin_last: Whether lanes begin sequences after the other lanes were answered.
        address: The server's, for messages.
    """

    def __init__(
        self,
        agents: Sequence[JoiningAgent],
        tensors: Sequence[LaneTensors],
        states: Sequence[LaneState],
        contract: EnvContract,
        *,
        seed: str | None,
        begin_last: bool,
        address: str,
    ) -> None:
        self._agents = list(zip(agents, tensors, strict=True))
        self._states = states
        self._is_batched = not states
        self._contract = contract
        self._seed = seed
        self._begin_last = begin_last
        self._address = address
        self._held: dict[int, list[bytes]] = {}
        """By agent: requests to send once the steps of the other lanes have been answered."""
        self._answers: list[Any] = [None] * len(self._agents)
        """The ``pb.StepResponse`` to the latest step of each agent."""

    def send_reset(
        self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings, *, is_alone: bool
    ) -> dict[int, bool]:
        """Begin new sequences, without waiting.

        Args:
            lanes: Indices, at least one.
            seeds: Empty, or one for each of ``lanes``.
            settings: Settings of each reset, besides the seed.
            is_alone: Whether all requests before it have been answered.

        Returns:
            What ``receive_reset`` needs: whether a Reset was sent before the Step, by agent.
        """
        if self._held and not self._held.keys() >= set(lanes):
            raise _unanswered()
        requests: dict[int, list[bytes]] = {}
        for at, own in self._reset_settings(lanes, seeds, settings).items():
            # The state after a step in flight is unknown; an unneeded Reset has no effect.
            is_needed = own or not is_alone or self._is_running(at)
            requests[at] = [frames.reset_request(own)] if is_needed else []
        for at, resets in requests.items():  # after all of them could be encoded
            agent, tensors = self._agents[at]
            if at in self._held:
                self._held[at] += [*resets, tensors.blind_step]
                continue
            for frame in (*resets, tensors.blind_step):
                agent.open_stream.send(frame)
        return {at: bool(resets) for at, resets in requests.items()}

    def receive_reset(self, begun: Mapping[int, bool], end_s: float) -> list[Column]:
        """Return all lanes' observations after a reset.

        Args:
            begun: As ``send_reset`` has returned it.
            end_s: When to stop waiting, in seconds of time.monotonic().

        Raises:
            RemoteEnvError: The server refused; another reset may follow.
            ContractMismatchError: The specs have changed.
            RemoteProtocolError: An answer breaks the protocol.
            EndpointError: A stream broke.
        """
        _raise_first([self._begin(at, has_reset, end_s) for at, has_reset in begun.items()])
        rows = self._rows()
        for at, answer in enumerate(self._answers):
            if answer is not None:
                self._agents[at][1].read(answer, rows, self._row(at))
                continue
            # Never reset.
            for leaf, row in zip(leaves(self._contract.observation_space), rows, strict=True):
                row[at] = filler_of_leaf(leaf)
        return _columns(rows)

    def send_step(self, actions: Sequence[Column], *, is_alone: bool) -> None:
        """Apply one action a lane, without waiting; ``is_alone`` is as for ``send_reset``."""
        if self._held:
            raise _unanswered()
        running = [self._is_running(at) for at in range(len(self._agents))]
        requests = [
            tensors.step_request(actions, self._row(at))
            if not is_alone or running[at]
            else tensors.blind_step
            for at, (_, tensors) in enumerate(self._agents)
        ]
        hold = is_alone and self._begin_last and any(running)
        for at, (agent, _) in enumerate(self._agents):  # after all of them could be encoded
            if hold and not running[at]:
                self._held[at] = [requests[at]]
            else:
                agent.open_stream.send(requests[at])

    def receive_step(self, end_s: float) -> VectorStep:
        """Return the result of a step; raises as ``receive_reset``."""
        width = self._contract.num_envs
        rows = self._rows()
        rewards = np.zeros(width)
        terminated, truncated = np.zeros((2, width), np.bool_)
        failures: list[RemoteEnvError | None] = []

        def receive(agents: Sequence[int]) -> None:
            for at in agents:
                row = self._row(at)
                try:
                    answer = self._receive(at, "step", end_s).step
                except RemoteEnvError as error:
                    failures.append(error)
                    continue
                rewards[row], terminated[row], truncated[row] = self._note(at, answer)
                self._agents[at][1].read(answer, rows, row)

        held, self._held = self._held, {}
        receive([at for at in range(len(self._agents)) if at not in held])
        for at, requests in held.items():
            for frame in requests:
                self._agents[at][0].open_stream.send(frame)
        receive(list(held))
        _raise_first(failures)
        return VectorStep(_columns(rows), rewards, terminated, truncated)

    def _reset_settings(
        self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings
    ) -> dict[int, Settings]:
        """Return the settings of the Reset of each agent that begins."""
        if not self._is_batched:
            with_seed = bool(seeds) and self._seed is not None
            return {
                lane: {**settings, str(self._seed): seeds[at]} if with_seed else settings
                for at, lane in enumerate(lanes)
            }
        own: dict[str, Any] = dict(settings)
        if len(lanes) < self._contract.num_envs:
            own["lanes"] = list(lanes)
        if seeds and self._seed is not None:
            own[self._seed] = list(seeds)
        return {0: own}

    def _row(self, at: int) -> int | slice:
        return slice(None) if self._is_batched else at

    def _is_running(self, at: int) -> bool:
        return self._is_batched or self._states[at].is_running

    def _begin(self, at: int, has_reset: bool, end_s: float) -> RemoteEnvError | None:
        failure: RemoteEnvError | None = None
        if has_reset:
            try:
                specs = self._receive(at, "reset", end_s).reset.specs
            except RemoteEnvError as error:
                failure = error
            else:
                require_unchanged(self._agents[at][0].specs_message, specs, self._address, at)
                if not self._is_batched:
                    self._states[at].reset()
        try:
            self._note(at, self._receive(at, "step", end_s).step)
        except RemoteEnvError as error:
            return failure or error
        return failure

    def _receive(self, at: int, kind: str, end_s: float) -> Any:
        where = "" if self._is_batched else f"lane {at}: "
        try:
            return self._agents[at][0].open_stream.receive(kind, end_s)
        except RemoteEnvError as error:
            raise RemoteEnvError(
                error.code, f"{where}{error.message}", True, error.debug_info
            ) from error
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{where}{error.message}") from error

    def _note(self, at: int, answer: Any) -> tuple[Any, Any, Any]:
        """Note the answer to a step; return reward, terminated and truncated, one or by lane."""
        self._answers[at] = answer
        tensors = self._agents[at][1]
        if self._is_batched:
            return tensors.batch_outcome(answer)
        reward, discount = tensors.scalars(answer)
        return self._states[at].step(answer.state, reward, discount)

    def _rows(self) -> list[Any]:
        """Return new arrays over all lanes, and lists for leaves of text."""
        columns = empty_columns(self._contract.observation_space, self._contract.num_envs)
        return [list(column) if isinstance(column, tuple) else column for column in columns]


def require_unchanged(joined: Any, now: Any, address: str, lane: int) -> None:
    """Compare the specs after a reset with those after the join.

    Args:
        joined: The ``pb.ActionObservationSpecs`` after the join.
        now: Those after the reset; empty: the server does not repeat them.
        address: The server's, for the message.
        lane: The agent's, for the message.

    Raises:
        ContractMismatchError: They differ, in a tensor or in a uid.
    """
    if now == joined or not (now.actions or now.observations):
        return
    # NaN in bounds does not equal itself.
    if now.SerializeToString(deterministic=True) == joined.SerializeToString(deterministic=True):
        return
    raise ContractMismatchError(
        f"{address} has changed the actions or observations of lane {lane} with its reset: "
        f"{_difference(joined, now)}; spaces are fixed while a session lasts, so reset with "
        "settings that leave them alone, or join with other ones in a new session"
    )


def _difference(joined: Any, now: Any) -> str:
    for domain, old, new in (
        ("actions", joined.actions, now.actions),
        ("observations", joined.observations, now.observations),
    ):
        for uid in sorted({*old, *new}):
            if uid not in new:
                return f"{old[uid].name!r} is gone from its {domain}"
            if uid not in old:
                return f"{new[uid].name!r} is new among its {domain}"
            if old[uid] != new[uid]:
                return f"{new[uid].name!r} is another one among its {domain}"
    return "its specs differ"


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
