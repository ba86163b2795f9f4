"""Getting into worlds: create, join, and again where the server is not ready yet.

A server that is just starting refuses connections, cuts streams or answers with errors; what may
be over in a moment is tried again until the time for connecting is up. Requests go to all streams
before the first answer is awaited, since a server may let nobody in until all are there.
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
from rlmesh_ray.dialects.dm_env_rpc.wire.tensor_specs import AgentSpecs, specs_from_proto
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
# What gRPC says where somebody is there whom no other try would change.
_HERE_TO_STAY = (
    "CERTIFICATE_VERIFY_FAILED",
    "Failed parsing HTTP/2",
    "Hostname Verification Check failed",
    "WRONG_VERSION_NUMBER",
)


class ConnectRetry:
    """The tries of one connection.

    Args:
        timeout_s: For all of them together.
    """

    def __init__(self, timeout_s: float) -> None:
        self.end_s = time.monotonic() + timeout_s
        """When the last one ends, in seconds of time.monotonic()."""
        self._delay_s = _FIRST_DELAY_S

    def wait(self, error: Exception) -> None:
        """Sleep until the next try.

        Args:
            error: What has become of the last one.

        Raises:
            Exception: It, if there is no time left for another.
        """
        if self.end_s - time.monotonic() <= self._delay_s:
            raise error
        time.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)


def is_unreachable(error: EndpointError) -> bool:
    """Tell whether nobody answers, as with a server that is not up yet."""
    cause = error.__cause__
    return (
        isinstance(error, (EndpointUnreachableError, EndpointLostError))
        and isinstance(cause, grpc.Call)
        and cause.code() is grpc.StatusCode.UNAVAILABLE
        and not any(words in (cause.details() or "") for words in _HERE_TO_STAY)
    )


def has_closed_stream(error: EndpointError) -> bool:
    """Tell whether the server has ended the stream in good order."""
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
    """One stream on its way into a world."""

    lane: int
    stream: WorldStream | None = None
    world: str | None = None
    """The one that it has created."""
    specs: AgentSpecs | None = None
    """What it was told when it had joined."""
    specs_message: Any = None
    """The same, as it came."""

    @property
    def open_stream(self) -> WorldStream:
        """Its stream, which it has from its first request until it is dropped."""
        assert self.stream is not None, "an agent in the world"
        return self.stream

    @property
    def joined_specs(self) -> AgentSpecs:
        """What it can do and see, once it has joined."""
        assert self.specs is not None, "an agent in the world"
        return self.specs

    def drop(self) -> None:
        """Give up the stream; its world is the server's to clear away."""
        if self.stream is not None:
            self.stream.close()
        self.stream, self.world, self.specs, self.specs_message = None, None, None, None


class WorldJoiner:
    """All agents of a session, and their ways in and out.

    Args:
        connect_options: The server.
        settings: What to create and to join.
        retry: For how long to try.
    """

    def __init__(
        self, connect_options: ConnectOptions, settings: DmEnvRpcSettings, retry: ConnectRetry
    ) -> None:
        self._connect_options = connect_options
        self._settings = settings
        self._retry = retry
        self.agents = [JoiningAgent(lane) for lane in range(settings.num_envs)]

    def enter(self) -> None:
        """Create and join, until all agents are in.

        Raises:
            EndpointError: The server cannot be reached, is full, wants another token, or was not
                ready in time.
            RemoteEnvError: It refuses the settings.
        """
        try:
            while (error := self._try()) is not None:
                self._retry.wait(_in_our_words(error, self._connect_options.address))
        except BaseException:
            self.drop()
            raise

    def leave(self) -> None:
        """Leave the worlds, destroy those that were created, and close the streams.

        Whatever goes wrong, everything is closed, within seconds.
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
        """Close all streams without a word; a thread that waits at one is told."""
        for agent in self.agents:
            if agent.stream is not None:
                agent.stream.close()

    def _try(self) -> RlmeshError | None:
        """Take all agents as far as they come; return what kept one back, None: they are in."""
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
        """Send ``requests``, note the answers; return an error that may pass, if there is one.

        Raises:
            RlmeshError: One that does not.
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
                    raise _in_our_words(error, self._connect_options.address) from error
                if isinstance(error, EndpointError):
                    self._drop(agent)
                passing = error
        return passing

    def _drop(self, agent: JoiningAgent) -> None:
        """Give up a stream, and the world with it, whoever has joined that."""
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
    """Send requests of one kind, and wait for the answers as far as any come."""
    for agent, frame in requests:
        with contextlib.suppress(Exception):  # whatever broke the stream, it is closed now
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
        raise RemoteProtocolError(f"the specs make no sense: {error}") from error
    agent.specs_message = answer.payload.specs


def _may_pass(error: EndpointError | RemoteEnvError) -> bool:
    if isinstance(error, RemoteEnvError):
        return error.code not in _FINAL_CODES
    return is_unreachable(error) or has_closed_stream(error)


def _in_our_words(error: RlmeshError, address: str) -> RlmeshError:
    if not isinstance(error, RemoteEnvError):
        return error
    if error.code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return AccessDeniedError(error.message, address)
    if error.code == "RESOURCE_EXHAUSTED":
        return CapacityError(error.message, address)
    return RemoteEnvError(
        error.code,
        f"{address} lets nobody into a world: {error.message}",
        False,
        error.debug_info,
    )
