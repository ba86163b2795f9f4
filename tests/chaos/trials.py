"""Trials: faults at random moments, while clients step hash chains; nothing may be lost or doubled.

``make chaos`` runs all rows, and ``ROWS='cut kill' SEED=7 make chaos`` some of them. Each row
writes what its client saw to ``runs/chaos/ROW.jsonl``, which a checker reads
(``history.check_file``). The exit status is 1 where it finds anything.
"""

import argparse
import contextlib
import datetime
import logging
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmesh_ray.options import SHARED_MEMORY, TCP
from rlmesh_ray.transport import direct_connection
from rlmesh_ray.transport.direct_connection import DirectConnection
from tests.chaos.chain_variants import give_order
from tests.chaos.driver import Driver
from tests.chaos.endpoint import GRACE_S, Endpoint
from tests.chaos.history import History, Verdict, check_file, shown
from tests.chaos.link import Link, lacking
from tests.chaos.proxy import Proxy
from tests.chaos.scoreboard import Row, RowNotRunError, head, line_of_none, result_line, write_page
from tests.chaos.soak import soak
from tests.chaos.token_trials import rotate_tokens
from tests.chaos.vector_client import NUM_LANES, TIMEOUT_S, CallingClient, Client, VectorClient

NUM_SESSIONS = 2
"""Of a runner."""
_LAST_LOOKS = 3
GRPC = "grpc"
_NETWORK_FAULTS = ("half_open", "loss", "delay")
_BLACKHOLE_S = 5.0
_LOSS = 0.1
_LONGEST_DELAY_S = 0.1
_DISTURBANCE_S = 0.5, 3.0
"""How long packets are lost or delayed: at least and at most."""


class OpenDirectConnections:
    """The direct connections that clients of this process have open."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[DirectConnection] = weakref.WeakSet()

    @contextmanager
    def watched(self) -> Iterator["OpenDirectConnections"]:
        """Take notice of all that are opened meanwhile."""
        begin: Any = DirectConnection.__init__
        losses_s = direct_connection.LOSSES_S

        def noting(direct: DirectConnection, *arguments: Any, **named: Any) -> None:
            begin(direct, *arguments, **named)
            self._known.add(direct)

        DirectConnection.__init__ = noting  # type: ignore[method-assign,assignment]
        direct_connection.LOSSES_S = 0.0  # faults come more often than in life
        try:
            yield self
        finally:
            DirectConnection.__init__ = begin  # type: ignore[method-assign]
            direct_connection.LOSSES_S = losses_s

    def num_sent(self) -> dict[DirectConnection, int]:
        """Return the number of the last step that each open one has sent."""
        return {direct: direct.number for direct in list(self._known) if direct.is_open}

    def are_used(self, since: Mapping[DirectConnection, int]) -> bool:
        """Tell whether a step was sent over any since ``num_sent`` was asked."""
        return any(number > since.get(direct, 0) for direct, number in self.num_sent().items())

    def cut(self) -> None:
        """Cut them all, as the endpoint does, also while their clients are at work."""
        for direct in list(self._known):
            direct.worker_socket.hang_up()


class Trials:
    """The trials of one row.

    Args:
        row: Which.
        history: Gets the faults.
        seed: Of the moments.
    """

    def __init__(self, row: Row, history: History, seed: int) -> None:
        self._row, self._history = row, history
        self._random = random.Random(f"{seed}, {row.name}")
        self._stack = contextlib.ExitStack()
        self.resumed_s: list[float] = []
        """How long it took, after each fault, until the client had been answered again."""
        self._direct = OpenDirectConnections()
        self._link: Link | None = None
        if row.fault in _NETWORK_FAULTS:
            self._link = Link(seed)
            self._stack.callback(self._link.close)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._order = Path(folder) / "order"
        self._endpoint = self._make_endpoint()
        self._stack.callback(self._endpoint.stop)
        self._proxy = Proxy(self._endpoint.address)
        self._stack.callback(self._proxy.close)
        self._inject: dict[str, Callable[[], None]] = {
            "cut_direct": self._direct.cut,
            "cut_join": self._proxy.cut,
            "kill_worker": lambda: self._signal(signal.SIGKILL, self._endpoint.workers()),
            "kill_endpoint": self._endpoint.kill,
            "freeze_worker": lambda: self._freeze(self._endpoint.workers()),
            "freeze_endpoint": lambda: self._freeze([self._endpoint.pid]),
            "half_open": lambda: self._disturb("is_cut", True, _BLACKHOLE_S),
            "loss": lambda: self._disturb("loss", _LOSS, self._random.uniform(*_DISTURBANCE_S)),
            "delay": lambda: self._disturb(
                "longest_delay_s", _LONGEST_DELAY_S, self._random.uniform(*_DISTURBANCE_S)
            ),
            "slow_env": lambda: self._order_trouble(f"{self._slow_s():.3f}"),
            "raising_env": lambda: self._order_trouble("raise"),
            "calls": lambda: self._inject[self._random.choice(_FAULTS_OF_CALLS)](),
        }

    def run(self, num_trials: int, make: Callable[[str], Client]) -> None:
        """Inject faults while a client steps.

        Args:
            num_trials: How many.
            make: Makes the client, given the address.

        Raises:
            BaseException: The client's, for what it should have survived.
        """
        with self._stack, self._direct.watched():
            address = self._endpoint.address if self._link else self._proxy.address
            client = make(address)
            with Driver(self._row.name, client) as driver:
                for _ in range(num_trials):
                    self._try(driver)
                driver.see_answers(_LAST_LOOKS)

    def _make_endpoint(self) -> Endpoint:
        has_agents = self._row.client.startswith("agents")
        options: dict[str, Any] = {
            "num_envs": 1 if has_agents else NUM_LANES,
            "transport": self._row.transport,
        }
        env = "tests.chaos.hash_chain:Pair" if has_agents else "tests.chaos.hash_chain:HashChain"
        if self._row.fault in {"slow_env", "raising_env"}:
            env = "tests.chaos.chain_variants:OrderedTrouble"
            options["env_kwargs"] = {"path": str(self._order)}
        if self._row.fault == "calls":
            env = "tests.chaos.chain_variants:CalledChain"
            options["allow_calls"] = ("look", "mark")
        return Endpoint(env, link=self._link, **options)

    def _try(self, driver: Driver) -> None:
        driver.see_answers(1)
        if self._row.transport != GRPC:
            before = self._direct.num_sent()
            driver.wait(lambda: self._direct.are_used(before), "no step took a direct connection")
        threading.Event().wait(self._random.uniform(0.0, 0.02))
        began_s = time.monotonic()
        self._inject[self._row.fault]()
        if self._row.fault in {"slow_env", "raising_env"}:
            driver.wait(lambda: not self._order.exists(), "no environment was stepped")
        self._history.fault(self._row.fault)
        driver.see_answers(1)
        self.resumed_s.append(time.monotonic() - began_s)

    def _freeze(self, pids: Sequence[int]) -> None:
        """Stop processes for up to twice the steps' timeout, or for a moment."""
        self._signal(signal.SIGSTOP, pids)
        longest_s = self._random.choice([0.1, 2 * TIMEOUT_S])
        threading.Event().wait(self._random.uniform(0.0, longest_s))
        self._signal(signal.SIGCONT, pids)

    def _disturb(self, what: str, value: object, duration_s: float) -> None:
        """Have the link cut, lossy or slow for a while."""
        former = getattr(self._link, what)
        setattr(self._link, what, value)
        threading.Event().wait(duration_s)
        setattr(self._link, what, former)

    def _slow_s(self) -> float:
        """Return how long a step takes: in time, within the grace after its timeout, or longer."""
        bounds = 0.0, TIMEOUT_S, TIMEOUT_S + GRACE_S, 2 * TIMEOUT_S
        which = self._random.randrange(len(bounds) - 1)
        return self._random.uniform(bounds[which], bounds[which + 1])

    def _order_trouble(self, kind: str) -> None:
        give_order(self._order, f"{kind} {self._random.choice(['before', 'after'])}")

    def _signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run(row: Row, num_trials: int, seed: int, folder: Path) -> tuple[Verdict, list[float]]:
    """Run the trials of one row; return what the checker found, and how long clients waited.

    Raises:
        RowNotRunError: This machine lacks what the row needs.
    """
    if row.fault in _NETWORK_FAULTS and (reason := lacking()):
        raise RowNotRunError(f"network namespaces need {reason}")
    path = folder / f"{row.name}.jsonl"
    history = History(path)
    try:
        resumed_s = _trials_of(row)(row, num_trials, history, seed)
    finally:
        history.close()
    verdict = check_file(path)
    allowed = re.compile(FAULTS[row.fault].may_cut_short)
    for cause, count in verdict.causes.items():
        if not allowed.search(cause):
            verdict.violations.append(f"{count} episodes were cut short: {cause}")
    return verdict, resumed_s


def _trials_of(row: Row) -> Callable[[Row, int, History, int], list[float]]:
    """Return what runs the trials of a row, and returns how long it took until answers came."""
    if row.fault in _FAULTS_ON_RAY:
        from tests.chaos import ray_trials

        return ray_trials.TRIALS[row.fault]
    return {"rotate_tokens": rotate_tokens, "soak": soak}.get(row.fault, _run_trials)


def _run_trials(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    trials = Trials(row, history, seed)
    trials.run(num_trials, lambda address: _client(row, address, history, seed))
    return trials.resumed_s


def _client(row: Row, address: str, history: History, seed: int) -> Client:
    if row.client == "vector":
        kind = CallingClient if row.fault == "calls" else VectorClient
        return kind(address, history, seed=seed)
    from tests.chaos.runners import RunnerClient  # brings Ray along

    kind_of_env, _, pace = row.client.partition("-")
    return RunnerClient(
        address,
        history,
        is_multi_agent=kind_of_env == "agents",
        lockstep=pace == "lockstep",
        num_sessions=NUM_SESSIONS,
        num_lanes=1 if kind_of_env == "agents" else NUM_LANES,
        timeout_s=TIMEOUT_S,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """What is injected, and into whose work."""

    num_trials: int
    """In each row of a full run."""
    text: str
    clients: Sequence[str] = ("vector", "runner", "runner-lockstep", "agents", "agents-lockstep")
    transports: Sequence[str] = (SHARED_MEMORY, TCP, GRPC)
    """What the steps travel by: values of the EnvServer's ``transport``."""
    may_cut_short: str = ""
    """What the causes of episodes' ends without an end must hold, a regular expression."""


_LINK_TEXT = "between two network namespaces (a thread passes packets on between TUN devices)"
_FEW = ("vector", "runner")
FAULTS = {
    "cut_direct": Fault(
        260, "the socket of the direct connection is shut down", transports=[SHARED_MEMORY, TCP]
    ),
    "cut_join": Fault(70, "the connections of the Join stream are reset"),
    "kill_worker": Fault(18, "the environments' processes are killed"),
    "kill_endpoint": Fault(12, "the endpoint is killed, and started again at its port"),
    "freeze_worker": Fault(4, "the environments' processes are stopped for up to 4 s"),
    "freeze_endpoint": Fault(2, "the endpoint is stopped for up to 4 s"),
    "half_open": Fault(50, f"no packet passes for 5 s, {_LINK_TEXT}", _FEW, [TCP, GRPC]),
    "loss": Fault(
        50, f"a tenth of the packets is lost for 0.5 to 3 s, {_LINK_TEXT}", _FEW, [TCP, GRPC]
    ),
    "delay": Fault(
        50, f"packets take 0 to 0.1 s each way for 0.5 to 3 s, {_LINK_TEXT}", _FEW, [TCP, GRPC]
    ),
    "slow_env": Fault(
        25,
        "a step takes up to 4 s: in time, longer than the timeout, longer than the grace",
        _FEW,
    ),
    "raising_env": Fault(50, "a step raises, before or after it has done its work", _FEW),
    "calls": Fault(
        150,
        "the client looks at its lanes, marks and renders them between steps, while the direct "
        "connection or the Join stream is cut or the environments' process is killed",
        ["vector"],
        [SHARED_MEMORY, TCP],
    ),
    "node_loss": Fault(
        30,
        "a node of a Ray cluster, with endpoints, is killed; another one comes",
        ["runner"],
        [SHARED_MEMORY],
    ),
    "rotate_tokens": Fault(
        30,
        "the token is replaced in the server's file and the client's; no call may fail",
        ["vector"],
    ),
    "drain": Fault(
        30,
        "a fleet gets an endpoint, then drains it (`EnvFleet.scale`); nothing may fail",
        ["runner"],
        [SHARED_MEMORY],
        "moved away from endpoint",
    ),
    "rolling_restart": Fault(
        30,
        "simulators of a pool are stopped in turns (`serve-env --leave-time`) and started again; "
        "nothing may fail",
        ["runner"],
        [SHARED_MEMORY],
        "moved away from endpoint",
    ),
    "restart_replicas": Fault(
        30,
        "a policy's replicas are restarted in turns (`ModelFleet.restart`) behind a gateway; what "
        "is counted are predictions, of which none may fail; cut short are sessions that did not "
        "open, since the gateway had not yet heard of the restart, and were dialed again",
        ["model"],
        [GRPC],
        "takes no new sessions|has gone",
    ),
    "ray_rpc": Fault(
        5,
        "PPO trains with two runners while 12 % of Ray's own calls fail "
        "(`RAY_testing_rpc_failure`); what runners sample is checked, and that nothing reaches the "
        "algorithm twice; cut short are samples whose way there Ray has lost, too",
        ["training"],
        [SHARED_MEMORY],
    ),
    "soak": Fault(
        0,
        "no fault, and only on demand (`ROWS=soak SOAK_MINUTES=120 make chaos`): one client steps "
        "in one session, another in session after session; violations are more and more "
        "descriptors or threads, and, in an hour or more, memory that grows by more than 1 MB/h "
        "and 0.5 KB a session; the trials are minutes",
        ["vector"],
        [SHARED_MEMORY],
    ),
}
_FAULTS_ON_RAY = ("ray_rpc", "node_loss", "drain", "rolling_restart", "restart_replicas")
_FAULTS_OF_CALLS = ("cut_direct", "cut_join", "kill_worker")
ROWS = tuple(
    Row(name, client, transport, fault.num_trials)
    for name, fault in FAULTS.items()
    for client in fault.clients
    for transport in fault.transports
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows, write a scoreboard, return the exit status."""
    parser = argparse.ArgumentParser(description="Inject faults while clients step hash chains.")
    parser.add_argument("rows", nargs="*", help="Beginnings of rows' names; all rows.")
    parser.add_argument("--seed", type=int, default=1, help="Of the moments and actions.")
    parser.add_argument("--trials", type=int, help="Of each row; by default a full run's.")
    parser.add_argument("--soak-minutes", type=int, default=10, help="How long the soak lasts.")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="For histories.")
    parser.add_argument("--page", type=Path, help="Whose lines of these rows are replaced.")
    options = parser.parse_args(arguments)
    chosen = [row for row in ROWS if row.name.startswith(tuple(options.rows))]
    if not options.rows:
        chosen = [row for row in ROWS if row.num_trials]
    if not chosen:
        parser.error(f"no row begins so; there are: {' '.join(row.name for row in ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    # Runners warn of each fault.
    logging.basicConfig(filename=options.out / "warnings.log", filemode="w")
    above = head((name, fault.text) for name, fault in FAULTS.items())
    sys.stdout.write(above)
    num_violations = 0
    for row in chosen:
        command = f"`ROWS={row.fault} SEED={options.seed} make chaos`"
        when = f"{datetime.date.today()}, {os.cpu_count()} cores, {command}"
        num_trials = options.trials or row.num_trials or options.soak_minutes
        try:
            verdict, resumed_s = run(row, num_trials, options.seed, options.out)
        except RowNotRunError as reason:
            verdict = Verdict()
            line = line_of_none(row, str(reason), when)
        else:
            line = result_line(row, verdict, resumed_s, when)
        num_violations += len(verdict.violations)
        sys.stdout.write(line + shown(verdict.violations))
        sys.stdout.flush()
        if options.page is not None:
            write_page(options.page, above, ROWS, [line])
    return int(num_violations > 0)


if __name__ == "__main__":
    sys.exit(main())
