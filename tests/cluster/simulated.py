"""The same cluster where hosts cannot be made: Ray's multi-node test cluster, on this machine."""

import gc
import os
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.cluster.hosts import all_pids, await_end

PROJECT = Path(__file__).parents[2]
_MARK = "RLMESH_TEST_CLUSTER"
"""An environment variable by which the cluster's processes are known."""


class SimulatedCluster:
    """Three nodes on this machine. Nothing is launched or installed.

    Args:
        folder: An empty folder.
    """

    num_nodes = 3

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = str(folder)
        self._cluster: Cluster | None = None

    def up(self) -> None:
        """Start a head and two more nodes."""
        os.environ[_MARK] = self._mark
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False},
        )
        for _ in range(self.num_nodes - 1):
            self._node = self._cluster.add_node(num_cpus=1)

    def submit(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Run a script that joins the cluster; return what writes its output."""
        assert self._cluster is not None
        return subprocess.Popen(
            [sys.executable, str(PROJECT / script), *arguments],
            cwd=self._folder,
            env={**os.environ, "RAY_ADDRESS": self._cluster.address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lose_a_node(self) -> None:
        """SIGKILL a node's processes."""
        assert self._cluster is not None
        self._cluster.remove_node(self._node, allow_graceful=False)

    def replace_it(self) -> None:
        """Add another node."""
        assert self._cluster is not None
        self._node = self._cluster.add_node(num_cpus=1)

    def down(self) -> None:
        """End all nodes."""
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = self._node = None
            # Ray does not wait for the processes that it kills. They warn when they are collected:
            # here it is expected, and in a later test an error.
            gc.collect()
            os.environ.pop(_MARK)

    def leftovers(self, within_s: float) -> list[str]:
        """Wait until no process of the cluster runs; return those that still do."""
        return await_end(self._pids, within_s)

    def clean_up(self) -> None:
        """End everything. Always allowed."""
        self.down()

    def _pids(self) -> set[int]:
        mark = f"{_MARK}={self._mark}".encode()
        return {pid for pid in all_pids() if mark in _environment(pid)} - {os.getpid()}


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has just ended, or is another user's
        return b""
