"""Sessions in processes that have not opened them."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv
from tests.loopback.eventually import eventually

FORK = """
import os, sys
import numpy as np
from rlmesh_ray import RemoteModel, RemoteVectorEnv
from rlmesh_ray.errors import EndpointLostError

env = RemoteVectorEnv(sys.argv[1], transport=sys.argv[3])
model = RemoteModel(sys.argv[2])
observation, _ = env.reset(seed=0)
model.configure_route(env)
env.step_async(model.predict(observation))
pid = os.fork()
if not pid:
    for ask in (
        env.step_wait,
        env.render,
        env.reset,
        lambda: env.step(np.ones(2, np.int64)),
        lambda: model.predict(observation),
    ):
        try:
            ask()
        except EndpointLostError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    env.close()
    model.close()
    os._exit(0)
_, status = os.waitpid(pid, 0)
env.step_wait()
observation, *_ = env.step(model.predict(observation))
env.close()
model.close()
print(status, observation.tolist())
"""


@pytest.mark.parametrize(
    "transport",
    [
        "shared_memory",  # whose resets and pictures are messages, as a model's are
        pytest.param("grpc", marks=pytest.mark.nightly),
        pytest.param("tcp", marks=pytest.mark.nightly),
    ],
)
def test_a_fork_leaves_the_sessions_of_its_parent_alone(transport: str) -> None:
    with (
        EnvServer("CartPole-v1", num_envs=2) as env_server,
        ModelServer(lambda rows: [1] * len(rows)) as model_server,
    ):
        reported = ran(FORK, env_server.address, model_server.address, transport)
    local = gymnasium.make_vec("CartPole-v1", 2, "sync")
    local.reset(seed=0)
    local.step([1, 1])
    expected = local.step([1, 1])[0].tolist()

    assert reported.stdout == f"0 {expected}\n", reported.stderr


FORK_IN_A_WORLD = """
import os, sys
import numpy as np
from rlmesh_ray import RemoteEnv
from rlmesh_ray.errors import EndpointLostError

env = RemoteEnv(sys.argv[1])
env.reset()
pid = os.fork()
if not pid:
    try:
        env.step(1)
    except EndpointLostError as error:
        env.close()
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(1)
_, status = os.waitpid(pid, 0)
env.step(1)
env.close()
print(status)
"""


def test_so_it_is_over_dm_env_rpc() -> None:
    with EnvServer("CartPole-v1") as server:
        reported = ran(FORK_IN_A_WORLD, f"dm_env_rpc://{server.address}")

    assert reported.stdout == "0\n", reported.stderr


FORK_TOO_LATE = """
import gc, os, sys
import gymnasium
from rlmesh_ray import (
    EndpointObserver, EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv
)
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import check_health
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.server.pool.gateway import GatewayServer

env_server = EnvServer("CartPole-v1", max_sessions=3).start()
model_server = ModelServer(lambda rows: [1] * len(rows)).start()
where, there = env_server.address, model_server.address
used = [
    RemoteVectorEnv(where, transport=sys.argv[1]),
    RemoteEnv(f"dm_env_rpc://{where}"),
    RemoteModel(there),
    EndpointObserver(where),
]
env, world, model, observer = used
model.configure_route(env)
env.reset(seed=0)
world.reset()
pid = os.fork()
if not pid:
    status = 0
    for ask in (
        lambda: RemoteVectorEnv(where),
        lambda: RemoteEnv(f"dm_env_rpc://{where}"),
        lambda: RemoteModel(there),
        lambda: EndpointObserver(where),
        lambda: check_health(ConnectOptions(where)),
        EnvServer("CartPole-v1").start,
        ModelServer(len).start,
        GatewayServer(tuple).start,
        env_server.health,
        env_server.drain,
        observer.sessions,
        world.reset,
    ):
        try:
            ask()
        except RlmeshError as error:
            status |= "fork" not in str(error) or "spawn" not in str(error)
        else:
            status |= 1
    for client in used:
        client.close()
    for server in (env_server, model_server):
        server.stop()
    del client, server, used, env, world, model, observer, env_server, model_server, ask
    gc.collect()
    sys.exit(status)  # with all that the interpreter does at its end
_, status = os.waitpid(pid, 0)
env.step([1])
world.step(1)
print(status, model.predict(env.reset()[0]).tolist(), len(observer.sessions()))
for client in used:
    client.close()
env_server.stop()
model_server.stop()
"""


@pytest.mark.parametrize("transport", ["grpc", pytest.param("tcp", marks=pytest.mark.nightly)])
def test_a_fork_of_a_process_with_grpc_is_told_so_and_changes_nothing(transport: str) -> None:
    reported = ran(FORK_TOO_LATE, transport)

    assert reported.stdout == "0 [1] 1\n", reported.stderr


FORK_IN_TIME = """
import os, sys
from rlmesh_ray import EnvServer, RemoteEnv

pid = os.fork()
if not pid:
    with EnvServer("CartPole-v1") as server:
        RemoteEnv(server.address).reset()
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


def test_a_fork_of_a_process_that_has_only_imported_the_package_may_do_all() -> None:
    reported = ran(FORK_IN_TIME)

    assert reported.stdout == "0\n", reported.stderr


LEFT_OPEN = """
import sys
from rlmesh_ray import RemoteModel, RemoteVectorEnv

env, model = RemoteVectorEnv(sys.argv[1]), RemoteModel(sys.argv[2])
observation, _ = env.reset(seed=0)
model.configure_route(env)
env.step_async(model.predict(observation))
sys.exit(7)
"""


def test_a_process_that_ends_closes_its_sessions() -> None:
    with (
        EnvServer("CartPole-v1", num_envs=2) as env_server,
        ModelServer(lambda rows: [1] * len(rows)) as model_server,
    ):
        reported = ran(LEFT_OPEN, env_server.address, model_server.address)
        servers = (env_server, model_server)
        assert eventually(lambda: all(not each.statistics().sessions.open for each in servers))
        ended = [each.statistics().sessions for each in servers]

    assert (reported.returncode, reported.stderr) == (7, "")
    assert [(each.opened, each.lost) for each in ended] == [(1, 0), (1, 0)]


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def cart_pole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1") as server:
        yield server


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv])
@pytest.mark.parametrize("pass_on", [pickle.dumps, copy.deepcopy])
def test_a_session_is_not_passed_on_and_says_what_to_do(
    cart_pole: EnvServer, kind: Any, pass_on: Callable[[object], object]
) -> None:
    assert_not_passed_on(kind(cart_pole.address), cart_pole.address, pass_on)


@pytest.mark.parametrize("pass_on", [pickle.dumps, copy.deepcopy])
def test_nor_is_that_of_a_model(pass_on: Callable[[object], object]) -> None:
    with ModelServer(len) as server:
        assert_not_passed_on(RemoteModel(server.address), server.address, pass_on)


def assert_not_passed_on(session: Any, address: str, pass_on: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=f"hand on its address, '{address}'"):
        pass_on(session)

    session.close()
