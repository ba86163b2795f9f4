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

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.dm_env_rpc import frames
from rlmesh_ray.client.dm_env_rpc.frames import Answer, Kind
from rlmesh_ray.client.dm_env_rpc.settings import DmEnvRpcSettings, Settings
from rlmesh_ray.client.dm_env_rpc.tries import Tries, has_hung_up, is_away
from rlmesh_ray.client.dm_env_rpc.world_stream import WorldStream
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    CodecError,
    EndpointError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.wire.dm_env_rpc_v1.tensor_specs import AgentSpecs, specs_from_proto

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
class Agent:
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


class Joining:
    """All agents of a session, and their ways in and out.

    Args:
        dial: The server.
        settings: What to create and to join.
        tries: For how long to try.
    """

    def __init__(self, dial: Dial, settings: DmEnvRpcSettings, tries: Tries) -> None:
        self._dial = dial
        self._settings = settings
        self._tries = tries
        self.agents = [Agent(lane) for lane in range(settings.num_envs)]

    def enter(self) -> None:
        """Create and join, until all agents are in.

        Raises:
            EndpointError: The server cannot be reached, is full, wants another token, or was not
                ready in time.
            RemoteEnvError: It refuses the settings.
        """
        try:
            while (error := self._try()) is not None:
                self._tries.wait(_in_our_words(error, self._dial.address))
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
        _send_and_drain(Kind.LEAVE_WORLD, leaving, end_s)
        created = [agent for agent in self.agents if agent.world is not None]
        goodbyes = [(agent, frames.destroy_request(agent.world or "")) for agent in created]
        _send_and_drain(Kind.DESTROY_WORLD, goodbyes, end_s)
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
            agent.stream = agent.stream or WorldStream(self._dial)
        creators = [agent for agent in self._creators() if agent.world is None]
        error = self._ask(
            Kind.CREATE_WORLD,
            [(agent, frames.create_request(self._create_of(agent))) for agent in creators],
        )
        if error is not None:
            return error
        return self._ask(
            Kind.JOIN_WORLD,
            [
                (agent, frames.join_request(self._world_of(agent), self._join_of(agent)))
                for agent in self.agents
                if agent.specs is None
            ],
        )

    def _ask(self, kind: Kind, requests: list[tuple[Agent, bytes]]) -> RlmeshError | None:
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
                _note(agent, agent.open_stream.receive(kind, self._tries.end_s))
            except (EndpointError, RemoteEnvError) as error:
                if not _may_pass(error):
                    raise _in_our_words(error, self._dial.address) from error
                if isinstance(error, EndpointError):
                    self._drop(agent)
                passing = error
        return passing

    def _drop(self, agent: Agent) -> None:
        """Give up a stream, and the world with it, whoever has joined that."""
        is_shared = self._settings.one_world and agent.world is not None
        for each in self.agents if is_shared else [agent]:
            each.drop()

    def _creators(self) -> list[Agent]:
        if self._settings.create is None:
            return []
        return self.agents[:1] if self._settings.one_world else self.agents

    def _create_of(self, agent: Agent) -> Settings:
        return self._settings.create_of(agent.lane) or {}

    def _join_of(self, agent: Agent) -> Settings:
        return self._settings.join_of(agent.lane)

    def _world_of(self, agent: Agent) -> str:
        if self._settings.create is None:
            return self._settings.world_name
        creator = self.agents[0] if self._settings.one_world else agent
        return creator.world or ""


def _send_and_drain(kind: Kind, requests: Sequence[tuple[Agent, bytes]], end_s: float) -> None:
    """Send requests of one kind, and wait for the answers as far as any come."""
    for agent, frame in requests:
        with contextlib.suppress(Exception):  # whatever broke the stream, it is closed now
            agent.open_stream.send(frame)
    for agent, _ in requests:
        with contextlib.suppress(Exception):
            agent.open_stream.drain(kind, end_s)


def _note(agent: Agent, answer: Answer) -> None:
    if answer.kind is Kind.CREATE_WORLD:
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
    return is_away(error) or has_hung_up(error)


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
