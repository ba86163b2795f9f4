"""A network namespace behind a link of 100 Mbit/s, in which a server runs. Linux, as root."""

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

from rlmesh_ray.errors import ConfigurationError

RATE = "100mbit"
_TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def lacking() -> str:
    """Return what this machine lacks to make such links; empty: nothing."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    return ", ".join(missing if os.geteuid() == 0 else ["root", *missing])


class ThinLink:
    """The link and the namespace; both end with this process. A context manager.

    Raises:
        ConfigurationError: They cannot be made here.
    """

    def __init__(self) -> None:
        # Of the block for benchmarks (RFC 2544), by process: several may make links.
        here, self.host = (f"198.18.{os.getpid() % 256}.{host}" for host in (1, 2))
        near, far = (f"{end}{os.getpid()}" for end in ("near", "far"))
        if lacking():
            raise ConfigurationError(f"a thin link needs {lacking()}: leave that row out")
        holds = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *holds], stdout=subprocess.PIPE
        )
        self.prefix = ("nsenter", "--target", str(self._holder.pid), "--net")
        """What a command begins with that is to run in the namespace; it keeps its process id."""
        try:
            assert self._holder.stdout is not None
            self._holder.stdout.readline()  # the namespace is there
            peer = ["peer", "name", far, "netns", str(self._holder.pid)]
            _do("ip", "link", "add", near, "type", "veth", *peer)
            for prefix, device, address in (((), near, here), (self.prefix, far, self.host)):
                _do(*prefix, "ip", "addr", "add", f"{address}/24", "dev", device)
                _do(*prefix, "ip", "link", "set", device, "up")
                limit = ["tbf", "rate", RATE, "burst", "128kb", "latency", "100ms"]
                _do(*prefix, "tc", "qdisc", "add", "dev", device, "root", *limit)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


def _do(*command: str) -> None:
    made = subprocess.run(command, capture_output=True, text=True, env={"PATH": _PATH}, check=False)
    if made.returncode:
        raise ConfigurationError(f"{' '.join(command)}: {made.stderr.strip()}: leave that row out")
