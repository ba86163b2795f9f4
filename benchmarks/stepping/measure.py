"""How fast environments are stepped elsewhere: vector steps, single lanes, frames, stragglers.

Every measurement has fresh processes; the sides of a row take turns in going first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.findings import Finding, Goal
from benchmarks.peers import Peer as Installed
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.statistics import Spread
from benchmarks.stepping.plan import Peer, Row, SteppingPlan
from benchmarks.stepping.specs import (
    CARTPOLE,
    CATCH,
    ENVPOOL,
    FRAMES,
    STRAGGLERS,
    ClientSpec,
    Mode,
    ServerSpec,
)
from benchmarks.stepping.targets import (
    OUR_SERVER,
    UNIT,
    Target,
    dm_env_rpc_target,
    grpc_target,
    released_target,
)
from rlmesh_ray.errors import ConfigurationError

OURS = "rlmesh-ray"
MEMORY, TCP, MESSAGES = "shared memory", "TCP", "gRPC over TCP"
SOCKET = "gRPC over a unix socket"
TRANSPORTS = {MEMORY: "shared_memory", TCP: "tcp", MESSAGES: "grpc", SOCKET: "grpc"}
"""What steps travel by between client and endpoint, and which option of a client that is."""

_SYNC, _ASYNC = "gym sync", "gym async"
"""SyncVectorEnv and AsyncVectorEnv of gymnasium; their full names would make tables too wide."""
_RELEASED, _DM_ENV_RPC = "rlmesh 0.1.0", "dm_env_rpc"
_LOCKSTEP, _LIMIT = "lockstep", "limit"
_ALONE = "environment alone"
_GRPC = "gRPC alone"
_NOOP = "no-op server"
_ENVPOOL = "EnvPool"
_STOCK = "stock client, 1 lane"

_VECTOR_LANES, _FRAME_LANES = 64, 32
_REMOTE_LANES = (1, 8, 32, 128)
_ENVPOOL_LANES = (64, 256)
_SESSIONS, _SESSION_LANES = 8, 8


@dataclass(frozen=True, slots=True)
class _Reach:
    """How much faster than a peer it has to be, at least."""

    peer: str
    ratio: float

    def goal(self) -> Goal:
        return Goal(f"/ {self.peer} >= {self.ratio:g}", self.ratio)


_VECTOR_REACH = {
    MEMORY: _Reach(_SYNC, 0.93),
    TCP: _Reach(_SYNC, 0.8),
    MESSAGES: _Reach(_SYNC, 0.5),
    SOCKET: None,
}
_ONE_LANE_REACH = _Reach(_RELEASED, 7.0)
_EVALUATION_REACH = _Reach(_RELEASED, 2.0)
_FRAMES_REACH = _Reach(_SYNC, 0.92)
_ENVPOOL_REACH = _Reach(_ENVPOOL, 0.85)
_STRAGGLERS_REACH = _Reach(_LOCKSTEP, 3.0)
_DM_ENV_RPC_REACH = _Reach(_NOOP, 0.8)
_BATCHED_REACH = _Reach(_STOCK, 40.0)


@dataclass(frozen=True, slots=True)
class Installations:
    """Peers with virtual environments of their own."""

    released: Installed
    dm_env_rpc: Installed
    simulators: Installed

    def check(self, plan: SteppingPlan) -> None:
        """Make sure that everything is there that ``plan`` needs.

        Raises:
            ConfigurationError: It is not; the message has the command that installs it. Or a row
                has nothing to measure without a peer that was not chosen.
        """
        for row, peer in ((Row.ENVPOOL, Peer.ENVPOOL), (Row.DM_ENV_RPC, Peer.DM_ENV_RPC)):
            if row in plan.rows and peer not in plan.peers:
                raise ConfigurationError(f"--only {row} needs --vs {peer}")
        if Peer.RELEASED in plan.peers and {Row.REMOTE, Row.EVALUATION} & set(plan.rows):
            self.released.check()
        if Peer.DM_ENV_RPC in plan.peers and {Row.CATCH, Row.DM_ENV_RPC} & set(plan.rows):
            self.dm_env_rpc.check()
        if Row.ENVPOOL in plan.rows:
            self.simulators.check()


def measure(
    plan: SteppingPlan, installations: Installations, note: Note
) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other.

    Args:
        plan: What to measure.
        installations: Where the peers are.
        note: Gets every single measurement when it is made.

    Raises:
        ConfigurationError: A peer is not installed, or not chosen; nothing has been measured then.
        EndpointError: A process failed.
    """
    installations.check(plan)
    bench = _Bench(plan, installations, note)
    rows: Mapping[Row, Callable[[], Iterator[Finding]]] = {
        Row.VECTOR: bench.vector,
        Row.REMOTE: bench.remote,
        Row.EVALUATION: bench.evaluation,
        Row.FRAMES: bench.frames,
        Row.ENVPOOL: bench.envpool,
        Row.STRAGGLERS: bench.stragglers,
        Row.CATCH: bench.catch,
        Row.DM_ENV_RPC: bench.dm_env_rpc,
    }
    for row, measured in rows.items():
        if row in plan.rows:
            yield list(measured())


class _Bench:
    """A method a row."""

    def __init__(self, plan: SteppingPlan, installations: Installations, note: Note) -> None:
        self._plan = plan
        self._installations = installations
        self._note = note

    def vector(self) -> Iterator[Finding]:
        """A vector environment elsewhere, against one in the process."""
        case = f"{_VECTOR_LANES} lanes"
        server_spec = ServerSpec(CARTPOLE, _VECTOR_LANES)
        transports = {transport: self._ours(server_spec, transport) for transport in TRANSPORTS}
        others = [*self._local(server_spec), *self._grpc(server_spec)]
        found = self._run(Row.VECTOR, case, [*transports.values(), *others])
        for transport, ours in transports.items():
            yield self._against(
                Row.VECTOR, f"{case}, {transport}", found, ours, _VECTOR_REACH[transport]
            )

    def remote(self) -> Iterator[Finding]:
        """Clients over TCP, against the released rlmesh's."""
        for num_lanes in _REMOTE_LANES:
            case = f"{num_lanes} lanes, {TCP}" if num_lanes > 1 else f"1 lane, {TCP}"
            mode = Mode.VECTOR if num_lanes > 1 else Mode.SINGLE
            server_spec = ServerSpec(CARTPOLE, num_lanes)
            ours = self._ours(server_spec, TCP, mode)
            others = [*self._released(server_spec, mode), *self._grpc(server_spec)]
            found = self._run(Row.REMOTE, case, [ours, *others])
            reach = _ONE_LANE_REACH if num_lanes == 1 else None
            yield self._against(Row.REMOTE, case, found, ours, reach)

    def evaluation(self) -> Iterator[Finding]:
        """A function evaluated over TCP, against the released rlmesh's native loop."""
        case, server_spec = f"a function, 1 lane, {TCP}", ServerSpec(CARTPOLE, 1)
        ours = self._ours(server_spec, TCP, Mode.EVALUATION)
        others = [*self._released(server_spec, Mode.EVALUATION), *self._grpc(server_spec)]
        found = self._run(Row.EVALUATION, case, [ours, *others])
        yield self._against(Row.EVALUATION, case, found, ours, _EVALUATION_REACH)

    def frames(self) -> Iterator[Finding]:
        """Large observations through shared memory, against the process itself."""
        case = f"84x84x4 uint8, {_FRAME_LANES} lanes"
        server_spec = ServerSpec(FRAMES, _FRAME_LANES)
        ours = self._ours(server_spec, MEMORY)
        found = self._run(Row.FRAMES, case, [ours, *self._local(server_spec)])
        yield self._against(Row.FRAMES, case, found, ours, _FRAMES_REACH)

    def envpool(self) -> Iterator[Finding]:
        """EnvPool's own vectors at an endpoint, through shared memory, against the process itself.

        Both sides run in EnvPool's virtual environment.
        """
        python = str(self._installations.simulators.python)
        for num_lanes in _ENVPOOL_LANES:
            case = f"CartPole of EnvPool, {num_lanes} lanes"
            server_spec = ServerSpec(ENVPOOL, num_lanes)
            local = self._client_spec(Mode.SYNC, env=ENVPOOL, num_envs=num_lanes)
            sides = [self._ours(server_spec, MEMORY), Target(_ENVPOOL, local)]
            sides = [
                replace(side, server=(python, *OUR_SERVER[1:]), client=(python, *side.client[1:]))
                for side in sides
            ]
            found = self._run(Row.ENVPOOL, case, sides)
            yield self._against(Row.ENVPOOL, case, found, sides[0], _ENVPOOL_REACH)

    def stragglers(self) -> Iterator[Finding]:
        """Sessions that do not wait for one another, against all lanes in lockstep."""
        case = f"{_SESSIONS} sessions of {_SESSION_LANES} lanes"
        server_spec = ServerSpec(STRAGGLERS, _SESSION_LANES)
        ours, lockstep = (
            Target(
                name,
                self._client_spec(mode, transport=TRANSPORTS[MEMORY]),
                (server_spec,),
                num_sessions=_SESSIONS,
            )
            for name, mode in ((OURS, Mode.SESSIONS), (_LOCKSTEP, Mode.VECTOR))
        )
        alone = Target(
            _ALONE, self._client_spec(Mode.SYNC, env=STRAGGLERS, num_envs=_SESSION_LANES)
        )
        found = self._run(Row.STRAGGLERS, case, [ours, lockstep, alone])
        # What the mean step of one session allows, times the sessions.
        limit = Spread(tuple(_SESSIONS * value for value in found[_ALONE].values))
        sides = {OURS: found[OURS], _LOCKSTEP: found[_LOCKSTEP], _LIMIT: limit}
        yield _finding(Row.STRAGGLERS, case, sides, _STRAGGLERS_REACH)

    def catch(self) -> Iterator[Finding]:
        """The same small game by another protocol."""
        case, server_spec = f"Catch, 1 lane, {TCP}", ServerSpec(CATCH, 1)
        ours = self._ours(server_spec, TCP, Mode.SINGLE)
        sides = [ours]
        if Peer.DM_ENV_RPC in self._plan.peers:
            client_spec, peer = self._client_spec(Mode.SINGLE), self._installations.dm_env_rpc
            sides.append(dm_env_rpc_target(_DM_ENV_RPC, client_spec, server_spec, peer))
        found = self._run(Row.CATCH, case, sides)
        yield self._against(Row.CATCH, case, found, ours, None)

    def dm_env_rpc(self) -> Iterator[Finding]:
        """The protocol's own client with our server, and ours with many lanes in one stream."""
        one, many = ServerSpec(CATCH, 1), ServerSpec(CATCH, _VECTOR_LANES)
        client_spec, peer = self._client_spec(Mode.SINGLE), self._installations.dm_env_rpc
        stock = dm_env_rpc_target(f"{OURS}, stock client", client_spec, one, peer, server="")
        noop = dm_env_rpc_target(
            _NOOP, client_spec, one, peer, server="stepping/dm_env_rpc_noop_server.py"
        )
        ours = Target(f"{OURS}, one batched join", self._client_spec(Mode.BATCHED), (many,))
        found = self._run(Row.DM_ENV_RPC, "Catch", [stock, noop, ours])
        sides = {OURS: found[stock.name], _NOOP: found[_NOOP]}
        yield _finding(Row.DM_ENV_RPC, "stock client, 1 lane", sides, _DM_ENV_RPC_REACH)
        sides = {OURS: found[ours.name], _STOCK: found[stock.name]}
        case = f"our client, {_VECTOR_LANES} lanes in one join"
        yield _finding(Row.DM_ENV_RPC, case, sides, _BATCHED_REACH)

    # --- sides -------------------------------------------------------------------------

    def _ours(self, server_spec: ServerSpec, transport: str, mode: Mode = Mode.VECTOR) -> Target:
        is_socket = transport == SOCKET
        return Target(
            f"{OURS}, {transport}",
            self._client_spec(mode, transport=TRANSPORTS[transport]),
            (ServerSpec(server_spec.env, server_spec.num_envs, server_spec.env_kwargs, is_socket),),
        )

    def _local(self, server_spec: ServerSpec) -> list[Target]:
        modes = {Peer.SYNC: (_SYNC, Mode.SYNC), Peer.ASYNC: (_ASYNC, Mode.ASYNC)}
        return [
            Target(
                name, self._client_spec(mode, env=server_spec.env, num_envs=server_spec.num_envs)
            )
            for peer, (name, mode) in modes.items()
            if peer in self._plan.peers
        ]

    def _released(self, server_spec: ServerSpec, mode: Mode) -> list[Target]:
        if Peer.RELEASED not in self._plan.peers:
            return []
        peer = self._installations.released
        return [released_target(_RELEASED, self._client_spec(mode), server_spec, peer)]

    def _grpc(self, server_spec: ServerSpec) -> list[Target]:
        if Peer.GRPC not in self._plan.peers:
            return []
        return [
            grpc_target(
                _GRPC, self._client_spec(Mode.ECHO, num_envs=server_spec.num_envs), server_spec
            )
        ]

    def _client_spec(
        self, mode: Mode, *, transport: str = "grpc", env: str = CARTPOLE, num_envs: int = 1
    ) -> ClientSpec:
        return ClientSpec(
            mode,
            self._plan.warm_up_s,
            self._plan.seconds,
            transport=transport,
            env=env,
            num_envs=num_envs,
        )

    # --- measuring ---------------------------------------------------------------------

    def _run(self, row: Row, case: str, sides: Sequence[Target]) -> dict[str, Spread]:
        """Return what each side did, by its name."""
        record = Record(row, self._note)
        for repetition in range(self._plan.repetitions):
            for side in by_turns(sides, repetition):
                reading = side.measure()
                value = reading.answers_per_s
                record.add(case, side.name, repetition, value, UNIT, reading)
        return record.sides(case)

    def _against(
        self,
        row: Row,
        case: str,
        found: Mapping[str, Spread],
        ours: Target,
        reach: _Reach | None,
    ) -> Finding:
        """Compare one of our sides with all that are not ours."""
        others = {name: each for name, each in found.items() if not name.startswith(OURS)}
        return _finding(row, case, {OURS: found[ours.name], **others}, reach)


def _finding(row: Row, case: str, sides: Mapping[str, Spread], reach: _Reach | None) -> Finding:
    by_peer = ratios(sides)
    judged = by_peer.get(f"/ {reach.peer}") if reach else None
    goal = reach.goal() if reach and judged else None
    return Finding(row, case, UNIT, sides, by_peer, goal, judged)
