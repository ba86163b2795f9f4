"""Whom a client connects to, with a network and a clock of the test's own."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.tcp import new_ticket


class Network:
    """Hosts that say nothing, but for one of their addresses."""

    SOCK_STREAM = socket.SOCK_STREAM

    def __init__(self, num_silent: int, *, has_last: bool) -> None:
        self.now_s = 50.0
        self.num_silent, self.has_last = num_silent, has_last
        self.made: list[Socket] = []
        self.num_greeted = 0

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (f"{host}{at}", port)) for at in range(self.num_silent + 1)]

    def socket(self, *_: int) -> "Socket":
        self.made.append(Socket(self))
        return self.made[-1]


TICKET = new_ticket("session")


class Socket:
    """Takes its time, all of it; where it connects, the endpoint hangs up at once."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.timeout_s = 0.0
        self.is_closed = False

    def settimeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def connect(self, _: Any) -> None:
        is_last = len(self.network.made) > self.network.num_silent
        if not (is_last and self.network.has_last):
            self.network.now_s += self.timeout_s
            raise TimeoutError("timed out")

    def sendall(self, data: bytes) -> None:
        assert TICKET.ticket_id in data
        assert not self.is_closed
        self.network.num_greeted += 1
        raise BrokenPipeError(f"greeted with {self.timeout_s:g} s left")

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("has_last", [False, True], ids=["none", "the last"])
@pytest.mark.parametrize("num_silent", [0, 1, 9])
def test_all_addresses_of_a_host_share_three_seconds(
    num_silent: int, has_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(num_silent, has_last=has_last)
    monkeypatch.setattr(tcp, "socket", network)
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: network.now_s))
    if has_last:
        with pytest.raises(BrokenPipeError, match="greeted with 3 s left"):
            tcp.connect("host", 7, TICKET, 30.0)
    else:
        with pytest.raises(ConnectionError, match=r"timed out; .*--data-address"):
            tcp.connect("host", 7, TICKET, 30.0)
        assert network.now_s == pytest.approx(53.0, abs=0.01)
    assert network.num_greeted == has_last
    assert len(network.made) == num_silent + 1
    assert all(each.is_closed for each in network.made)
