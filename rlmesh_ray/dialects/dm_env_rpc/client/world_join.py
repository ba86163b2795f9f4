"""Creating and joining worlds, with retries while the server is not ready.

A server that is starting refuses connections, closes streams or answers with errors; errors that
may pass are retried until the connect timeout. Requests are sent on all streams before the first
answer is awaited, since a server may answer no agent before all of them have joined.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.frames import RequestKind, WorldResponse
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings, Settings
from rlmesh_ray.dialects.dm_env_rpc.client.world_stream import WorldStream
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import AgentSpecs, specs_from_proto
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    CodecError,
    EndpointError,
    EndpointLostError,
    EndpointUnreachableError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.grpc_setup import grpc

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
# In gRPC's details where a server answers and another try would fail, too.
_PERMANENT = (
    "CERTIFICATE_VERIFY_FAILED",
    "Failed parsing HTTP/2",
    "Hostname Verification Check failed",
    "WRONG_VERSION_NUMBER",
)


class ConnectRetry:
    """Retries of one connection, with growing delays.

    Args:
        timeout_s: Time limit of all of them together.
    """

    def __init__(self, timeout_s: float) -> None:
        self.end_s = time.monotonic() + timeout_s
        """End of the time limit, in seconds of time.monotonic()."""
        self._delay_s = _FIRST_DELAY_S

    def wait(self, error: Exception) -> None:
        """Sleep until the next try.

        Args:
            error: The last try's.

        Raises:
            Exception: ``error``, if there is no time left for another try.
        """
        if self.end_s - time.monotonic() <= self._delay_s:
            raise error
        time.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)


def is_unreachable(error: EndpointError) -> bool:
    """Return whether no server answers, as before it has started."""
    cause = error.__cause__
    return (
        isinstance(error, (EndpointUnreachableError, EndpointLostError))
        and isinstance(cause, grpc.Call)
        and cause.code() is grpc.StatusCode.UNAVAILABLE
        and not any(words in (cause.details() or "") for words in _PERMANENT)
    )


def has_closed_stream(error: EndpointError) -> bool:
    """Return whether the server has closed the stream without an error."""
    return isinstance(error, EndpointLostError) and error.__cause__ is None


_LOG = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 2.0

# Refusals that another try would not change.
_FINAL_CODES = frozenset(
    {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "UNAUTHENTICATED",
    }
)


@dataclass(slots=True)
class JoiningAgent:
    """One agent with its stream, before and after it has joined a world."""

    lane: int
    stream: WorldStream | None = None
    world: str | None = None
    """Name of the world that it has created."""
    specs: AgentSpecs | None = None
    """From the answer to its join."""
    specs_message: Any = None
    """The same, as a message."""

    @property
    def open_stream(self) -> WorldStream:
        """Its stream; it has one from its first request until ``drop``."""
        assert self.stream is not None, "an agent in the world"
        return self.stream

    @property
    def joined_specs(self) -> AgentSpecs:
        """Its specs, once it has joined."""
        assert self.specs is not None, "an agent in the world"
        return self.specs

    def drop(self) -> None:
        """Close the stream; the server ends its world."""
        if self.stream is not None:
            self.stream.close()
        self.stream, self.world, self.specs, self.specs_message = None, None, None, None


class WorldJoiner:
    """All agents of a session: their joins and leaves.

    Args:
        connect_options: The server.
        settings: Settings of the worlds and joins.
        retry: The time limit.
    """

    def __init__(
        self, connect_options: ConnectOptions, settings: DmEnvRpcSettings, retry: ConnectRetry
    ) -> None:
        self._connect_options = connect_options
        self._settings = settings
        self._retry = retry
        self.agents = [JoiningAgent(lane) for lane in range(settings.num_envs)]

    def enter(self) -> None:
        """Create and join, until all agents have joined.

        Raises:
            EndpointError: The server cannot be reached, is full, wants another token, or was not
                ready in time.
            RemoteEnvError: It refuses the settings.
        """
        try:
            while (error := self._try()) is not None:
                self._retry.wait(_as_own_error(error, self._connect_options.address))
        except BaseException:
            self.drop()
            raise

    def leave(self) -> None:
        """Leave the worlds, destroy those that were created, and close the streams.

        Errors are ignored, and it takes a few seconds at most.
        """
        end_s = time.monotonic() + _LEAVE_TIMEOUT_S
        joined = [agent for agent in self.agents if agent.specs is not None]
        leaving = [(agent, frames.leave_request()) for agent in joined]
        _send_and_drain(RequestKind.LEAVE_WORLD, leaving, end_s)
        created = [agent for agent in self.agents if agent.world is not None]
        goodbyes = [(agent, frames.destroy_request(agent.world or "")) for agent in created]
        _send_and_drain(RequestKind.DESTROY_WORLD, goodbyes, end_s)
        for agent in self.agents:
            surplus = agent.stream and agent.stream.unraised_surplus()
            if surplus:
                _LOG.warning(
                    "lane %d: %s; what this session observed may be wrong", agent.lane, surplus
                )
        self.drop()

    def drop(self) -> None:
        """Close all streams at once; a thread that waits on one gets an error."""
        for agent in self.agents:
            if agent.stream is not None:
                agent.stream.close()

    def _try(self) -> RlmeshError | None:
        """Try once for all agents; return an error that may pass; None: all have joined."""
        for agent in self.agents:
            agent.stream = agent.stream or WorldStream(self._connect_options)
        creators = [agent for agent in self._creators() if agent.world is None]
        error = self._ask(
            RequestKind.CREATE_WORLD,
            [(agent, frames.create_request(self._create_of(agent))) for agent in creators],
        )
        if error is not None:
            return error
        return self._ask(
            RequestKind.JOIN_WORLD,
            [
                (agent, frames.join_request(self._world_of(agent), self._join_of(agent)))
                for agent in self.agents
                if agent.specs is None
            ],
        )

    def _ask(
        self, kind: RequestKind, requests: list[tuple[JoiningAgent, bytes]]
    ) -> RlmeshError | None:
        """Send ``requests`` and handle the answers; return an error that may pass, if any.

        Raises:
            RlmeshError: An error that another try would not change.
        """
        passing: RlmeshError | None = None
        for agent, frame in requests:
            agent.open_stream.send(frame)
        for agent, _ in requests:
            if agent.stream is None:  # lost with the world that it was to share
                continue
            try:
                _note(agent, agent.open_stream.receive(kind, self._retry.end_s))
            except (EndpointError, RemoteEnvError) as error:
                if not _may_pass(error):
                    raise _as_own_error(error, self._connect_options.address) from error
                if isinstance(error, EndpointError):
                    self._drop(agent)
                passing = error
        return passing

    def _drop(self, agent: JoiningAgent) -> None:
        """Close a stream, and those of all agents in the world that it has created."""
        is_shared = self._settings.one_world and agent.world is not None
        for each in self.agents if is_shared else [agent]:
            each.drop()

    def _creators(self) -> list[JoiningAgent]:
        if self._settings.create is None:
            return []
        return self.agents[:1] if self._settings.one_world else self.agents

    def _create_of(self, agent: JoiningAgent) -> Settings:
        return self._settings.create_of(agent.lane) or {}

    def _join_of(self, agent: JoiningAgent) -> Settings:
        return self._settings.join_of(agent.lane)

    def _world_of(self, agent: JoiningAgent) -> str:
        if self._settings.create is None:
            return self._settings.world_name
        creator = self.agents[0] if self._settings.one_world else agent
        return creator.world or ""


def _send_and_drain(
    kind: RequestKind, requests: Sequence[tuple[JoiningAgent, bytes]], end_s: float
) -> None:
    """Send requests of one kind, and wait for their answers; ignore errors."""
    for agent, frame in requests:
        with contextlib.suppress(Exception):  # a broken stream is closed all the same
            agent.open_stream.send(frame)
    for agent, _ in requests:
        with contextlib.suppress(Exception):
            agent.open_stream.drain(kind, end_s)


def _note(agent: JoiningAgent, answer: WorldResponse) -> None:
    if answer.kind is RequestKind.CREATE_WORLD:
        agent.world = answer.payload.world_name
        return
    try:
        agent.specs = specs_from_proto(answer.payload.specs)
    except CodecError as error:
        raise RemoteProtocolError(f"the specs are malformed: {error}") from error
    agent.specs_message = answer.payload.specs


def _may_pass(error: EndpointError | RemoteEnvError) -> bool:
    if isinstance(error, RemoteEnvError):
        return error.code not in _FINAL_CODES
    return is_unreachable(error) or has_closed_stream(error)


def _as_own_error(error: RlmeshError, address: str) -> RlmeshError:
    if not isinstance(error, RemoteEnvError):
        return error
    if error.code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return AccessDeniedError(error.message, address)
    if error.code == "RESOURCE_EXHAUSTED":
        return CapacityError(error.message, address)
    return RemoteEnvError(
        error.code,
        f"{address} refuses to create or join a world: {error.message}",
        False,
        error.debug_info,
    )
