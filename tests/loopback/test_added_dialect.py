"""A dialect that is added to the table: one line, and modules that the line promises."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

from rlmesh_ray import EnvServer, RemoteEnv
from rlmesh_ray.cli.commands.inspect import dialects_of_env
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.client.env.env_session_client import DialectEnvClient
from rlmesh_ray.dialects import registry
from rlmesh_ray.dialects.registry import Dialect, DialectSettings
from rlmesh_ray.errors import AddressError, ConfigurationError
from tests.loopback.ports import plain_channel

DEADLINE_S = 20.0
SERVICE, SCHEME = "toy.v1.Echo", "toy://"


class EchoService:
    """Answers each message of a stream with the same bytes."""

    max_request_bytes = streams_per_session = 1

    def __init__(self, *_: Any) -> None: ...

    async def echo(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            yield data

    def handlers(self) -> grpc.GenericRpcHandler:
        echo = grpc.stream_stream_rpc_method_handler(self.echo)
        return grpc.method_handlers_generic_handler(SERVICE, {"Echo": echo})


def edition(connect_options: ConnectOptions) -> ConnectOptions:
    """Return how to reach the same endpoint without the dialect."""
    address = connect_options.address.removeprefix(SCHEME)
    return replace(connect_options, address=address, dialect_settings=None)


ENV_SESSION_CLIENT = DialectEnvClient(
    open=lambda options, *timeouts_s: EnvClient(edition(options), step_timeout_s=timeouts_s[0]),
    probe=lambda options: shake_hands(edition(options)),
)


class ToySettings(DialectSettings):
    """Settings of the dialect, which has none."""

    scheme = SCHEME


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the dialect: the line of the table, and its two modules."""
    line = Dialect("toy.v1", "toy", service=SERVICE, client_scheme=SCHEME)
    monkeypatch.setattr(registry, "DIALECTS", (*registry.DIALECTS, line))
    for name, value in (
        ("server.service", EchoService),
        ("client.env_session_client", ENV_SESSION_CLIENT),
    ):
        module = ModuleType(f"toy.{name}")
        vars(module).update(ENV_SERVICE=value, ENV_SESSION_CLIENT=value)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_endpoint_serves_it_beside_the_others() -> None:
    with EnvServer("CartPole-v1") as server, plain_channel(server.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Echo")
        answers = list(call(iter([b"one", b"two"]), timeout=DEADLINE_S))
        found = dialects_of_env(ConnectOptions(server.address))

    assert answers == [b"one", b"two"]
    assert found == ("rlmesh.protocol.v1", "rlmesh-wire-v1", "dm_env_rpc.v1", "toy.v1")


def test_an_endpoint_serves_it_only_where_it_is_enabled() -> None:
    with EnvServer("CartPole-v1", dialects=["toy.v1"]) as server:
        assert dialects_of_env(ConnectOptions(server.address)) == ("toy.v1",)
    with EnvServer("CartPole-v1", dialects=["rlmesh.protocol.v1"]) as server:
        assert dialects_of_env(ConnectOptions(server.address)) == ("rlmesh.protocol.v1",)


def test_a_client_opens_sessions_in_it_by_the_scheme_of_the_address() -> None:
    with EnvServer("CartPole-v1") as server:
        address = f"{SCHEME}{server.address.removeprefix('rlmesh://')}"
        with RemoteEnv(address, dm_env_rpc=ToySettings()) as env:
            observation, _ = env.reset(seed=1)
            assert isinstance(env.unwrapped, RemoteEnv)

    assert np.isfinite(observation).all()


def test_its_settings_are_refused_at_other_addresses() -> None:
    with pytest.raises(ConfigurationError, match=r"no toy:// address, which ToySettings is for"):
        RemoteEnv("dm_env_rpc://127.0.0.1:1", dm_env_rpc=ToySettings())


def test_errors_about_addresses_list_its_scheme() -> None:
    with pytest.raises(AddressError, match="openpi://HOST:PORT or toy://HOST:PORT"):
        RemoteEnv("toy://nowhere")
    with pytest.raises(AddressError, match="names the protocol that a client speaks"):
        EnvServer("CartPole-v1", address="toy://127.0.0.1:0")
