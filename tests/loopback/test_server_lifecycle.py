"""Endpoints that are started twice, stopped early, abandoned, or left by their clients."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.errors import AddressError, LocalProtocolError, RemoteEnvError
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.child_processes import worker_pids
from tests.loopback.client_internals import endpoints_give_up_after, vanish
from tests.loopback.eventually import eventually


class Exits(gymnasium.Env[Any, Any]):
    """Ends its process on action 1; hangs in its constructor while ``gate`` is a pipe."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, gate: str = "") -> None:
        if gate and os.path.exists(gate):
            with open(gate):  # until the test opens the other end
                pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        if action == 1:
            os._exit(3)
        return 0, 0.0, False, False, {}


def test_a_second_start_leaves_the_running_server_alone() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteEnv(server.address)
        env.reset()

        with pytest.raises(LocalProtocolError, match="already"):
            server.start()

        env.step(0)
        env.close()


def test_a_server_that_was_stopped_does_not_start_again() -> None:
    server = EnvServer("CartPole-v1")
    server.stop()

    with pytest.raises(LocalProtocolError, match="make a new one"):
        server.start()


def test_a_unix_socket_that_is_served_is_not_taken_away(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'model.sock'}"
    with ModelServer(len, address=address):
        with pytest.raises(AddressError, match="another server"):
            ModelServer(len, address=address).start()

        RemoteModel(address).close()


def test_a_unix_socket_that_a_dead_server_left_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "model.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    with ModelServer(len, address=f"unix:{path}"):
        RemoteModel(f"unix:{path}").close()


def test_an_impossible_unix_socket_is_named_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="folder does not exist"):
        ModelServer(len, address=f"unix:{tmp_path}/no/model.sock").start()


def test_the_only_place_is_free_again_when_close_returns() -> None:
    with EnvServer("CartPole-v1", max_sessions=1) as server:
        for _ in range(10):
            env = RemoteEnv(server.address)
            env.reset()
            env.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_workers_that_died_are_let_go() -> None:
    with EnvServer(Exits) as server:
        env = RemoteEnv(server.address)
        env.reset()
        counts = []
        for _ in range(3):
            with pytest.raises(RemoteEnvError, match="exit code 3"):
                env.step(1)
            env.reset()
            counts.append(num_descriptors())

        assert eventually(lambda: num_descriptors() <= counts[0] + 1)
        assert len(worker_pids()) == 1
        env.close()


@pytest.mark.parametrize(
    "transport", ["shared_memory", "grpc", pytest.param("tcp", marks=pytest.mark.nightly)]
)
def test_sessions_that_share_a_process_step_as_if_alone(transport: str) -> None:
    alone = [gymnasium.make_vec("CartPole-v1", 2, "sync") for _ in range(2)]
    with EnvServer("CartPole-v1", num_envs=2, sessions_per_worker=2) as server:
        envs = [RemoteVectorEnv(server.address, transport=transport) for _ in range(2)]
        for seed in range(2):
            assert_identical(envs[seed].reset(seed=seed), alone[seed].reset(seed=seed))
        assert len(worker_pids()) == 1
        for action in (0, 1, 1):
            for env, one in zip(envs, alone, strict=True):
                assert_identical(env.step(np.full(2, action)), one.step(np.full(2, action)))
        envs[0].close()
        for _ in range(20):
            assert_identical(
                envs[1].step(np.zeros(2, np.int64)), alone[1].step(np.zeros(2, np.int64))
            )
        envs[1].close()


def test_each_session_of_a_process_that_ends_recovers() -> None:
    with EnvServer(Exits, sessions_per_worker=2) as server:
        first, second, third = envs = [RemoteEnv(server.address) for _ in range(3)]
        for env in envs:
            env.reset()
        pids = worker_pids()
        assert len(pids) == 2

        for env, action in ((first, 1), (second, 0)):
            with pytest.raises(RemoteEnvError, match="exit code 3"):
                env.step(action)
        third.step(0)
        for env in (first, second):
            env.reset()
            env.step(0)

        assert len(worker_pids()) == 2
        for env in envs:
            env.close()


def test_workers_that_die_between_two_requests_leave_nothing_behind() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteEnv(server.address, transport="grpc")
        env.reset()
        counts = []
        for _ in range(2):
            (pid,) = worker_pids()
            process = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            assert select.select([process], [], [], 20.0)[0]
            os.close(process)
            env.reset()  # finds out, and gets another worker
            counts.append(num_descriptors())

        assert eventually(lambda: num_descriptors() <= counts[0])
        assert len(worker_pids()) == 1
        env.close()


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    with EnvServer("CartPole-v1") as server:
        counts = []
        for cycle in range(20):
            env = EnvClient(ConnectOptions(server.address))
            env.reset()
            env.step([np.zeros(1, np.int64)])
            if cycle % 2:
                vanish(env)
            env.close()
            assert eventually(lambda: server.num_sessions == 0)
            counts.append(num_descriptors())

        # Connections close in gRPC's own time.
        assert eventually(lambda: num_descriptors() <= counts[3] + 4)
        assert len(worker_pids()) == 1


def test_clients_that_leave_while_their_worker_starts_start_no_more_than_one(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with EnvServer(Exits, env_kwargs={"gate": str(gate)}) as server:
        stays = RemoteEnv(server.address)
        stays.reset()
        os.mkfifo(gate)
        for _ in range(4):
            leaves = EnvClient(ConnectOptions(server.address))
            leaves.send_reset()
            assert eventually(lambda: server.num_sessions == 2 and len(worker_pids()) == 2)
            vanish(leaves)
            assert eventually(lambda: server.num_sessions == 1)
        comes = EnvClient(ConnectOptions(server.address))
        with gate.open("w"):
            comes.reset()

        assert len(worker_pids()) == 2
        comes.close()
        stays.close()


class Simulated(gymnasium.Env[Any, Any]):
    """Starts a simulator in a session of its own, and leaves it running when it closes."""

    observation_space = action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        detach = "setsid sleep 1000 >/dev/null & echo $!"
        started = subprocess.run(["sh", "-c", detach], stdout=subprocess.PIPE, check=True)
        self.simulator = int(started.stdout)

    def reset(self, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        return 0, {"simulator": self.simulator, "worker": os.getpid()}

    def step(self, action: object) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}


@pytest.mark.skipif(sys.platform != "linux", reason="processes have guards on Linux only")
def test_a_simulator_that_its_environment_leaves_running_ends_with_the_session() -> None:
    with EnvServer(Simulated) as server:
        with RemoteEnv(server.address) as env:
            _, first = env.reset()
        assert eventually(lambda: not psutil.pid_exists(first["simulator"]))
        with RemoteEnv(server.address) as env:
            _, second = env.reset()

    assert second["worker"] != first["worker"]


def test_a_worker_that_starts_ends_with_its_server(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with EnvServer(Exits, env_kwargs={"gate": str(gate)}) as server:
        stays = RemoteEnv(server.address)
        stays.reset()
        os.mkfifo(gate)
        leaves = EnvClient(ConnectOptions(server.address))
        leaves.send_reset()
        assert eventually(lambda: server.num_sessions == 2 and len(worker_pids()) == 2)
        vanish(leaves)
        stays.close()

    assert not worker_pids()


def test_stop_does_not_wait_for_a_worker_that_never_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    server = EnvServer(Exits, env_kwargs={"gate": str(gate)}).start()
    first = RemoteEnv(server.address)
    first.reset()
    os.mkfifo(gate)
    second = RemoteEnv(server.address, start_timeout_s=0.0)
    with endpoints_give_up_after(450), pytest.raises(RemoteEnvError, match="TIMEOUT"):
        second.reset()

    server.stop(0.0)

    assert not worker_pids()
    assert "Traceback" not in capfd.readouterr().err
    first.close()
    second.close()


def test_a_reset_that_needs_a_new_worker_waits_for_start_timeout_s(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with EnvServer(Exits, env_kwargs={"gate": str(gate)}) as server:
        env = RemoteEnv(server.address, start_timeout_s=0.5)
        env.reset()
        with pytest.raises(RemoteEnvError, match="exit code 3"):
            env.step(1)
        os.mkfifo(gate)

        with (
            endpoints_give_up_after(450),
            pytest.raises(RemoteEnvError, match=r"has not started within 0\.5 s") as caught,
        ):
            env.reset()
        with gate.open("w"):
            env.reset()

        assert caught.value.code == "TIMEOUT"
        assert caught.value.is_recoverable
        assert server.statistics().worker_restarts == 1, "however often it was waited for"
        env.close()


# Deliberately neither a context manager nor an `if __name__ == "__main__"`.
SCRIPT = """
import numpy as np
from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv
server = EnvServer("CartPole-v1", num_envs=2).start()
env = RemoteVectorEnv(server.address)
env.reset()
env.step(np.array([0, 0]))
policy = ModelServer(lambda batch: np.zeros(len(batch), np.int64)).start()
model = RemoteModel(policy.address)
model.configure_route(env)
print("ready", flush=True)
"""


@contextlib.contextmanager
def run_script(source: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # one that hangs fails its test, and holds up no other


def test_an_interpreter_exits_although_nothing_was_closed() -> None:
    with run_script(SCRIPT) as process:
        output, errors = process.communicate(timeout=60)

    assert (process.returncode, output) == (0, "ready\n")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_ends_a_plain_script_and_its_workers(number: signal.Signals) -> None:
    with run_script(SCRIPT + "server.wait()\n") as process:
        assert process.stdout is not None
        process.stdout.readline()
        workers = worker_pids(process.pid)

        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode == -number
    assert len(workers) == 1
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_a_signal_that_does_not_wake_the_waiting_thread_ends_it_nevertheless() -> None:
    # As one that comes in the moment before it falls asleep: here, another thread takes it.
    script = """
import signal, threading
from rlmesh_ray import ModelServer
server = ModelServer(lambda batch: batch).start()
def take_it() -> None:
    threading.Event().wait(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=take_it).start()
server.wait()
"""
    with run_script(script) as process:
        _, errors = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")
