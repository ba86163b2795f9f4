"""DirectConnector: when it tries to connect, with a fake clock and fake connections."""

import logging
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from gymnasium.spaces import Box, Discrete

from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.transport import direct_connection
from rlmesh_ray.transport.direct_connection import DirectConnector
from rlmesh_ray.transport.tcp import new_ticket

CONTRACT = EnvContract(
    id="",
    observation_space=from_gymnasium(Box(0, 1, (1,))),
    action_space=from_gymnasium(Discrete(2)),
    num_envs=1,
    autoreset_mode=AutoresetMode.NEXT_STEP,
    render_mode="",
    metadata={},
)
NAME = "0" * 32


@dataclass
class FakeConnection:
    """A direct connection that ends when the test says so."""

    transport: str
    is_open: bool = True

    def close(self) -> None:
        self.is_open = False


@dataclass
class Network:
    """What is dialed, and the time."""

    now_s: float = 1000.0
    error: Exception | None = None
    has_memory: bool = True
    tries_s: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s

    def open_tcp(self, *_: Any) -> FakeConnection:
        self.tries_s.append(self.now_s)
        if self.error is not None:
            raise self.error
        return FakeConnection("tcp")

    def open_shared_memory(self, *_: Any) -> FakeConnection | None:
        self.tries_s.append(self.now_s)
        return FakeConnection("shared_memory") if self.has_memory else None


class AtOnce:
    """A thread whose work is done as it is started."""

    def __init__(self, target: Any, **_: Any) -> None:
        self.start = target


@pytest.fixture(name="network")
def _network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(direct_connection, "DirectConnection", network)
    monkeypatch.setattr(direct_connection, "time", network)
    threads = SimpleNamespace(Thread=AtOnce, Lock=threading.Lock)
    monkeypatch.setattr(direct_connection, "threading", threads)
    monkeypatch.setattr(direct_connection, "is_reachable", lambda _: True)
    monkeypatch.setattr(direct_connection, "_warned_addresses", set())
    return network


def make_connector(transport: str = "auto", **offered: str) -> DirectConnector:
    """Return the connector of a session that has been reset."""
    names = {"tcp": capabilities.DIRECT_TCP, "memory": capabilities.SHARED_MEMORY}
    connector = DirectConnector(
        {names[each]: value for each, value in (offered or {"tcp": "7"}).items()},
        NAME,
        CONTRACT,
        1000,
        "localhost:5",
        transport=transport,
        request_ticket=lambda _: new_ticket(""),
    )
    assert connector.connection() is None
    connector.on_lanes_reset()
    return connector


def lose(connector: DirectConnector) -> None:
    direct = connector.connection()
    assert direct is not None
    direct.close()


def open_at(connector: DirectConnector, network: Network, now_s: float) -> bool:
    """Return whether a connection is open after two steps at ``now_s``; the first one dials."""
    network.now_s = now_s
    connector.connection()
    return connector.connection() is not None


def test_a_port_that_was_out_of_reach_is_tried_again_without_a_reset(network: Network) -> None:
    connector = make_connector()
    network.error = ConnectionError("out of reach")
    assert not open_at(connector, network, 1000.0)
    network.error = None

    assert not open_at(connector, network, 1000.9)
    assert open_at(connector, network, 1001.0)
    assert connector.transport == "tcp"


def test_pauses_between_tries_in_vain_grow_and_resets_do_not_shorten_them(network: Network) -> None:
    connector = make_connector()
    network.error = ConnectionError("out of reach")
    for tenths in range(3000):
        network.now_s = 1000.0 + tenths / 10
        connector.connection()
        connector.on_lanes_reset()

    assert [now_s - 1000.0 for now_s in network.tries_s] == [
        *(0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 123.0, 183.0, 243.0)
    ]
    for _ in range(5000):  # no number grows beyond what a float holds
        network.now_s += 60.0
        connector.connection()


@pytest.mark.parametrize("offer", [{"tcp": "7"}, {"memory": NAME}], ids=str)
def test_connections_that_are_lost_rarely_are_replaced_at_once(
    network: Network, offer: dict[str, str]
) -> None:
    connector = make_connector(**offer)
    for number in range(100):
        assert open_at(connector, network, 1000.0 + 4.0 * number)
        lose(connector)


def test_connections_that_are_lost_often_are_replaced_after_a_pause_and_it_is_logged(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    connector = make_connector(memory=NAME)
    for number in range(4):
        assert open_at(connector, network, 1000.0 + number)
        lose(connector)
    assert not caplog.messages

    assert not open_at(connector, network, 1003.0)
    assert "lost again and again (4 times)" in caplog.text
    assert not open_at(connector, network, 1010.9)
    assert open_at(connector, network, 1011.0)
    lose(connector)
    assert not open_at(connector, network, 1011.5)
    connector.on_lanes_reset()
    assert open_at(connector, network, 1011.6)
    assert len(caplog.messages) == 1


def test_connections_that_end_with_their_lanes_do_not_count_as_lost(network: Network) -> None:
    connector = make_connector(memory=NAME)
    for _ in range(10):
        assert connector.connection() is not None
        lose(connector)
        connector.on_lanes_lost()
        num_tries = len(network.tries_s)
        assert connector.connection() is None  # a crash: the endpoint has none to give
        assert len(network.tries_s) == num_tries
        connector.on_lanes_reset()
    assert connector.connection() is not None


def test_an_error_about_a_required_transport_names_the_latest_cause(network: Network) -> None:
    connector = make_connector("tcp")
    network.error = ConnectionError("the first cause")
    with pytest.raises(EndpointLostError, match="the first cause"):
        connector.connection()
    connector.on_lanes_reset()
    network.error = None
    for _ in range(4):
        assert connector.connection() is not None
        lose(connector)
    with pytest.raises(EndpointLostError, match="lost again and again"):
        connector.connection()
    network.now_s += 10.0
    network.error = ConnectionError("the second cause")
    for _ in range(2):
        with pytest.raises(EndpointLostError, match="the second cause"):
            connector.connection()


@pytest.mark.parametrize(
    ("transport", "error", "num_tries"),
    [
        ("tcp", ConnectionAbortedError("too slow"), 3),
        ("tcp", ConnectionRefusedError("nothing listens"), 1),
        ("auto", ConnectionAbortedError("too slow"), 1),  # steps use the Join stream meanwhile
    ],
)
def test_an_endpoint_that_is_too_slow_is_asked_again_where_steps_wait_for_it(
    network: Network, transport: str, error: Exception, num_tries: int
) -> None:
    connector = make_connector(transport)
    network.error = error
    if transport == "tcp":
        with pytest.raises(EndpointLostError, match=str(error)):
            connector.connection()
    else:
        assert connector.connection() is None

    assert network.tries_s == [1000.0, 1000.5, 1001.0][:num_tries]


def test_a_connection_that_opens_after_the_end_is_closed(network: Network) -> None:
    connector = make_connector()
    direct = FakeConnection("tcp")

    def open_late(*_: Any) -> FakeConnection:
        connector.close()
        return direct

    network.open_tcp = open_late  # type: ignore[method-assign]

    assert connector.connection() is None
    assert not direct.is_open
    assert not connector.is_open


def test_after_any_error_in_connecting_steps_use_the_join_stream(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    connector = make_connector()
    network.error = OverflowError("too large")

    assert not open_at(connector, network, 1000.0)
    assert "OverflowError: too large" in caplog.text
    network.error = None
    assert open_at(connector, network, 1001.0)


def test_inaccessible_memory_and_no_port_are_logged_once(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    network.has_memory = False
    for _ in range(2):
        connector = make_connector(memory=NAME)
        for second in range(20):
            assert not open_at(connector, network, 1000.0 + second)

    (message,) = caplog.messages
    assert "shared memory is not accessible from here" in message
    assert "it uses TLS" in message


def test_a_transport_that_is_not_offered_is_logged_and_never_tried(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "rlmesh_ray.transport.direct_connection"):
        connector = make_connector(tcp="")
        connector.on_lanes_reset()

        assert not open_at(connector, network, 1000.0)
    assert network.tries_s == []
    assert "it is behind a gateway" in caplog.text
