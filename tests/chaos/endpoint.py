"""An EnvServer in a process of its own."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.link import Link
from tests.chaos.vector_client import LIMIT_S
from tests.loopback.child_processes import worker_pids
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

GRACE_S = 0.5
"""For how long a worker may go on after its deadline."""


class Endpoint:
    """An EnvServer in a process of its own, which keeps its port.

    Args:
        env: What it serves.
        link: The namespace in which it listens; None: on loopback.
        token_file: Of the tokens that it takes; None: it wants none.
        options: Further ones of the EnvServer.
    """

    def __init__(
        self,
        env: str,
        *,
        link: Link | None = None,
        token_file: Path | None = None,
        **options: Any,
    ) -> None:
        self.address = free_address(link.host if link else "127.0.0.1")
        token = None if link is None else False  # none, also for clients on other machines
        wanted = f"TokenFile({str(token_file)!r})" if token_file else repr(token)
        program = f"""
            import threading
            from rlmesh_ray import EnvServer, TokenFile
            EnvServer(
                {env!r}, address={self.address!r}, _step_grace_s={GRACE_S},
                token={wanted}, **{options!r},
            ).start()
            threading.Event().wait()
        """
        prefix = link.prefix if link else ()
        self._command = [*prefix, sys.executable, "-c", textwrap.dedent(program)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # `stop` closes it
        self._process = self._started()
        if not eventually(lambda: self._listens() or self._process.poll() is not None, LIMIT_S):
            raise TimeoutError(f"the endpoint does not listen after {LIMIT_S:g} s")
        if self._process.returncode is not None:
            self._log.seek(0)
            raise RuntimeError(f"the endpoint has ended: {self._log.read().decode()}")

    @property
    def pid(self) -> int:
        """Of the endpoint's process."""
        return self._process.pid

    def workers(self) -> list[int]:
        """Return the ids of the processes that its environments run in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sorted(worker_pids(self.pid))
        return []

    def kill(self) -> None:
        """Kill it, and start it again."""
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def _started(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
