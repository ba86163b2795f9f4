"""Options of serve-env that register an endpoint with a pool."""

from pathlib import Path

import pytest

from rlmesh_ray.auth.token_file import PoolTokenFile, TokenFile, endpoint_token
from rlmesh_ray.cli.register_with_pool import (
    POOL_TOKEN_VARIABLE,
    MemberFlags,
    RegistrationConfig,
    pool_secret,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.protocol.pool_membership import checked_name

BOUND = Address("192.0.2.7", 5555)


def entry(
    address: str = "192.0.2.7:0", advertise: str | None = None, endpoint_id: str | None = "sim-1"
) -> RegistrationConfig:
    member = MemberFlags(endpoint_id=endpoint_id)
    return member.config("games@192.0.2.1:7070", address, advertise, None)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POOL_TOKEN_VARIABLE, "s3cret")


def test_an_endpoint_is_registered_at_its_own_address() -> None:
    assert entry().place(BOUND) == ("192.0.2.7", 5555)


@pytest.mark.parametrize("wildcard", ["0.0.0.0:0", "[::]:0"])
def test_an_endpoint_on_all_interfaces_is_registered_at_the_host_that_the_registrar_sees(
    wildcard: str,
) -> None:
    assert entry(wildcard).place(Address("127.0.0.1", 5555)) == ("", 5555)


def test_an_advertised_address_is_registered() -> None:
    assert entry(advertise="sim.example:80").place(BOUND) == ("sim.example", 80)
    assert entry(advertise="sim.example:0").place(BOUND) == ("sim.example", 5555)


def test_clients_present_a_token_derived_from_the_pools(tmp_path: Path) -> None:
    derived = endpoint_token("s3cret", "games", "sim-1")

    assert entry().token(None) == derived
    assert entry().token("of-a-variable") == derived
    assert entry().token(TokenFile(tmp_path / "own")) == PoolTokenFile(tmp_path / "own", derived)


def test_without_a_pool_token_the_endpoint_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL_TOKEN_VARIABLE)

    assert entry().token("own") == "own"
    assert entry().token(None) is None


def test_the_file_overrides_the_variable(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("filed\n")
    (tmp_path / "token").chmod(0o600)

    assert pool_secret(tmp_path / "token") == "filed"
    assert pool_secret(None) == "s3cret"


def test_an_endpoint_without_an_id_gets_a_new_one() -> None:
    first, second = (entry(endpoint_id=None).to.endpoint_id for _ in range(2))

    assert first != second
    assert checked_name(first, "endpoint_id")


def test_repr_does_not_show_the_pools_token() -> None:
    assert "s3cret" not in repr(entry())


@pytest.mark.parametrize("register", ["games", "192.0.2.1:7070", "@192.0.2.1:7070", "games@here"])
def test_a_pool_without_an_address_is_refused(register: str) -> None:
    with pytest.raises(ConfigurationError):
        MemberFlags().config(register, "192.0.2.7:0", None, None)
