"""Trials on Ray: nodes that are lost, fleets that shrink, replicas and simulators that restart."""

import contextlib
import itertools
import json
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from rlmesh_ray import RemoteModel, TokenFile
from rlmesh_ray.actors import EnvFleet, EnvPool, Gateway, ModelFleet
from rlmesh_ray.errors import EndpointError
from tests.chaos.driver import Driver
from tests.chaos.hash_chain import HashChain, Position, act
from tests.chaos.history import History
from tests.chaos.rpc_training import DOUBLED, ENDING, NUM_LOST
from tests.chaos.runners import RunnerClient
from tests.chaos.scoreboard import Row
from tests.chaos.vector_client import LIMIT_S, NUM_LANES, TIMEOUT_S
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

_NUM_ENDPOINTS = 2
_NUM_SESSIONS = 4
"""Of a runner."""
_SIMULATOR = "simulator"
"""The resource of the nodes that endpoints may be on."""
_START_S = 120.0
_NUM_ITERATIONS = 12
_MOST_STARTS = 10
_TRAINING_S = 300.0
_MOST_SHOWN = 2000
_NUM_PREDICTIONS = 16
"""Of a short session."""
_ENV = "tests.chaos.hash_chain:HashChain"


def lose_nodes(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Kill nodes with endpoints while a runner samples."""
    moments = random.Random(f"{seed}, {row.name}")
    resumed_s = []
    with (
        _cluster() as cluster,
        _fleet(actor_options={"resources": {_SIMULATOR: 1}}) as fleet,
        Driver(row.name, _runner(fleet, history)) as driver,
    ):
        for _ in range(num_trials):
            places = _places(fleet)
            lost = moments.choice([each for each in cluster.worker_nodes if each.node_id in places])
            driver.see_answers(1)
            threading.Event().wait(moments.uniform(0.0, 1.0))
            began_s = time.monotonic()
            cluster.remove_node(lost, allow_graceful=False)
            history.fault(row.fault)
            # What ran there lives on for a while.
            driver.wait(partial(_are_elsewhere, fleet, lost.node_id), "endpoints stay lost")
            driver.see_answers(1)
            resumed_s.append(time.monotonic() - began_s)
            _add_node(cluster)
        driver.see_answers(3)
    return resumed_s


def scale_fleet(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Give a fleet one endpoint more, then drain that, while a runner samples."""
    moments = random.Random(f"{seed}, {row.name}")
    resumed_s = []
    with _local_ray(), _fleet() as fleet:
        client = _runner(fleet, history)
        with Driver(row.name, client) as driver:
            for _ in range(num_trials):
                fleet.scale(_NUM_ENDPOINTS + 1)
                newest = fleet.actors[-1]
                driver.wait(partial(_has_sessions, newest), "no session has moved")
                pid = ray.get(newest.describe.remote())["pid"]
                threading.Event().wait(moments.uniform(0.0, 1.0))
                began_s = time.monotonic()
                fleet.scale(_NUM_ENDPOINTS)
                history.fault(row.fault)
                driver.wait(partial(_is_gone, pid), "an endpoint does not end")
                driver.see_answers(1)
                resumed_s.append(time.monotonic() - began_s)
        _expect_no_failure(client, history)
    return resumed_s


def restart_simulators(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Stop a pool's simulators in turns and start them again, while a runner samples."""
    moments = random.Random(f"{seed}, {row.name}")
    resumed_s = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret = folder / "pool-token"
        secret.touch(mode=0o600)
        secret.write_text(f"{moments.getrandbits(128):032x}\n")
        stack.enter_context(_local_ray())
        pool = stack.enter_context(EnvPool("chaos", token=TokenFile(secret)))

        def start(name: str) -> "subprocess.Popen[bytes]":
            command = [
                *(sys.executable, "-m", "rlmesh_ray", "serve-env", _ENV),
                *("--num-envs", str(NUM_LANES), "--leave-time", f"{LIMIT_S:g}"),
                *("--register", f"{pool.name}@{pool.address}", "--endpoint-id", name),
                *("--pool-token-file", str(secret)),
            ]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)  # and then it is waited for
            return process

        simulators = {name: start(name) for name in ("one", "other")}
        pool.wait(len(simulators), _START_S)
        client = _runner(pool, history)
        with Driver(row.name, client) as driver:
            for trial in range(num_trials):
                name = list(simulators)[trial % len(simulators)]
                driver.see_answers(1)
                threading.Event().wait(moments.uniform(0.0, 1.0))
                began_s = time.monotonic()
                simulators[name].terminate()
                history.fault(row.fault)
                driver.wait(partial(_has_ended, simulators[name]), "a simulator does not end")
                simulators[name] = start(name)
                pool.wait(len(simulators), _START_S)
                driver.see_answers(1)
                resumed_s.append(time.monotonic() - began_s)
        _expect_no_failure(client, history)
    return resumed_s


def restart_replicas(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Restart a policy's replicas in turns, while clients of a gateway predict."""
    moments = random.Random(f"{seed}, {row.name}")
    resumed_s = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_local_ray())
        fleet = stack.enter_context(
            ModelFleet(act, name="chaos", num_replicas=_NUM_ENDPOINTS, num_cpus=0.1)
        )
        gateway = stack.enter_context(Gateway(fleet, free_address()))
        clients = [
            PredictingClient(gateway, history, num_predictions, seed)
            for num_predictions in (_NUM_PREDICTIONS, 20 * _NUM_PREDICTIONS)
        ]
        drivers = [stack.enter_context(Driver(row.name, client)) for client in clients]
        for trial in range(num_trials):
            for driver in drivers:
                driver.see_answers(1)
            threading.Event().wait(moments.uniform(0.0, 0.5))
            began_s = time.monotonic()
            fleet.restart(trial % _NUM_ENDPOINTS, drain_timeout_s=LIMIT_S)
            history.fault(row.fault)
            for driver in drivers:
                driver.see_answers(1)
            resumed_s.append(time.monotonic() - began_s)
    return resumed_s


def fail_calls(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Run trainings while some of Ray's own calls fail."""
    seeds = itertools.count(seed)
    for _ in range(num_trials):
        # Ray does not always survive its own start.
        for _attempt in range(_MOST_STARTS):
            if _train(row, history, next(seeds)):
                break
        else:
            raise TimeoutError(f"Ray did not start {_MOST_STARTS} times")
    return []


def _train(row: Row, history: History, seed: int) -> bool:
    """Run a training; return whether it has begun."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.chaos.rpc_training"]
        command += [folder, str(_NUM_ITERATIONS), str(seed)]
        try:
            training = subprocess.run(
                command, timeout=_TRAINING_S, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            ending = {ENDING: f"it did not end in {_TRAINING_S:g} s", DOUBLED: [], NUM_LOST: 0}
            training = subprocess.CompletedProcess(command, 0, json.dumps(ending), "")
        paths = sorted(Path(folder).glob("*.jsonl"))
        if training.returncode and not paths:
            return False
        history.fault(row.fault)
        for path in paths:
            history.take_over(path)
    if training.returncode:
        history.wrong(f"a training has failed: {training.stderr[-_MOST_SHOWN:]}")
        return True
    found = json.loads(training.stdout.splitlines()[-1])
    if found[ENDING]:
        history.lost("", found[ENDING])
    for text in found[DOUBLED]:
        history.wrong(text)
    for _ in range(found[NUM_LOST]):
        history.lost("", "a sample did not reach the algorithm")
    return True


class PredictingClient:
    """Opens a session for each ``advance`` and asks for predictions; no prediction may fail.

    Args:
        gateway: Where it asks.
        history: Gets the answers.
        num_predictions: Of a session.
        seed: Of what is observed.
    """

    def __init__(self, gateway: Gateway, history: History, num_predictions: int, seed: int) -> None:
        self._gateway, self._history = gateway, history
        self._num_predictions = num_predictions
        self._draws = np.random.default_rng([seed, num_predictions])
        self._route = gymnasium.vector.SyncVectorEnv([HashChain] * NUM_LANES)

    def advance(self) -> bool:
        """Ask for predictions in a new session; one that does not open is dialed again."""
        num_asked = 0
        try:
            with RemoteModel(self._gateway.address, token=self._gateway.token) as model:
                model.configure_route(self._route)
                for num_asked in range(1, self._num_predictions + 1):  # noqa: B007
                    self._ask(model)
        except EndpointError as error:
            if num_asked:
                self._history.wrong(f"prediction {num_asked} of a session has failed: {error}")
            else:
                self._history.lost("", f"{type(error).__name__}: {error}")
            return False
        return True

    def close(self) -> None:
        """Do nothing: no session is open."""

    def _ask(self, model: RemoteModel) -> None:
        episodes = self._draws.integers(1, 2**20, size=NUM_LANES)
        places = [Position.first(int(episode), 1) for episode in episodes]
        observations = np.stack([place.observation() for place in places])
        for observation, action in zip(observations, model.predict(observations), strict=True):
            self._history.predicted("", observation, action)


TRIALS: Mapping[str, Callable[[Row, int, History, int], list[float]]] = {
    "node_loss": lose_nodes,
    "drain": scale_fleet,
    "rolling_restart": restart_simulators,
    "restart_replicas": restart_replicas,
    "ray_rpc": fail_calls,
}
"""By fault: runs trials; returns how long each took until answers came again."""


@contextmanager
def _cluster() -> Iterator[Cluster]:
    """A head, and two nodes with room for all endpoints each."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        for _ in range(2):
            _add_node(cluster)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _local_ray() -> Iterator[None]:
    ray.init(
        "local",
        num_cpus=8,  # logical
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _add_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=2, resources={_SIMULATOR: _NUM_ENDPOINTS})


def _fleet(**options: Any) -> EnvFleet:
    return EnvFleet(
        HashChain, num_endpoints=_NUM_ENDPOINTS, num_envs=NUM_LANES, num_cpus=0.1, **options
    )


def _places(fleet: EnvFleet) -> set[str]:
    """Wait until all endpoints serve; return the ids of the nodes that they are on."""
    reported: list[Any] = []

    def are_there() -> bool:
        try:
            asked = [actor.describe.remote() for actor in fleet.actors]
            reported[:] = ray.get(asked, timeout=TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False
        return True

    if not eventually(are_there, _START_S):
        raise TimeoutError(f"the fleet's endpoints do not serve after {_START_S:g} s")
    return {each["node_id"] for each in reported}


def _are_elsewhere(fleet: EnvFleet, node_id: str) -> bool:
    return node_id not in _places(fleet)


def _has_sessions(endpoint: Any) -> bool:
    return int(ray.get(endpoint.describe.remote())["num_sessions"]) > 0


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is not None


def _expect_no_failure(client: RunnerClient, history: History) -> None:
    """The runner was asked for all that was taken from it: nothing has broken."""
    for name in client.failures():
        history.wrong(f"the runner counts {name}")


def _runner(place: Any, history: History) -> RunnerClient:
    return RunnerClient(
        place, history, num_sessions=_NUM_SESSIONS, num_lanes=NUM_LANES, timeout_s=TIMEOUT_S
    )
