import pytest

from rlmesh_ray.errors import AddressError
from rlmesh_ray.protocol.address import Address, looks_like_address, looks_like_host, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051)),
        ("rlmesh://node-7:1", Address("node-7", 1)),
        ("tcp://node-7:1", Address("node-7", 1)),
        ("tcp://[::1]:1", Address("::1", 1)),
        ("[::1]:0", Address("::1", 0)),
        ("h:65535", Address("h", 65535)),
        ("unix:/tmp/x.sock", Address("", 0, "/tmp/x.sock")),
        ("rlmesh://unix:/tmp/x.sock", Address("", 0, "/tmp/x.sock")),
    ],
)
def test_addresses_are_understood_and_written_back(text: str, address: Address) -> None:
    parsed = parse_address(text)

    assert parsed == address
    assert parse_address(str(parsed)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CartPole-v1",
        "host",
        "host:",
        ":1",
        "h:x",
        "h:65536",
        "unix:",
        "tcp://",
        "tcp://h",
        "http://h:1",
        "::1",
        "fe80::1",
        "rlmesh://tcp://h:1",
    ],
)
def test_what_is_no_address_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


def test_an_address_of_a_runner_is_refused_with_the_function_to_use() -> None:
    with pytest.raises(
        AddressError, match=r"no endpoint.* configure_rllink\(config, address='h:1'"
    ):
        parse_address("rllink://h:1")


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("example:1", False),
    ],
)
def test_only_loopback_and_unix_sockets_are_local(text: str, is_local: bool) -> None:
    assert parse_address(text).is_local is is_local


@pytest.mark.parametrize(
    ("text", "is_address"),
    [
        ("CartPole-v1", False),
        ("my_module:Env-v0", False),
        ("module:factory", False),
        ("runs/demo/checkpoint", False),
        ("127.0.0.1:5", True),
        ("rlmesh://x:1", True),
        ("tcp://x:1", True),
        ("unix:/x", True),
    ],
)
def test_addresses_are_distinguished_from_ids_and_paths(text: str, is_address: bool) -> None:
    assert looks_like_address(text) is is_address


@pytest.mark.parametrize(
    ("text", "is_host"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("Lab-7.example.com", True),
        ("CartPole-v1", False),
        ("my.env-v0", False),
        ("ns/my.env", False),
        ("my_package.my_env", False),
        ("my.module:factory", False),
        ("127.0.0.1:5", False),
    ],
)
def test_hosts_without_a_port_are_distinguished_from_ids(text: str, is_host: bool) -> None:
    assert looks_like_host(text) is is_host
