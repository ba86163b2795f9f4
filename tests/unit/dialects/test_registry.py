"""The table of dialects: which ones an endpoint serves, and which dialect an address names."""

import sys
from importlib import util
from typing import Any

import pytest

from rlmesh_ray.dialects import registry
from rlmesh_ray.dialects.registry import Dialect
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.server.env.env_service import load_dialect_services, load_env_dialects
from rlmesh_ray.server.model.model_stream import load_model_dialects

RELEASED, DM_ENV_RPC = "rlmesh-wire-v1", "dm_env_rpc.v1"


def test_an_endpoint_serves_every_dialect_that_is_installed() -> None:
    env = registry.enabled_dialects(None, registry.env_dialects())
    model = registry.enabled_dialects(None, registry.model_dialects())

    assert env == {PROTOCOL_V1, RELEASED, DM_ENV_RPC}
    assert model == {PROTOCOL_V1, RELEASED}
    assert list(load_env_dialects()) == list(load_model_dialects()) == [PROTOCOL_V1, RELEASED]
    assert len(load_dialect_services(env)) == 1
    assert load_dialect_services([RELEASED]) == []


def test_without_the_extra_an_endpoint_serves_the_other_dialects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = util.find_spec

    def find(name: str, *others: Any) -> Any:
        return None if name == "dm_env_rpc" else found(name, *others)

    monkeypatch.setattr(util, "find_spec", find)
    monkeypatch.setitem(sys.modules, "dm_env_rpc", None)

    enabled = registry.enabled_dialects(None, registry.env_dialects())

    assert enabled == {PROTOCOL_V1, RELEASED}
    assert load_dialect_services(enabled) == []
    with pytest.raises(ConfigurationError, match=r"not installed: pip install .*\[dm-env-rpc\]"):
        registry.enabled_dialects([DM_ENV_RPC], registry.env_dialects())


def test_a_dialect_with_a_port_of_its_own_is_enabled_by_that_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigurationError, match="serve-model --openpi HOST:PORT"):
        registry.enabled_dialects(["openpi"], registry.model_dialects())

    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"websockets: pip install '\.\[openpi\]'"):
        registry.model_port("openpi")


def test_a_dialect_of_runners_is_refused_with_the_function_to_use() -> None:
    with pytest.raises(ConfigurationError, match=r"'rllink'.* use configure_rllink\(config"):
        registry.enabled_dialects(["rllink"], registry.env_dialects())


def test_a_scheme_names_the_dialect_of_a_client_or_of_a_runner() -> None:
    dialed = registry.client_dialect("dm_env_rpc://node-7:1")
    listened = registry.runner_dialect("rllink://node-7:1")

    assert dialed is not None
    assert dialed.name == DM_ENV_RPC
    assert listened is not None
    assert listened.name == "rllink"
    for address in ("node-7:1", "rlmesh://node-7:1", "rllink://node-7:1"):
        assert registry.client_dialect(address) is None
    for env in ("node-7:1", "dm_env_rpc://node-7:1", None, ["rllink://node-7:1"]):
        assert registry.runner_dialect(env) is None


@pytest.mark.parametrize("dialect", registry.DIALECTS, ids=lambda each: each.name)
def test_the_package_of_each_dialect_has_the_modules_that_its_line_promises(
    dialect: Dialect,
) -> None:
    promised = []
    if dialect.is_generation:
        for layer in ("server", "client"):
            promised += [(f"{layer}.{kind}_dialect", "DIALECT") for kind in ("env", "model")]
    if dialect.service:
        promised.append(("server.service", "ENV_SERVICE"))
    if dialect.serves_models:
        promised.append(("client", "MODEL_SESSION"))
        promised.append(("server", "MODEL_PORT"))
    elif dialect.client_scheme:
        promised.append(("client.env_session_client", "ENV_SESSION_CLIENT"))
    if dialect.runner_scheme:
        promised.append(("runner.env_runner", dialect.configure))

    assert promised
    for module, name in promised:
        assert hasattr(dialect.load(module), name), f"{dialect.package}.{module} has no {name}"
