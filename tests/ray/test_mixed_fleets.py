"""One training, endpoints that differ: in packages, places, pace, and who started them."""

import concurrent.futures
import importlib
import importlib.util
import json
import os
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigurationError,
    ContractMismatchError,
    EndpointError,
    EnvStartError,
)
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.config.rollout_plan import FixedAddressResolver
from tests.ray.lost_endpoints import Background, Steps, assert_unbroken
from tests.ray.ramps import Stairs

pytestmark = pytest.mark.usefixtures("local_ray")

PACKAGE = """
import gymnasium
from tests.ray.ramps import Stairs

__version__ = "{version}"

class World(Stairs):
    def step(self, action):
        return (*super().step(action)[:4], {{"version": __version__}})

gymnasium.register("World-v0", entry_point=World, disable_env_checker=True)
"""
WORLD = "toy_world:World-v0"


def write_package(folder: Path, version: str) -> Path:
    (folder / "toy_world").mkdir(parents=True)
    (folder / "toy_world" / "__init__.py").write_text(PACKAGE.format(version=version))
    return folder


def with_package(folder: Path) -> dict[str, Any]:
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path)}}}


def stairs_fleet(**options: Any) -> EnvFleet:
    return EnvFleet(Stairs, num_cpus=0.1, **options)


def ppo() -> PPOConfig:
    return PPOConfig().env_runners(num_env_runners=0)


def runner(config: Any) -> Any:
    return RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)


def versions(chunks: list[Any]) -> set[str]:
    infos = [info for chunk in chunks for info in chunk.get_infos()]
    return {info["version"] for info in infos if "version" in info}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def old(folder: Path) -> Iterator[EnvFleet]:
    """Version 1 of the world; it steps only while the file ``gate`` is there."""
    (folder / "gate").touch()
    options = with_package(write_package(folder / "1", "1.0"))
    gate = {"gate": folder / "gate"}
    with EnvFleet(WORLD, env_kwargs=gate, num_cpus=0.1, actor_options=options) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def new(folder: Path) -> Iterator[EnvFleet]:
    """Version 2 of the world; it tells each step through the pipe of ``new_steps``."""
    options = with_package(write_package(folder / "2", "2.0"))
    log = {"log": folder / "log"}
    with EnvFleet(WORLD, env_kwargs=log, num_cpus=0.1, actor_options=options) as fleet:
        yield fleet


@pytest.fixture
def new_steps(folder: Path) -> Iterator[Steps]:
    yield Steps(folder / "log")
    (folder / "log").unlink()


class Recorder(grpc.GenericRpcHandler):
    """Keeps what callers show, and serves nothing."""

    def __init__(self) -> None:
        self.shown: set[Any] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        metadata = dict(handler_call_details.invocation_metadata)
        self.shown.add(metadata.get("authorization"))


@pytest.fixture
def stranger() -> Iterator[tuple[str, Recorder]]:
    """The address of a server that serves no environment, and what it has been shown."""
    recorder = Recorder()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[recorder])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}", recorder
        server.stop(0).wait()


@pytest.mark.slow
def test_two_versions_of_a_package_that_the_trainer_lacks_feed_one_runner(
    old: EnvFleet, new: EnvFleet, new_steps: Steps
) -> None:
    sampler = runner(configure(ppo(), [old, new]))

    chunks = sampler.sample(num_timesteps=20)

    assert versions(chunks) == {"1.0", "2.0"}
    assert sum(map(len, chunks)) == 20
    assert_unbroken(chunks)
    assert importlib.util.find_spec("toy_world") is None
    sampler.stop()


@pytest.mark.slow
def test_a_slow_fleet_does_not_hold_a_fast_one_up(
    old: EnvFleet, new: EnvFleet, new_steps: Steps, folder: Path
) -> None:
    sampler = runner(configure(ppo(), [old, new]))
    (folder / "gate").unlink()
    sampling = Background(lambda: sampler.sample(num_timesteps=20))
    new_steps.wait_for(19)
    (folder / "gate").touch()

    slow, fast = sorted(sampling.result(), key=len)

    assert (len(slow), len(fast)) == (1, 19)
    assert (versions([slow]), versions([fast])) == ({"1.0"}, {"2.0"})
    sampler.stop()


def test_fleets_and_addresses_are_let_in_by_their_own_tokens_in_the_order_of_the_list(
    old: EnvFleet,
) -> None:
    config = ppo().evaluation(evaluation_interval=1)
    with EnvServer(Stairs, token="theirs") as server:
        configure(
            config, [old, f"rlmesh://{server.address}"], token="theirs", num_evaluation_endpoints=1
        )
        trains, evaluates = runner(config), runner(config.get_evaluation_config_object())

        assert versions(trains.sample(num_timesteps=4)) == {"1.0"}
        assert versions(evaluates.sample(num_timesteps=4)) == set()
        assert server.num_sessions == 1
        trains.stop()
        evaluates.stop()

    assert old.tokens[0] not in repr(config.env_config)


@pytest.mark.parametrize(("token", "shown"), [("theirs", "Bearer theirs"), (None, None)])
def test_a_fleet_s_token_is_never_shown_to_a_foreign_address(
    old: EnvFleet, stranger: tuple[str, Recorder], token: str | None, shown: str | None
) -> None:
    address, recorder = stranger

    with pytest.raises(EndpointError, match=address):
        configure(ppo(), [old, address, old], token=token)

    assert recorder.shown == {shown}


class StrangeFleet(EnvFleet):
    """A fleet whose endpoint is elsewhere."""

    tokens: Any = ("ours",)
    resolver: Any = None

    def __init__(self, address: str) -> None:
        self.resolver = FixedAddressResolver((address,))


def test_the_token_of_addresses_is_never_shown_to_a_fleet(
    stranger: tuple[str, Recorder],
) -> None:
    address, recorder = stranger

    with EnvServer(Stairs, token="theirs") as server, pytest.raises(EndpointError):
        configure(ppo(), [server.address, StrangeFleet(address)], token="theirs")

    assert recorder.shown == {"Bearer ours"}


def test_an_address_does_not_open_with_a_fleet_s_token(old: EnvFleet) -> None:
    with EnvServer(Stairs, token=old.tokens[0]) as server, pytest.raises(AccessDeniedError):
        configure(ppo(), [old, server.address])


def test_the_endpoint_that_differs_is_named(old: EnvFleet) -> None:
    with (
        EnvServer(Stairs, num_envs=3) as server,
        pytest.raises(ContractMismatchError, match=f"^{server.address} serves .* num_envs = 3"),
    ):
        configure(ppo(), [old, server.address])


@pytest.mark.parametrize(
    "element",
    ["CartPole-v1", Stairs, Stairs(), 7, ["127.0.0.1:1"]],
    ids=["id", "factory", "instance", "number", "list"],
)
def test_what_a_list_cannot_hold_is_named_with_the_remedy(element: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"env\[1\]=.* start an EnvFleet"):
        configure(ppo(), ["127.0.0.1:1", element])


def test_a_factory_that_endpoints_cannot_import_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_package(tmp_path, "3.0"))
    factory = importlib.import_module("toy_world").World

    with pytest.raises(
        EnvStartError, match=r"No module named 'toy_world'.*module:Env-v0"
    ) as caught:
        EnvFleet(factory, num_cpus=0.1)

    assert "\n" not in str(caught.value)
    monkeypatch.delitem(sys.modules, "toy_world")


def test_resources_and_labels_that_no_node_has_are_named() -> None:
    options = {"resources": {"simulator": 2}, "label_selector": {"kind": "arm"}}

    with pytest.raises(CapacityError, match=r"2 simulator, .*0 of 0 simulator free.*'kind': 'arm'"):
        stairs_fleet(actor_options=options, start_timeout_s=0.5)


@pytest.mark.slow
def test_a_runtime_env_that_cannot_be_made_is_reported_in_one_line() -> None:
    options = {"runtime_env": {"py_modules": ["file:///no/such/archive.zip"]}}

    with pytest.raises(EnvStartError, match=r"runtime_env .*archive\.zip") as caught:
        stairs_fleet(actor_options=options)

    assert "\n" not in str(caught.value)


PLACED = """
import ray
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import CapacityError

def fleet(wait_s=60, **actor_options):
    return EnvFleet(
        "CartPole-v1", num_cpus=0.1, actor_options=actor_options, start_timeout_s=wait_s
    )

ray.init(
    "local", resources={"simulator": 1}, labels={"kind": "arm"}, include_dashboard=False,
    log_to_driver=False,
)
with fleet(resources={"simulator": 1}, label_selector={"kind": "arm"}):
    for wanted in {"resources": {"simulator": 1}}, {"label_selector": {"kind": "leg"}}:
        try:
            fleet(1, **wanted)
        except CapacityError as error:
            print(error)
"""


@pytest.mark.slow
def test_endpoints_go_only_where_their_resources_and_labels_are() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=120, check=True
    )

    taken, elsewhere = done.stdout.splitlines()
    assert "0 of 1 simulator free" in taken
    assert "labels {'kind': 'leg'}" in elsewhere


@pytest.mark.slow
def test_an_endpoint_in_a_virtual_environment_of_its_own_joins_a_fleet(
    old: EnvFleet, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    write_package(packages, "2.0")
    # What its pip would have installed, besides the world.
    here = [*site.getsitepackages(), str(Path(__file__).parents[2])]
    (packages / "rest.pth").write_text(f"import site; list(map(site.addsitedir, {here!r}))\n")
    command = ["-m", "rlmesh_ray", "serve-env", WORLD, "--address", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [str(tmp_path / "venv/bin/python"), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RLMESH_RAY_TOKEN": "theirs"},
    ) as process:
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            sampler = runner(configure(ppo(), [old, address], token="theirs"))

            assert versions(sampler.sample(num_timesteps=20)) == {"1.0", "2.0"}
            sampler.stop()
        finally:
            process.terminate()
