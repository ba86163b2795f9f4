"""The server and the client of a measurement of steps; both are sent as JSON."""

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Self

CARTPOLE = "CartPole-v1"
# Importing the module before the colon registers the environment.
FRAMES = "benchmarks.stepping.environments:rlmesh_ray/BenchFrames-v0"
CATCH = "benchmarks.stepping.environments:rlmesh_ray/BenchCatch-v0"
STRAGGLERS = "stragglers"
"""No id: ``environments.Stragglers`` has a width of its own."""
ENVPOOL = "envpool"
"""No id: CartPole as EnvPool has it, a vector environment of any width."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """An endpoint to serve."""

    env: str
    """A Gymnasium id, ``STRAGGLERS`` or ``ENVPOOL``."""
    num_envs: int
    """Lanes of a session."""
    env_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Of one environment."""
    is_socket: bool = False
    """Whether it listens on a unix socket; else on 127.0.0.1."""
    sessions_per_worker: int = 1
    records: bool = False
    """Whether it records all episodes."""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        return cls(**json.loads(line))


class Mode(enum.StrEnum):
    """How environments are stepped."""

    SYNC = "sync"
    """In this process, by gymnasium's SyncVectorEnv."""
    ASYNC = "async"
    """By its AsyncVectorEnv, with shared memory."""
    VECTOR = "vector"
    """By a RemoteVectorEnv; by several, all of them wait for the last one in each step."""
    SESSIONS = "sessions"
    """By several RemoteVectorEnvs, none of which waits for another one."""
    SINGLE = "single"
    """By a RemoteEnv, which is reset at the end of each episode."""
    EVALUATION = "evaluation"
    """By a whole evaluation of a function."""
    BATCHED = "batched"
    """By a RemoteVectorEnv whose lanes share one stream of dm_env_rpc."""
    ECHO = "echo"
    """Not at all: a frame of the size of a step's goes to a server that sends it back."""


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """The work of a process that steps environments."""

    mode: Mode
    warm_up_s: float
    """Work before the measurement, which is not counted."""
    seconds: float
    """Of the measurement."""
    addresses: tuple[str, ...] = ()
    """One a session; the same one several times for several sessions with one endpoint."""
    transport: str = "grpc"
    """What steps travel by: see ``RemoteEnv``."""
    env: str = CARTPOLE
    """In this process."""
    num_envs: int = 1
    """Likewise."""
    env_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Likewise."""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        fields = json.loads(line)
        return cls(
            **{**fields, "mode": Mode(fields["mode"]), "addresses": tuple(fields["addresses"])}
        )
