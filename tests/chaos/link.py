"""A network namespace for an endpoint, and a link to it that loses or delays packets.

A thread of this process passes the packets on between two TUN devices, one here and one in the
namespace. So it needs neither netem nor iptables, which many kernels lack, and a seed draws what
becomes of each packet.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.loopback.eventually import eventually

_DEVICE = Path("/dev/net/tun")
_TOOLS = ("ip", "nsenter", "setpriv", "unshare")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_INTERFACE = "16sH22x"
_PACKET_BYTES = 65536
_QUEUE_LENGTH = 10_000
_START_S = 10.0


def lacking() -> str:
    """Return what this machine lacks to make links; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    missing += [] if _DEVICE.exists() else [str(_DEVICE)]
    if missing:
        return ", ".join(missing)
    try:
        Link(0).close()
    except (OSError, subprocess.CalledProcessError, TimeoutError) as error:
        return f"the right to make network namespaces ({error})"
    return ""


class Link:
    """A namespace with one address, which only this machine reaches, while ``close`` is not called.

    Both end with this process, however it ends.

    Args:
        seed: Of what becomes of the packets.
    """

    def __init__(self, seed: int) -> None:
        self.is_cut = False
        """Whether no packet passes, in either direction."""
        self.loss = 0.0
        """What share of the packets is lost."""
        self.longest_delay_s = 0.0
        """Each packet is late by a time between 0 and this; so some overtake others."""
        self._random = random.Random(seed)
        # Of the block for benchmarks (RFC 2544), by process: several may make links.
        here, there = (f"198.18.{os.getpid() % 256}.{host}" for host in (1, 2))
        self.host = there
        """The address in the namespace."""
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        )
        self._descriptors: list[int] = []
        try:
            self._await_namespace()
            near, far = self._open(), self._open()
            _ip("link", "set", far, "netns", str(self._holder.pid))
            self._bring_up([], near, here)
            self._bring_up(self.prefix, far, there)
        except BaseException:
            self._clean_up()
            raise
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    @property
    def prefix(self) -> Sequence[str]:
        """What a command begins with that is to run in the namespace; it keeps its process id."""
        return ["nsenter", "--target", str(self._holder.pid), "--net"]

    def close(self) -> None:
        """Remove the link and the namespace."""
        self._is_over.set()
        self._thread.join()
        self._clean_up()

    def _await_namespace(self) -> None:
        own, theirs = (f"/proc/{pid}/ns/net" for pid in ("self", self._holder.pid))
        if not eventually(lambda: os.readlink(own) != os.readlink(theirs), _START_S):
            raise TimeoutError(f"no namespace after {_START_S:g} s")

    def _open(self) -> str:
        """Make a TUN device; return its name."""
        descriptor = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        self._descriptors.append(descriptor)
        wanted = struct.pack(_INTERFACE, b"chaos%d", _TUN_WITHOUT_HEADER)
        name, _ = struct.unpack(_INTERFACE, fcntl.ioctl(descriptor, _TUNSETIFF, wanted))
        return str(name.rstrip(b"\0").decode())

    @staticmethod
    def _bring_up(prefix: Sequence[str], device: str, address: str) -> None:
        _ip("addr", "add", f"{address}/24", "dev", device, prefix=prefix)
        queue = ("txqueuelen", str(_QUEUE_LENGTH))
        _ip("link", "set", device, *queue, "up", prefix=prefix)

    def _clean_up(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._holder.kill()
        self._holder.wait()

    def _pass_on(self) -> None:
        one, other = self._descriptors
        targets = {one: other, other: one}
        late: list[tuple[float, int, int, bytes]] = []
        """Packets on their way: when they are due, a number, to where."""
        numbers = itertools.count()
        while not self._is_over.is_set():
            wait_s = min(0.1, max(0.0, late[0][0] - time.monotonic())) if late else 0.1
            for source in select.select(list(targets), [], [], wait_s)[0]:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(source, _PACKET_BYTES)
                    if not self._is_lost():
                        due_s = time.monotonic() + self._delay_s()
                        heapq.heappush(late, (due_s, next(numbers), targets[source], packet))
            while late and late[0][0] <= time.monotonic():
                *_, target, packet = heapq.heappop(late)
                with contextlib.suppress(OSError):  # the queue is full: it is lost
                    os.write(target, packet)

    def _is_lost(self) -> bool:
        return self.is_cut or (self.loss > 0 and self._random.random() < self.loss)

    def _delay_s(self) -> float:
        longest_s = self.longest_delay_s
        return self._random.uniform(0.0, longest_s) if longest_s else 0.0


def _ip(*arguments: str, prefix: Sequence[str] = ()) -> None:
    command = [*prefix, "ip", *arguments]
    subprocess.run(command, check=True, capture_output=True, env={"PATH": _PATH})
