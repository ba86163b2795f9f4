"""Client session with a dm_env_rpc server, as an ``EnvSessionClient``.

Each agent has a stream: a vector step is one round trip. All requests are sent before the first
answer is awaited. After an answer that is an error the other answers are received, too, so that all
streams stay at the same request.

If the lanes are those of one vector, the server steps them together, once all agents with a running
sequence have sent a Step. It would wait for a lane that has just begun a sequence, whose next Step
depends on the answers to the others. So lanes whose episodes have ended begin the next ones after
these answers.
"""

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import ResetResult, StepResult
from rlmesh_ray.client.env.env_session_client import DialectEnvClient
from rlmesh_ray.client.fork_guard import forked
from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.lane_steps import LaneAgent, require_unchanged
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings, Settings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import contract_of_world
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import WorldJoiner
from rlmesh_ray.dialects.dm_env_rpc.protocol import DM_ENV_RPC
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import specs_from_proto
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    ConfigurationWarning,
    ConformanceError,
    ContractMismatchError,
    EndpointError,
    EndpointTimeoutError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.options import DEFAULT_RESET_TIMEOUT_S, DEFAULT_STEP_TIMEOUT_S
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol.capabilities import PARTIAL_RESET
from rlmesh_ray.protocol.client_session import EnvClientSession, Limit, name_limit
from rlmesh_ray.protocol.env_session import EpisodeTracker
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import Column, SpaceSpec, leaves
from rlmesh_ray.spaces.validation import (
    Checker,
    ValidationMode,
    WarningCounter,
    check_rewards,
    warnings_as_texts,
    warnings_info,
)
from rlmesh_ray.transport.exactly_once import SessionProgress

_LOG = logging.getLogger(__name__)
_OWN_OPTIONS = "options"
_OWN_SEED = "seed"
_GOODBYE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Reset:
    """A reset that was sent."""

    lanes: tuple[int, ...]
    seeds: tuple[int, ...]
    agents: list[tuple[LaneAgent, bool]]
    """The agents of these lanes, and whether a Reset was sent to each before its Step."""


class WorldClient:
    """An open session: ``num_envs`` agents, on streams of their own or batched on one.

    One thread at a time may use it. A request that the server refuses has no effect there, and a
    reset may follow. Any other error ends the session: later requests raise EndpointLostError, and
    only ``close`` is left.

    Args:
        connect_options: The server; its timeout is for the joins of all agents.
        settings: Settings of the session.
        step_timeout_s: How long to wait for the answers to a step. The protocol has no deadlines,
            so that a timeout ends the session.
        reset_timeout_s: How long to wait for the answers to a reset, and to a step after the end of
            an episode, which begins the next one.

    Raises:
        ConfigurationError: A batched join is requested, and the server does not offer it.
        ContractMismatchError: The lanes are not all of one kind.
        EndpointError: The server cannot be reached, is full, wants another token, or was not
            ready in time.
        RemoteEnvError: It refuses the settings.
        UnsupportedSpaceError: Its specs cannot be converted to spaces.
    """

    def __init__(
        self,
        connect_options: ConnectOptions,
        settings: DmEnvRpcSettings,
        *,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        reset_timeout_s: float = DEFAULT_RESET_TIMEOUT_S,
    ) -> None:
        self._connect_options = connect_options
        self._pid = os.getpid()
        self._step_limit = Limit("step_timeout_s", step_timeout_s)
        self._reset_limit = Limit("reset_timeout_s", reset_timeout_s)
        self._has_ended = False
        self._settings = settings
        with _naming(Limit("", connect_options.timeout_s)):
            self.joiner = WorldJoiner(connect_options, settings)
            published = self.joiner.fetch_contract()
            self._is_ours = published is not None
            # The reset setting that takes a lane's seed; None: there is none.
            self._seed = settings.seed or (_OWN_SEED if self._is_ours else None)
            # Whether lanes begin sequences after the other lanes were answered; see the module.
            self._begins_last = settings.one_world and self._is_ours
            self.joiner.enter()
            try:
                self.contract, self._agents = self._joined(published)
            except BaseException:
                self.joiner.leave()
                raise
        self._held: list[LaneAgent] = []
        """Agents whose requests wait until the steps of the other lanes have been answered."""
        self._values = ValueCheck(
            self.contract.observation_space,
            self.contract.num_envs,
            settings.policy,
            connect_options.address,
        )
        self._counted = SessionProgress.local(self.contract.num_envs)
        self._tracker = EpisodeTracker(self.contract.num_envs, lambda: uuid4().hex, self._counted)
        self._ids = map(str, itertools.count(1))
        self._pending: deque[tuple[str, _Reset | None]] = deque()
        self._session = EnvClientSession(
            self.contract.num_envs, {PARTIAL_RESET: ""}, connect_options.address
        )

    @property
    def address(self) -> str:
        return self._connect_options.address

    @property
    def answer(self) -> HandshakeResponse:
        return HandshakeResponse(
            compatible=True,
            generation=DM_ENV_RPC,
            min_generation=DM_ENV_RPC,
            server_version="",
            editions=(),
            capabilities=self._session.capabilities,
            contract=self.contract,
        )

    def reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> ResetResult:
        """Start new episodes, in all lanes or in ``lanes``.

        Args:
            seeds: Empty, or one for each lane that is reset.
            options: Settings of the reset.
            lanes: Indices; empty for all.

        Raises:
            ContractMismatchError: The reset has changed the specs; the session is over.
            RemoteEnvError: The server refused, or sent a value that is refused here.
            EndpointError: The session broke.
        """
        return self.receive_reset(self.send_reset(seeds=seeds, options=options, lanes=lanes))

    def send_reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> str:
        """Start new episodes without waiting; return the request's id.

        Raises:
            ConfigurationError: A setting cannot be encoded; nothing was sent.
            LocalProtocolError: Steps of one world have not been answered; nothing was sent.
            EndpointError: The session is over.
        """
        self._require_open()
        chosen = tuple(lanes) or tuple(range(self.contract.num_envs))
        if seeds and self._seed is None:
            warnings.warn(
                f"{self.address} does not get the seed, since dm_env_rpc has no name for it; if "
                "the server has a reset setting for it, name it: DmEnvRpcSettings(seed=...)",
                ConfigurationWarning,
                stacklevel=4,
            )
            seeds = ()
        with self._ending(RlmeshError):  # those are raised before anything is sent
            own = self._reset_settings(chosen, seeds, options)
            if self._held and not all(agent.held for agent, _ in own):
                raise _unanswered()
            sent = []
            for agent, settings in own:
                # The state after a step in flight is unknown; an unneeded Reset has no effect.
                is_needed = settings or self._pending or agent.is_running
                sent.append((agent, [frames.reset_request(settings)] if is_needed else []))
            for agent, resets in sent:  # after all of them could be encoded
                requests = [*resets, agent.blind_step]
                if agent.held:
                    agent.held += requests
                    continue
                for frame in requests:
                    agent.stream.send(frame)
            begun = [(agent, bool(resets)) for agent, resets in sent]
            return self._note_sent(_Reset(chosen, tuple(seeds), begun))

    def receive_reset(self, request_id: str) -> ResetResult:
        sent = self._oldest(request_id)
        if sent is None:
            raise LocalProtocolError("that request was a step", request_id)
        with self._ending(RemoteEnvError), _naming(self._reset_limit):
            self._pending.popleft()
            end_s = time.monotonic() + self._reset_limit.seconds
            _raise_first([self._begin(agent, has_reset, end_s) for agent, has_reset in sent.agents])
            rows = self._rows()
            for agent in self._agents:
                if agent.answer is not None:
                    agent.show(rows)
                    continue
                # Never reset.
                for leaf, row in zip(leaves(self.contract.observation_space), rows, strict=True):
                    row[agent.row] = filler_of_leaf(leaf)
            observation = _columns(rows)
            infos = self._values.check(observation)
        self._has_ended = self._has_ended and len(sent.lanes) < self.contract.num_envs
        self._counted.begin(self._counted.done + 1, 0)
        self._counted.count_reset(sent.lanes)
        self._counted.end()
        self._tracker.begin(sent.lanes, sent.seeds, time.time_ns())
        return ResetResult(observation, infos, self._tracker.episode_ids)

    def step(self, action: Sequence[Column]) -> StepResult:
        return self.receive_step(self.send_step(action))

    def send_step(self, action: Sequence[Column], *, is_last: bool = True) -> str:
        """Apply one action a lane without waiting; return the request's id.

        Args:
            action: Columns over all lanes, of the action space's dtypes.
            is_last: Ignored.
        """
        self._require_open()
        with self._ending(RlmeshError):
            if self._held:
                raise _unanswered()
            is_alone = not self._pending
            requests = [
                agent.step_request(action) if not is_alone or agent.is_running else agent.blind_step
                for agent in self._agents
            ]
            begins_last = (
                is_alone and self._begins_last and any(agent.is_running for agent in self._agents)
            )
            for agent, request in zip(self._agents, requests, strict=True):
                if begins_last and not agent.is_running:
                    agent.held = [request]
                    self._held.append(agent)
                else:
                    agent.stream.send(request)
            return self._note_sent(None)

    def receive_step(self, request_id: str) -> StepResult:
        """Wait for the result of the oldest request that was sent, a step.

        Raises:
            RemoteEnvError: The server refused. The other lanes may have been stepped: their
                episodes are not accounted until the next reset. Or it sent a value that
                is refused (``DmEnvRpcSettings.validation``), which ends the session.
            RemoteProtocolError: An answer breaks the protocol; that ends the session.
            EndpointError: The session broke.
        """
        if self._oldest(request_id) is not None:
            raise LocalProtocolError("that request was a reset", request_id)
        limit = self._reset_limit if self._has_ended else self._step_limit
        with self._ending(RemoteEnvError), _naming(limit):
            self._pending.popleft()
            try:
                rows, rewards, terminated, truncated = self._receive_steps(
                    time.monotonic() + limit.seconds
                )
            except RemoteEnvError:
                # The rewards of the other lanes are lost, and with them their episodes' returns.
                if self.contract.num_envs > 1:
                    self._tracker.finalize(time.time_ns())
                raise
            observation = _columns(rows)
            infos = self._values.check(observation, rewards)
        self._has_ended = bool(terminated.any() or truncated.any())
        self._counted.begin(self._counted.done + 1, 0)
        self._counted.count_step(rewards, terminated, truncated)
        self._counted.end()
        completed = self._tracker.completed(
            terminated.tolist(),
            truncated.tolist(),
            {},
            time.time_ns(),
        )
        return StepResult(
            observation,
            rewards,
            terminated,
            truncated,
            infos,
            completed,
            self._tracker.episode_ids,
        )

    def wakeup(self) -> WakeupDescriptors | None:
        """Return None: there are no descriptors that signal answers."""
        return None

    def render(self) -> bytes | None:
        """Return None: dm_env_rpc has no pictures besides its observations."""
        return None

    def call(self, name: str, *arguments: object, lanes: Sequence[int] = ()) -> tuple[Any, ...]:
        """Refuse: dm_env_rpc has no calls into environments.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"{self.address} speaks dm_env_rpc, which has no calls such as {name!r} of "
            f"{len(arguments)} arguments into {len(lanes) or self.contract.num_envs} lanes; "
            "settings go with create, join and reset"
        )

    def close(self) -> None:
        """Leave the worlds, destroy those that were created. Idempotent, and never raises."""
        if self._session.is_closed or os.getpid() != self._pid:
            return
        self._session.close()
        self._values.summarize()
        if sys.is_finalizing():
            return  # gRPC's threads have ended; the end of the process closes the streams
        # In a thread of its own: Ctrl-C in the middle of a call can leave gRPC's lock held, and the
        # next call would wait for ever.
        goodbye = threading.Thread(target=self.joiner.leave, name="rlmesh-ray-close", daemon=True)
        goodbye.start()
        goodbye.join(_GOODBYE_TIMEOUT_S)

    def _joined(self, published: EnvContract | None) -> tuple[EnvContract, list[LaneAgent]]:
        settings, address, joined = self._settings, self.address, self.joiner.agents
        try:
            specs = [specs_from_proto(agent.specs) for agent in joined]
        except CodecError as error:
            raise RemoteProtocolError(f"the specs are malformed: {error}") from error
        _require_one_kind([agent.specs for agent in joined], address)
        contract, actions, observations = contract_of_world(specs[0], published, settings, address)
        return contract, [
            LaneAgent(agent, own, actions, observations, settings, address)
            for agent, own in zip(joined, specs, strict=True)
        ]

    def _reset_settings(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Mapping[str, object] | None
    ) -> list[tuple[LaneAgent, Settings]]:
        """Return the agents of ``lanes``, and the settings of the Reset of each."""
        settings: dict[str, Any] = dict(self._settings.reset)
        if options and self._is_ours:
            settings[_OWN_OPTIONS] = {**settings.get(_OWN_OPTIONS, {}), **options}
        elif options:
            settings.update(options)
        if self._is_ours:
            frames.require_size(settings)
        seed = self._seed or ""
        if self._settings.batched:
            if len(lanes) < self.contract.num_envs:
                settings["lanes"] = list(lanes)
            return [(self._agents[0], {**settings, seed: list(seeds)} if seeds else settings)]
        return [
            (self._agents[lane], {**settings, seed: seeds[at]} if seeds else settings)
            for at, lane in enumerate(lanes)
        ]

    def _begin(self, agent: LaneAgent, has_reset: bool, end_s: float) -> RemoteEnvError | None:
        failure: RemoteEnvError | None = None
        if has_reset:
            try:
                specs = agent.receive("reset", end_s).reset.specs
            except RemoteEnvError as error:
                failure = error
            else:
                joined = agent.joined
                require_unchanged(joined.specs, specs, self.address, joined.lane)
                agent.end_sequence()
        try:
            agent.receive_step(end_s)
        except RemoteEnvError as error:
            return failure or error
        return failure

    def _receive_steps(
        self, end_s: float
    ) -> tuple[list[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return observations as ``_rows``, rewards, terminated and truncated, of all lanes."""
        width, rows = self.contract.num_envs, self._rows()
        rewards = np.zeros(width)
        terminated, truncated = np.zeros((2, width), np.bool_)
        failures: list[RemoteEnvError | None] = []
        held, self._held = self._held, []
        others = [agent for agent in self._agents if not agent.held] if held else self._agents
        for agents in (others, held):
            if agents is held:
                for agent in held:
                    requests, agent.held = agent.held, []
                    for frame in requests:
                        agent.stream.send(frame)
            for agent in agents:
                row = agent.row
                try:
                    rewards[row], terminated[row], truncated[row] = agent.receive_step(end_s)
                except RemoteEnvError as error:
                    failures.append(error)
                else:
                    agent.show(rows)
        _raise_first(failures)
        return rows, rewards, terminated, truncated

    def _rows(self) -> list[Any]:
        """Return room for the observations of all lanes; texts are lists, which can be changed."""
        columns = empty_columns(self.contract.observation_space, self.contract.num_envs)
        return [list(column) if isinstance(column, tuple) else column for column in columns]

    def _note_sent(self, reset: _Reset | None) -> str:
        request_id = next(self._ids)
        self._pending.append((request_id, reset))
        return request_id

    def _oldest(self, request_id: str) -> _Reset | None:
        self._require_open()
        if not self._pending or self._pending[0][0] != request_id:
            raise LocalProtocolError(
                "answers are received in the order of the requests", request_id
            )
        return self._pending[0][1]

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise forked(self._pid, self.address)
        self._session.require_open()

    @contextlib.contextmanager
    def _ending(self, spared: type[RlmeshError]) -> Iterator[None]:
        """End the session with any error but ``spared`` ones, and with Ctrl-C.

        An unrecoverable error of the server is not spared. Since answers have no ids, those that
        were not received would be taken for answers to later requests.
        """
        try:
            yield
        except spared as error:
            if isinstance(error, RemoteEnvError) and not error.is_recoverable:
                self._session.fail(error)
            raise
        except BaseException as error:
            if isinstance(error, RlmeshError):
                self._session.fail(error)
            self._session.fail_if_interrupted(error)
            if isinstance(error, EndpointError):
                self.joiner.drop()
            raise


@contextlib.contextmanager
def _naming(limit: Limit) -> Iterator[None]:
    """Make a timeout error name the limit that several waits share, not what was left of it."""
    try:
        yield
    except EndpointTimeoutError as error:
        name_limit(error, limit)
        raise


class ValueCheck:
    """Checks the observations and rewards of one session, as an endpoint checks its environment.

    The protocol leaves it to both ends to respect the bounds of the specs, and does not mention
    NaN.

    Args:
        observation_space: A lane's.
        num_lanes: Width of the session.
        policy: What happens to an observation out of its range, and to a reward that is not
            finite. NaN in an observation is refused with every policy.
        address: The server's, for messages.
    """

    def __init__(
        self, observation_space: SpaceSpec, num_lanes: int, policy: ValidationMode, address: str
    ) -> None:
        self._checker = Checker(leaves(observation_space), policy)
        self._num_lanes = num_lanes
        self._policy = policy
        self._address = address
        self._warnings = WarningCounter()

    def check(
        self, observation: list[Column], rewards: NDArray[np.float64] | None = None
    ) -> dict[str, object]:
        """Return infos with a warning for each kind and leaf that has had none in this session.

        Args:
            observation: One column a leaf, over all lanes.
            rewards: ``(num_lanes,) float64``; None: it was a reset.

        Raises:
            RemoteEnvError: A value is refused; that ends the session, as at our own endpoints.
        """
        try:
            side = "observation"
            found = self._checker.check(observation)
            if rewards is not None:
                side = "reward"
                found += check_rewards(rewards, self._policy)
        except ConformanceError as error:
            raise self._refusal(side, error) from error
        untold = self._warnings.unreported(found)
        for warning in untold:
            _LOG.warning(
                "%s sent a value out of range, which is delivered: %s; "
                "DmEnvRpcSettings(validation='strict') refuses it",
                self._address,
                warning.text,
            )
        return dict(warnings_as_texts(warnings_info(untold, self._num_lanes))) if untold else {}

    def summarize(self) -> None:
        """Log how many values out of range were delivered, if not each of them was reported."""
        num_found = self._warnings.num_found
        if num_found > self._warnings.num_reported:
            _LOG.warning("%s: %d values out of range in this session", self._address, num_found)

    def _refusal(self, side: str, error: ConformanceError) -> RemoteEnvError:
        remedy = "fix the server"
        if error.kind == "range":
            remedy += ", or have it delivered: DmEnvRpcSettings(validation='warn')"
        elif error.path:
            remedy += ", or leave it out: DmEnvRpcSettings(observations=...)"
        found = error.about(side)
        return RemoteEnvError("INTERNAL", f"{self._address} sent {found}; {remedy}", False)


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


def _require_one_kind(specs: Sequence[Any], address: str) -> None:
    """Require that ``pb.ActionObservationSpecs`` differ in uids only."""
    first, *others = [
        [
            {spec.name: spec.SerializeToString(deterministic=True) for spec in own.values()}
            for own in (each.actions, each.observations)
        ]
        for each in specs
    ]
    for lane, other in enumerate(others, 1):
        if other != first:
            raise ContractMismatchError(
                f"{address} gives lane {lane} other actions or observations than lane 0; "
                "the lanes of one session are of one kind, so open a session for each kind"
            )


def _open(
    connect_options: ConnectOptions, step_timeout_s: float, reset_timeout_s: float
) -> WorldClient:
    return WorldClient(
        connect_options,
        _settings(connect_options),
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
    )


def _probe(connect_options: ConnectOptions) -> HandshakeResponse:
    """Return what a session would be, by opening a small one for a moment.

    Raises:
        RlmeshError: As ``WorldClient`` does.
    """
    settings = _settings(connect_options)
    small = settings if settings.one_world else settings.of_one_lane()
    client = WorldClient(connect_options, small)
    try:
        contract = client.contract
    finally:
        client.close()
    width = contract.num_envs if settings.batched else settings.num_envs
    return replace(client.answer, contract=replace(contract, num_envs=width))


def _settings(connect_options: ConnectOptions) -> DmEnvRpcSettings:
    settings = connect_options.dialect_settings
    return settings if isinstance(settings, DmEnvRpcSettings) else DmEnvRpcSettings()


ENV_SESSION_CLIENT = DialectEnvClient(_open, _probe)
