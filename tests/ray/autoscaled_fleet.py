"""A fleet where nodes come when they are needed: ``python -m tests.ray.autoscaled_fleet``.

It says a line of JSON after each change: how many nodes and endpoints there are. The nodes are
processes on this machine; what starts and ends them is Ray's autoscaler, with its fake provider.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.actors.placement import may_grow
from rlmesh_ray.errors import CapacityError
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

_MARK = "RLMESH_TEST_AUTOSCALED"
"""An environment variable by which the cluster's processes are known."""
_PATIENCE_S = 90.0
_UNUSED = {
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}


def cluster_config(address: str) -> dict[str, Any]:
    """Return what a cluster.yaml would say: no node beside the head but for a simulator each."""
    return {
        **_UNUSED,
        "cluster_name": "autoscaled",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "simulators": {
                "resources": {"CPU": 1, "simulator": 1},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 2,
            },
        },
    }


def start_head(folder: Path) -> str:
    """Start the head with an autoscaler; return the cluster's address."""
    address = free_address(ray.util.get_node_ip_address())
    port = address.rpartition(":")[2]
    config = folder / "cluster.json"
    config.write_text(json.dumps(cluster_config(address)))
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            f"--port={port}",
            f"--temp-dir={folder}",
            "--num-cpus=1",
            "--include-dashboard=false",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            f"--autoscaling-config={config}",
        ],
        # The older of Ray's two autoscalers: the newer one needs more settings than this.
        env={
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            _MARK: str(folder),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return address


def end_all(folder: Path) -> None:
    """End the cluster's processes: some of them start others while they end."""
    mark = f"{_MARK}={folder}".encode()
    while pids := [pid for pid in Path("/proc").iterdir() if _has(pid, mark)]:
        for pid in pids:
            try:
                os.kill(int(pid.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _has(process: Path, mark: bytes) -> bool:
    try:
        return process.name.isdigit() and mark in (process / "environ").read_bytes()
    except OSError:  # it has just ended, or is another user's
        return False


def num_nodes() -> int:
    """Return how many nodes are alive."""
    return sum(node["Alive"] for node in ray.nodes())


def run() -> None:
    """Start a fleet, scale it up and down, and stop it."""

    def say(what: str, **facts: object) -> None:
        reported = {"what": what, "nodes": num_nodes(), **facts}
        print(json.dumps(reported), flush=True)  # noqa: T201  # this is a program

    say("before")
    options = {"resources": {"simulator": 1}}
    with EnvFleet("CartPole-v1", num_cpus=0.1, actor_options=options) as fleet:
        say("started", endpoints=len(fleet.addresses), may_grow=may_grow())
        fleet.scale(2)
        say("grown", endpoints=len(fleet.addresses))
        try:
            fleet.scale(3, timeout_s=3.0)
        except CapacityError as error:
            say("at the limit", endpoints=len(fleet.addresses), error=str(error))
        fleet.scale(1)
        assert eventually(lambda: num_nodes() == 2, _PATIENCE_S)
        say("shrunk", endpoints=len(fleet.addresses))
    assert eventually(lambda: num_nodes() == 1, _PATIENCE_S)
    say("stopped")


def main() -> None:
    """Do so on a cluster of its own."""
    folder = Path(tempfile.mkdtemp(prefix="as", dir="/tmp"))  # sockets want short names
    try:
        ray.init(start_head(folder), log_to_driver=False, logging_level=logging.ERROR)
        run()
        ray.shutdown()
    finally:
        end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
