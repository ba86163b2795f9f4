"""A cluster that `ray up cluster.yaml` starts on hosts made of namespaces.

The file is the repository's own, as it stands: the hosts have the addresses, the user and the key
that it names. They reach nothing but each other, and have Ray and torch, but not this project.
"""

import json
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.hosts import HOME, Host, Network, install_all_but_the_project, make_key

PROJECT = Path(__file__).parents[2]
_LAPTOP = "192.0.2.1"
_HEAD = "192.0.2.10"
_WORKERS = ("192.0.2.11", "192.0.2.12")
_LAUNCH_S = 180


class LaunchedCluster:
    """Three hosts, and a laptop at which the commands are given.

    Args:
        folder: An empty folder, for the hosts' disks.
    """

    addresses = frozenset({_HEAD, *_WORKERS})
    num_nodes = len(addresses)

    def __init__(self, folder: Path) -> None:
        shared = [Path(sys.prefix), Path(sys.base_prefix), PROJECT]
        self._powered = ExitStack()
        self._laptop = Host("laptop", _LAPTOP, folder / "laptop", shared)
        key = self._laptop.disk / f"{HOME}/.ssh/id_ed25519".lstrip("/")
        make_key(key)
        self._hosts = [
            Host(f"host{number}", address, folder / f"host{number}", shared)
            for number, address in enumerate((_HEAD, *_WORKERS))
        ]
        for host in self._hosts:
            host.serve_ssh(key.with_suffix(".pub"))
            install_all_but_the_project(host.disk)
            _settle(host)

    def up(self) -> None:
        """Switch the hosts on, and `ray up`."""
        self._powered.callback(self._laptop.lose_power)
        self._laptop.boot()
        self._network = Network(self._laptop)
        self._laptop.serve()
        for host in self._hosts:
            self._powered.callback(host.lose_power)
            self._switch_on(host)
        self._launch("up", "-y")

    def submit(self, script: Path, *arguments: str) -> subprocess.Popen[str]:
        """Run a script on the head by `ray submit`; return what writes its output."""
        command = ("ray", "submit", "cluster.yaml", str(script), *arguments)
        return subprocess.Popen(
            self._laptop.command(*command, cwd=PROJECT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def on_each_host(self, *command: str) -> list[str]:
        """Return what a command says on each of the three hosts."""
        return [
            subprocess.check_output(host.command(*command), text=True).strip()
            for host in self._hosts
        ]

    def status_for_a_stranger(self) -> str:
        """Return what the head answers to a client in the network without a token."""
        asked = subprocess.run(
            self._laptop.command("ray", "status", "--address", f"{_HEAD}:6379"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return asked.stdout

    def lose_a_node(self) -> None:
        """Cut the power of a worker's host."""
        self._hosts[-1].lose_power()

    def replace_it(self) -> None:
        """Switch the host on again; that Ray runs there is up to the autoscaler."""
        self._switch_on(self._hosts[-1])

    def down(self) -> None:
        """`ray down`."""
        self._launch("down", "-y")

    def leftovers(self, within_s: float) -> list[str]:
        """Wait until the hosts are as they were; return what still runs."""
        return [
            f"{host.name}: {command}"
            for host in (*self._hosts, self._laptop)
            for command in host.await_silence(within_s)
        ]

    def clean_up(self) -> None:
        """Switch everything off. Always allowed."""
        self._powered.close()

    def _switch_on(self, host: Host) -> None:
        host.boot()
        self._network.connect(host)
        host.serve()

    def _launch(self, verb: str, *options: str) -> None:
        done = subprocess.run(
            self._laptop.command("ray", verb, *options, "cluster.yaml", cwd=PROJECT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LAUNCH_S,
        )
        assert done.returncode == 0, f"ray {verb}:\n{done.stdout}"


def _settle(host: Host) -> None:
    """Make it a host of one CPU, however many this machine has, on which Ray is less patient."""
    settings = {
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 1}),
        "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_health_check_initial_delay_ms": "2000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
    }
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
    (host.disk / f"{HOME}/.bashrc".lstrip("/")).write_text("".join(exports))
