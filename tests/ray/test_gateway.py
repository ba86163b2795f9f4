"""One address over endpoints on Ray that restart, come and go, and over the gateway's own death."""

import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import ray

from rlmesh_ray import RemoteEnv, RemoteModel, RemoteVectorEnv, TokenFile
from rlmesh_ray.actors import EnvFleet, EnvPool, Gateway, ModelFleet
from rlmesh_ray.actors.gateway import query_for
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    EndpointUnreachableError,
)
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address
from tests.ray.switch_policy import switch_policy
from tests.ray.test_pools import simulator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def policies(local_ray: None) -> Iterator[ModelFleet]:
    with ModelFleet(switch_policy(), name="behind", num_replicas=2, num_cpus=0.1) as fleet:
        yield fleet


def connect(gateway: Gateway) -> RemoteModel:
    assert isinstance(gateway.token, str)
    model = RemoteModel(gateway.address, token=gateway.token)
    model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=1))
    return model


def predict(model: RemoteModel) -> None:
    model.predict(np.zeros((1, 4), np.float32))


def predict_for_ever(model: RemoteModel) -> None:
    while True:
        predict(model)


def connect_again(gateway: Gateway) -> RemoteModel:
    """Dial until the gateway is there."""
    found: list[RemoteModel] = []

    def try_once() -> bool:
        try:
            found.append(connect(gateway))
        except EndpointError:
            return False
        return True

    assert eventually(try_once, 60.0)
    return found[0]


def kill(gateway: Gateway) -> None:
    """Kill the process of a gateway; Ray starts it again."""
    port = int(gateway.address.rpartition(":")[2])
    (process,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    assert process is not None
    os.kill(process, signal.SIGKILL)


def test_the_collector_leaves_alone_what_endpoints_and_gateways_have_loaded(
    policies: ModelFleet,
) -> None:
    with (
        EnvFleet("CartPole-v1", num_cpus=0.1) as simulators,
        Gateway(policies, free_address()) as gateway,
    ):
        for actor in (*policies.actors, *simulators.actors, gateway.actor):
            assert ray.get(actor.__ray_call__.remote(lambda _: gc.get_freeze_count())) > 10_000


def test_a_killed_replica_costs_its_clients_one_dial_and_the_others_nothing(
    policies: ModelFleet,
) -> None:
    with Gateway(policies, free_address()) as gateway:
        clients = [connect(gateway) for _ in range(2)]
        for client in clients:
            predict(client)

        # The first client was taken to the one that was listed first.
        first = query_for(policies)()[0].endpoint_id.rpartition("/")[2]
        ray.kill(policies.actors[int(first)], no_restart=False)

        with pytest.raises(EndpointLostError, match="dial the gateway again"):
            predict_for_ever(clients[0])
        predict(clients[1])
        again = connect(gateway)
        predict(again)
        for client in (*clients, again):
            client.close()
        assert gateway.health().is_serving
        assert eventually(lambda: len(policies.addresses) == 2)


def test_a_killed_gateway_comes_back_at_its_address(policies: ModelFleet) -> None:
    with Gateway(policies, free_address()) as gateway:
        client = connect(gateway)
        predict(client)

        kill(gateway)

        with pytest.raises(EndpointError):
            predict_for_ever(client)
        client.close()
        again = connect_again(gateway)
        predict(again)
        again.close()
        assert gateway.health().is_serving


def test_a_gateway_is_shown_where_endpoints_are_and_is_nobodys_endpoint(
    policies: ModelFleet,
) -> None:
    registry = find_registry()

    def shown() -> list[Any]:
        return list(ray.get(registry.members.remote("gateway/model/behind")))

    before = query_for(policies)()
    with Gateway(policies, free_address()) as gateway:
        (record,) = shown()
        assert (record.address, record.incarnation) == (gateway.address, 1)
        assert query_for(policies)() == before

        kill(gateway)

        assert eventually(lambda: shown()[0].incarnation == 2, 60.0)
        assert [each.address for each in shown()] == [gateway.address]
    assert shown() == []


def test_a_gateway_leads_to_environments_with_tokens_of_their_own() -> None:
    with EnvFleet("CartPole-v1", num_endpoints=2, num_envs=2, num_cpus=0.1) as fleet:
        with Gateway(fleet, free_address(), token="the front") as gateway:
            envs = [RemoteVectorEnv(gateway.address, token="the front") for _ in range(2)]
            first, second = (env.reset(seed=0)[0] for env in envs)

            np.testing.assert_array_equal(first, second)
            described = ray.get([actor.describe.remote() for actor in fleet.actors])
            assert [each["num_sessions"] for each in described] == [1, 1]
            for token in fleet.tokens:
                with pytest.raises(AccessDeniedError):
                    RemoteVectorEnv(gateway.address, token=token)
            for env in envs:
                env.close()
        with pytest.raises(EndpointUnreachableError):
            RemoteVectorEnv(gateway.address, token="the front")


def test_an_environment_that_restarts_elsewhere_is_found_behind_the_same_address() -> None:
    with (
        EnvFleet("CartPole-v1", num_cpus=0.1) as fleet,
        Gateway(fleet, free_address(), token="the front") as gateway,
    ):
        env = RemoteEnv(gateway.address, token="the front")
        before, _ = env.reset(seed=0)
        env.close()
        os.kill(ray.get(fleet.actors[0].describe.remote())["pid"], signal.SIGKILL)
        after: list[Any] = []

        def try_once() -> bool:
            try:
                again = RemoteEnv(gateway.address, token="the front")
                after.append(again.reset(seed=0)[0])
                again.close()
            except EndpointError:
                return False
            return True

        assert eventually(try_once, 60.0)
        np.testing.assert_array_equal(after[0], before)


def test_endpoints_outside_of_ray_are_led_to_as_they_come_and_go() -> None:
    with EnvPool("behind-a-gateway", token="s3cret") as pool, ExitStack() as gone_first:
        gone_first.enter_context(simulator(pool, "one"))
        pool.wait(1)
        with Gateway(pool, free_address(), token="the front") as gateway:
            RemoteEnv(gateway.address, token="the front").close()

            gone_first.close()

            assert eventually(lambda: not gateway.health().is_serving)
            with pytest.raises(EndpointUnreachableError, match="no endpoint behind"):
                RemoteEnv(gateway.address, token="the front")
            with simulator(pool, "another"):
                # It lists them every other second.
                assert eventually(lambda: gateway.health().is_serving)
                env = RemoteEnv(gateway.address, token="the front")
                env.reset()
                env.close()


def test_a_gateway_to_a_pool_waits_for_those_who_will_register() -> None:
    with (
        EnvPool("empty-behind-a-gateway", token="s3cret") as pool,
        Gateway(pool, free_address(), token="the front") as gateway,
    ):
        assert not gateway.health().is_serving
        with pytest.raises(EndpointUnreachableError, match="no endpoint behind this gateway"):
            RemoteEnv(gateway.address, token="the front")

        with simulator(pool, "first"):
            assert eventually(lambda: gateway.health().is_serving)
            env = RemoteEnv(gateway.address, token="the front")
            env.reset()
            env.close()


def test_a_file_with_tokens_is_read_where_the_gateway_is(
    policies: ModelFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    file.chmod(0o600)

    def read_here(_self: TokenFile) -> Any:
        raise ConfigurationError("not on the driver's node")

    with monkeypatch.context() as here:
        here.setattr(TokenFile, "read", read_here)
        gateway = Gateway(policies, free_address(), token=TokenFile(file))
    with gateway, RemoteModel(gateway.address, token="of-a-file"):
        pass
    with pytest.raises(ConfigurationError, match="cannot read the token file"):
        Gateway(policies, free_address(), token=TokenFile(tmp_path / "none"))


def test_a_gateway_listens_at_every_address_of_its_node(policies: ModelFleet) -> None:
    port = free_address().rpartition(":")[2]
    with Gateway(policies, f"0.0.0.0:{port}") as gateway:
        assert gateway.address == f"{ray.util.get_node_ip_address()}:{port}"
        with connect(gateway) as model:
            predict(model)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
def test_a_port_that_would_not_last_is_refused(address: str, policies: ModelFleet) -> None:
    with pytest.raises(AddressError, match="name HOST:PORT"):
        Gateway(policies, address)


def test_a_port_that_is_taken_is_refused(policies: ModelFleet) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressError, match="in use"):
            Gateway(policies, f"127.0.0.1:{taken.getsockname()[1]}")


def test_an_empty_token_is_refused(policies: ModelFleet) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        Gateway(policies, free_address(), token="")


def test_what_is_no_fleet_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is for an EnvFleet"):
        Gateway("127.0.0.1:5555", free_address())  # type: ignore[arg-type]
