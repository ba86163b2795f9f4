import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.auth.token_file import (
    client_secret,
    derive_token,
    endpoint_token,
    registration_token,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.pool_membership import (
    RegistrationRequest,
    checked_name,
    full_id,
    peer_host,
    validate_registration,
)


def place(
    host: str = "192.0.2.7",
    port: int = 5555,
    seen: str = "192.0.2.7",
    *,
    pool: str = "games",
    endpoint_id: str = "sim-1",
) -> Address:
    request = RegistrationRequest(pool, endpoint_id, host, port)
    return validate_registration(request, "games", seen)


# --- names and tokens --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "sim-1", "Host.example_7", "0", "x" * 64])
def test_names_may_be_what_hosts_are_called(name: str) -> None:
    assert checked_name(name, "pool") == name


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "-a", ".a", "a b", "a/b", "../a", "a\n", "ä", "a\0", "٣"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"pool=.*1 to 64 letters"):
        checked_name(name, "pool")


def test_no_two_endpoints_have_the_same_full_id_or_token() -> None:
    pairs = [("a", "b"), ("b", "a"), ("a", "a"), ("a.b", "c"), ("a", "b.c")]

    assert len({full_id(*pair) for pair in pairs}) == len(pairs)
    assert len({endpoint_token("s3cret", *pair) for pair in pairs}) == len(pairs)


def test_clients_work_out_the_tokens_of_endpoints_without_the_pools_secret() -> None:
    known = client_secret("s3cret", "games")

    assert derive_token(known, full_id("games", "sim-1")) == endpoint_token(
        "s3cret", "games", "sim-1"
    )
    assert registration_token(known) != registration_token("s3cret")
    assert known != client_secret("s3cret", "toys")


def test_tokens_are_what_the_schema_says() -> None:
    def derived(secret: str, name: str, role: str) -> str:
        text = b"\0".join([b"rlmesh_ray.token.v1", name.encode(), role.encode()])
        digest = hmac.new(secret.encode(), text, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    clients = derived("s3cret", "pool/games", "clients")
    assert endpoint_token("s3cret", "games", "sim-1") == derived(
        clients, "pool/games/sim-1", "client"
    )
    assert registration_token("s3cret") == derived("s3cret", "pool", "register")


def test_what_is_shown_to_the_registrar_opens_no_endpoint() -> None:
    shown = registration_token("s3cret")

    assert shown != "s3cret"
    assert shown != endpoint_token("s3cret", "games", "sim-1")
    assert shown != registration_token("secret")


@pytest.mark.parametrize("secret", ["", " ", "s3cret ", "ü", "two\nlines"])
def test_a_secret_is_what_a_token_may_be(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        registration_token(secret)


# --- where the endpoint is ---------------------------------------------------------------


def test_an_endpoint_is_where_it_says() -> None:
    assert place("sim.example", 5555) == Address("sim.example", 5555)
    assert place("2001:db8::7", 5555) == Address("2001:db8::7", 5555)


def test_an_endpoint_that_does_not_say_is_where_it_comes_from() -> None:
    assert place("", 5555, seen="192.0.2.9") == Address("192.0.2.9", 5555)


@pytest.mark.parametrize("host", ["", "unix", "UNIX", "dns", "a/b", "a b", "@", "[::1]", "x" * 300])
def test_an_address_that_clients_cannot_use_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="clients cannot connect to"):
        place(host, seen="")


@pytest.mark.parametrize("host", ["fe80::1%eth0", "fe80::1%a line\nof the log", "::1%x"])
def test_zones_mean_nothing_on_other_machines(host: str) -> None:
    with pytest.raises(ConfigurationError, match="clients cannot connect to"):
        place(host)


@pytest.mark.parametrize("port", [0, 65536, 2**32 - 1])
def test_a_port_must_be_one(port: int) -> None:
    with pytest.raises(ConfigurationError, match="clients cannot connect to"):
        place(port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_place(host: str) -> None:
    with pytest.raises(ConfigurationError, match="means any machine; name the endpoint's address"):
        place(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_for_endpoints_on_the_registrars_own_machine(host: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        place(host, seen="192.0.2.7")

    assert "listen on an address of that machine (--address 192.0.2.7:PORT)" in str(refused.value)
    assert place(host, 5555, seen="127.0.0.1") == Address(host, 5555)


def test_an_endpoint_of_another_pool_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="serves the pool 'games', not 'toys'"):
        place(pool="toys")


def test_an_endpoint_without_a_valid_id_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="endpoint id='a/b' is no name"):
        place(endpoint_id="a/b")


@given(st.text(max_size=12) | st.sampled_from(["unix", "dns", "ipv4"]), st.integers(0, 2**32 - 1))
def test_an_accepted_registration_has_an_address_of_a_port(host: str, port: int) -> None:
    try:
        found = place(host, port, seen="")
    except ConfigurationError as error:
        refusal = str(error)
    else:
        assert parse_address(str(found)) == found
        assert found.path == ""
        return
    assert len(refusal) < 500


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:41234", "192.0.2.7"),
        ("ipv6:%5B2001:db8::7%5D:41234", "2001:db8::7"),
        ("ipv6:[::1]:41234", "::1"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:41234", "192.0.2.7"),
        ("unix:", ""),
        ("unix:/run/a.sock", ""),
        ("ipv4:nonsense:1", ""),
        ("", ""),
    ],
)
def test_the_peers_host_is_read_from_grpcs_name_for_it(peer: str, host: str) -> None:
    assert peer_host(peer) == host
