"""Who gets a TCP connection to a worker, who does not, and what happens then."""

import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ListenOptions, RemoteVectorEnv
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, request_ticket, shake_hands
from rlmesh_ray.errors import AddressError, ConfigurationError, EndpointError, RemoteEnvError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.env.connection_broker import bound_sockets
from rlmesh_ray.server.pool.gateway import GatewayServer
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.transport import direct_connection, tcp
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport.direct_step_server import DirectStepServer
from rlmesh_ray.transport.exactly_once import SessionProgress
from rlmesh_ray.transport.step_buffers import StepBuffers
from tests.loopback.certificates import Authority, needs_openssl
from tests.loopback.client_internals import env_client, vanish
from tests.loopback.direct_sessions import NOTHING, array
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Lifelike
from tests.loopback.ports import free_address, plain_channel


def port_of(server: EnvServer) -> int:
    return int(shake_hands(ConnectOptions(server.address)).capabilities[capabilities.DIRECT_TCP])


def ticket_for(client: EnvClient, *shown: tuple[str, str]) -> tcp.Ticket:
    """Request a ticket for the worker of a client's session, with more metadata."""
    session = (capabilities.SESSION_METADATA_KEY, client.session_id)
    with plain_channel(client.address) as channel:
        return request_ticket(
            ConnectOptions(client.address), channel, (session, *shown), 1000, 30.0
        )


def steps_directly(client: EnvClient) -> bool:
    """Tell whether a step takes a TCP connection; it counts on for as long as none does."""
    client.step(NOTHING)
    return client.direct_connector.transport == "tcp"


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer(Lifelike) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_peer_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_connection, "_warned_addresses", set())


def test_steps_take_a_connection_as_soon_as_there_is_one_and_wait_for_none() -> None:
    with EnvServer(Lifelike, transport="tcp") as server:
        client = EnvClient(ConnectOptions(server.address))
        client.reset()
        num_steps = 1
        while not steps_directly(client):
            num_steps += 1

        assert array(client.step(NOTHING)).item() == num_steps + 1
        client.close()


class Film(gymnasium.Env[Any, Any]):
    """Observes more than sockets hold; tells its process."""

    observation_space = spaces.Dict(
        {
            "a": spaces.Box(0, 255, (3_000_001,), np.uint8),
            "b": spaces.Box(-1, 1, (500_000,), np.float64),
        }
    )
    action_space = spaces.Box(-1, 1, (300_000,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(0.0), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        return self._observe(float(action.sum())), 1.0, False, False, {}

    def _observe(self, reported: float) -> Any:
        noise = self.np_random.random(500_000)
        noise[0] = reported / 1e6
        return {"a": self.np_random.integers(0, 256, 3_000_001, np.uint8), "b": noise}


def test_values_larger_than_the_kernel_s_buffers_arrive_as_they_are() -> None:
    own: Any = gymnasium.vector.SyncVectorEnv([Film, Film])
    with EnvServer(Film, num_envs=2) as server:
        env = RemoteVectorEnv(server.address, transport="tcp")
        theirs, _ = own.reset(seed=3)
        ours, _ = env.reset(seed=3)
        for count in range(3):
            for name in ("a", "b"):
                np.testing.assert_array_equal(ours[name], theirs[name])
            action = np.full((2, 300_000), count / 8, np.float32)
            theirs, ours = own.step(action)[0], env.step(action)[0]
        assert env_client(env).direct_connector.transport == "tcp"
        env.close()
    own.close()


def test_a_client_that_reads_nothing_costs_its_own_session_alone() -> None:
    with EnvServer(Film, max_sessions=1) as server:
        client = EnvClient(ConnectOptions(server.address), transport="tcp")
        client.reset()
        client.step([np.zeros((1, 300_000), np.float32)])
        client.send_step([np.zeros((1, 300_000), np.float32)])
        assert eventually(lambda: server.statistics().steps == 2)
        vanish(client)
        assert eventually(lambda: server.num_sessions == 0)

        other = EnvClient(ConnectOptions(server.address), transport="tcp")
        other.reset()
        other.step([np.zeros((1, 300_000), np.float32)])
        other.close()
        client.close()


class Wide(gymnasium.Env[Any, Any]):
    """Takes actions larger than sockets hold."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (2_000_000,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        return np.ones(1, np.float32), 0.0, False, False, {}


def test_a_worker_that_takes_nothing_does_not_hold_its_client_up() -> None:
    with EnvServer(Wide, _step_grace_s=600.0) as server:
        client = EnvClient(ConnectOptions(server.address), transport="tcp", step_timeout_s=1.0)
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        action = [np.zeros((1, 2_000_000), np.float32)]
        client.step(action)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RemoteEnvError, match="TIMEOUT"):
            client.step(action)
        os.kill(pid, signal.SIGCONT)
        client.reset()
        client.step(action)
        client.close()


def test_over_tcp_actions_come_into_the_block_when_their_step_is_executed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        worker = frames.TcpSocket(listener.accept()[0])
    contract = EnvContract(
        id="",
        observation_space=from_gymnasium(spaces.Box(0, 1, (1,), np.float32)),
        action_space=from_gymnasium(spaces.Discrete(2)),
        num_envs=2,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        render_mode="",
        metadata={},
    )
    block = StepBuffers(-1, contract)
    seen: list[list[int]] = []
    end = DirectStepServer(worker, SessionProgress.local(2), block, tag_arrays=True)
    sent = StepBuffers(-1, contract)
    np.asarray(sent.actions[0])[:] = 1
    actions = sent.sent_parts[0]
    with client:
        for number, is_executed in ((1, False), (2, True)):
            client.sendall(frames.REQUEST.pack(number, 0, actions.nbytes) + bytes(actions))
            while (request := end.receive()) is None:
                pass
            assert request == (number, 0, False)
            if is_executed:
                end.load()
            end.answer(number, b"" if is_executed else None)
            seen.append(np.asarray(block.actions[0]).tolist())

        assert seen == [[0, 0], [1, 1]]
    end.close()


# --- who is let in -----------------------------------------------------------------------------


def said(port: int, *words: bytes) -> bytes:
    """Return what the endpoint has sent to a client before it hung up."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(60.0)
        heard = b""
        try:
            for word in words:
                peer.sendall(word)
                heard += peer.recv(1024)
            while more := peer.recv(1024):
                heard += more
        except ConnectionError:
            pass
        return heard


def greeting(ticket_id: bytes) -> bytes:
    return tcp.PROTOCOL + ticket_id + secrets.token_bytes(tcp.NONCE_BYTES)


def test_strangers_are_hung_up_on_and_cost_nothing(server: EnvServer) -> None:
    client = EnvClient(ConnectOptions(server.address), transport="tcp")
    client.reset()
    client.step(NOTHING)
    port = port_of(server)

    assert said(port, b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n") == b""
    assert said(port, greeting(secrets.token_bytes(tcp.TICKET_ID_BYTES))) == b""
    ticket = ticket_for(client)
    heard = said(port, greeting(ticket.ticket_id), secrets.token_bytes(tcp.PROOF_BYTES))
    assert len(heard) == tcp.NONCE_BYTES + tcp.PROOF_BYTES  # and no more
    assert said(port, greeting(ticket.ticket_id)) == b""  # a ticket is good for one try
    assert array(client.step(NOTHING)).item() == 2
    client.close()


def test_a_session_that_is_over_gets_no_connection(server: EnvServer) -> None:
    client = EnvClient(ConnectOptions(server.address), transport="tcp")
    client.reset()
    ticket = ticket_for(client)
    client.close()
    assert eventually(lambda: server.num_sessions == 0)

    with pytest.raises(OSError, match="hung up"):
        tcp.connect("127.0.0.1", port_of(server), ticket, 30.0)


def test_a_client_shows_nothing_to_another_endpoint() -> None:
    heard: list[bytes] = []

    def pretend(listener: socket.socket) -> None:
        with listener.accept()[0] as peer:
            peer.recv(tcp.HELLO.size, socket.MSG_WAITALL)
            peer.sendall(secrets.token_bytes(tcp.NONCE_BYTES + tcp.PROOF_BYTES))
            heard.append(peer.recv(1024))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        pretending = threading.Thread(target=pretend, args=(listener,))
        pretending.start()
        with pytest.raises(OSError, match="is another endpoint"):
            tcp.connect("127.0.0.1", listener.getsockname()[1], tcp.new_ticket("theirs"), 30.0)
        pretending.join()

    assert heard == [b""]


# --- where there is none -------------------------------------------------------------------------


def assert_steps_are_messages(client: EnvClient, caplog: pytest.LogCaptureFixture) -> str:
    """Step until the log has the reason why there is no connection; return it."""
    client.reset()

    def has_reported() -> bool:
        client.step(NOTHING)
        return bool(caplog.messages)

    with caplog.at_level(logging.INFO, "rlmesh_ray.transport.direct_connection"):
        assert eventually(has_reported)
        client.reset()
        client.step(NOTHING)
    assert client.direct_connector.transport == "grpc"
    (message,) = caplog.messages
    client.close()
    return message


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_port_that_cannot_be_reached_is_reported_once_or_an_error_for_who_requires_tcp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = closed_port()
    with EnvServer(
        Lifelike, transport="tcp", address=ListenOptions(data_address=f"127.0.0.1:0/{port}")
    ) as server:
        client = EnvClient(ConnectOptions(server.address))
        message = assert_steps_are_messages(client, caplog)
        client = EnvClient(ConnectOptions(server.address), transport="tcp")
        client.reset()
        with pytest.raises(EndpointError, match=r"Connection refused.*leave transport out"):
            client.step(NOTHING)
        client.close()

    assert f"no direct TCP connection to 127.0.0.1, port {port}" in message
    assert "--data-address HOST:PORT/ADVERTISED" in message


def test_behind_a_gateway_steps_are_messages(caplog: pytest.LogCaptureFixture) -> None:
    with (
        EnvServer(Lifelike, transport="tcp") as server,
        GatewayServer(lambda: [Target("one", 1, server.address)]) as gateway,
        caplog.at_level(logging.INFO, "rlmesh_ray.transport.direct_connection"),
    ):
        with pytest.raises(ConfigurationError, match="it is behind a gateway"):
            EnvClient(ConnectOptions(gateway.address), transport="tcp")
        message = assert_steps_are_messages(EnvClient(ConnectOptions(gateway.address)), caplog)

    assert "it is behind a gateway" in message


def test_a_client_that_no_endpoint_admits_gets_the_reason_and_no_port(server: EnvServer) -> None:
    client = EnvClient(ConnectOptions(server.address), transport="tcp")
    with pytest.raises(EndpointError, match=r"refuses direct connections .*: a gateway") as caught:
        ticket_for(client, ("rlmesh-ray-gateway", "1"))
    client.close()

    assert "--data-address" not in str(caught.value)
    assert "the session broke" not in str(caught.value)


@needs_openssl
def test_with_tls_there_is_none(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "own")
    certificate, key = authority.sign("server")
    tls = ServerTls(certificate, key)
    with pytest.raises(ConfigurationError, match="there is none with TLS"):
        EnvServer(Lifelike, tls=tls, address=ListenOptions(data_address="127.0.0.1:0"))
    with EnvServer(Lifelike, tls=tls) as server:
        trusting = ConnectOptions(server.address, tls=ClientTls(authority.certificate))

        assert capabilities.DIRECT_TCP not in shake_hands(trusting).capabilities


@pytest.mark.parametrize(
    "options",
    [{"transport": "shared_memory"}, {"address": "unix:{}/endpoint"}],
    ids=str,
)
def test_an_operator_can_do_without(options: dict[str, Any], tmp_path: Path) -> None:
    options = {name: value.format(tmp_path) for name, value in options.items()}
    with EnvServer(Lifelike, **options) as server:
        assert (
            capabilities.DIRECT_TCP not in shake_hands(ConnectOptions(server.address)).capabilities
        )
        with pytest.raises(ConfigurationError, match="accepts no direct TCP connections"):
            EnvClient(ConnectOptions(server.address), transport="tcp")


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"address": ListenOptions(data_address="unix:/x")}, AddressError, "must be HOST:PORT"),
        ({"address": ListenOptions(data_address="nowhere")}, AddressError, "HOST:PORT"),
        (
            {"address": ListenOptions(data_address="dm_env_rpc://127.0.0.1:7")},
            AddressError,
            "must be HOST:PORT",
        ),
        (
            {"address": ListenOptions(data_address="0.0.0.0:0")},
            AddressError,
            "^data_address .*0.0.0.0:0 .*give a token",
        ),
        (
            {"address": ListenOptions("127.0.0.1:7", data_address="127.0.0.1:7")},
            AddressError,
            "another port",
        ),
        (
            {"address": ListenOptions("127.0.0.1:7", data_address="localhost:7")},
            AddressError,
            "another port",
        ),
        (
            {"address": ListenOptions("localhost:7", data_address="[::1]:7")},
            AddressError,
            "another port",
        ),
        (
            {"address": ListenOptions("tcp://localhost:7", data_address="127.0.0.1:7")},
            AddressError,
            "another",
        ),
        (
            {"address": ListenOptions("unix:/x", data_address="127.0.0.1:7")},
            ConfigurationError,
            "unix socket",
        ),
        ({"transport": "tcp", "address": "unix:/x"}, ConfigurationError, "at a unix socket"),
        (
            {"address": ListenOptions(data_address="127.0.0.1:7/70000")},
            AddressError,
            "a port, 1 to 65535",
        ),
        (
            {"address": ListenOptions(data_address="127.0.0.1:7/x")},
            AddressError,
            "a port, 1 to 65535",
        ),
        (
            {"address": ListenOptions(data_address="127.0.0.1:7/")},
            AddressError,
            "a port, 1 to 65535",
        ),
        ({"observers": "no"}, ConfigurationError, "must be True or False"),
        (
            {"address": ListenOptions(data_address="127.0.0.1:7/1"), "transport": "grpc"},
            ConfigurationError,
            "transport takes none",
        ),
    ],
    ids=str,
)
def test_a_wrong_data_address_is_refused_before_anything_starts(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        EnvServer(Lifelike, **options)


def test_a_data_address_that_is_in_use_is_refused_and_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AddressError, match="name another data_address"):
            EnvServer(Lifelike, address=ListenOptions(data_address=where)).start()


@pytest.mark.parametrize(
    ("address", "data_address", "is_reported"),
    [
        ("127.0.0.1:0", "[::1]:0", True),
        ("127.0.0.1:0", "localhost:0", False),
        ("localhost:0", "127.0.0.1:0", False),
        ("[::1]:0", "0.0.0.0:0", False),
    ],
)
def test_a_data_address_at_another_host_is_in_the_log(
    address: str, data_address: str, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    listen = ListenOptions(address, data_address=data_address)
    EnvServer(Lifelike, address=listen, token=False)

    assert (
        any("will not find data_address" in each.message for each in caplog.records) is is_reported
    )


def test_the_data_port_may_be_that_of_the_endpoint_at_another_address() -> None:
    where = free_address()
    _, _, port = where.partition(":")

    with EnvServer(
        Lifelike, address=ListenOptions(where, data_address=f"127.0.0.2:{port}")
    ) as server:
        assert port_of(server) == int(port)


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("0.0.0.0", ("127.0.0.1", "::1")),
        ("::", ("127.0.0.1", "::1")),
        ("localhost", ("127.0.0.1", "::1")),
        ("127.0.0.1", ("127.0.0.1",)),
        ("::1", ("::1",)),
    ],
)
def test_the_data_port_is_open_where_grpc_listens(address: str, hosts: tuple[str, ...]) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    sockets = bound_sockets(Address(address, 0))
    (port,) = {each.getsockname()[1] for each in sockets}

    reached = []
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, port)).close()
            reached.append(host)
    for each in sockets:
        each.close()

    assert tuple(reached) == hosts


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("code", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_a_machine_without_ipv6_listens_at_what_it_has(
    host: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = socket.socket.bind

    def bind_without(listener: socket.socket, where: tuple[Any, ...]) -> None:
        if listener.family is socket.AF_INET6:
            raise OSError(code, os.strerror(code))
        bind(listener, where)

    monkeypatch.setattr(socket.socket, "bind", bind_without)

    (bound,) = bound_sockets(Address(host, 0))

    with bound:
        assert bound.family is socket.AF_INET


@pytest.mark.parametrize("times", [1, 1000])
def test_a_free_port_is_free_at_every_address_of_a_name(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = socket.socket.bind
    refused: list[Any] = []

    def resolve(*_: Any, **__: Any) -> list[Any]:
        hosts = ("127.0.0.1", "127.0.0.2")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]

    def bind_sometimes(listener: socket.socket, where: tuple[Any, ...]) -> None:
        # The port that was free at the first address.
        if where[1] and len(refused) < times:
            refused.append(where)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        bind(listener, where)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "bind", bind_sometimes)
    if times > 1:
        with pytest.raises(AddressError, match="Address already in use"):
            bound_sockets(Address("two.example", 0))
        return
    sockets = bound_sockets(Address("two.example", 0))

    assert len(sockets) == 2
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()


def test_clients_connect_where_the_operator_says() -> None:
    where = free_address()
    with EnvServer(Lifelike, address=ListenOptions(data_address=where)) as server:
        assert where == f"127.0.0.1:{port_of(server)}"
        client = EnvClient(ConnectOptions(server.address), transport="tcp")
        client.reset()
        client.step(NOTHING)
        client.close()
