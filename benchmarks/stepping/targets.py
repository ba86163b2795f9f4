"""Who steps what: the servers and the client of one measurement, and how they are run."""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.load import Order
from benchmarks.peers import Peer
from benchmarks.processes import Reading, Server, measure
from benchmarks.serving.targets import NOOP_STYLES
from benchmarks.stepping.specs import Drive, Hosting

UNIT = "env-steps/s"
OUR_SERVER = (sys.executable, "-m", "benchmarks.stepping.env_server")
_OUR_DRIVER = (sys.executable, "-m", "benchmarks.stepping.driver")


@dataclass(frozen=True, slots=True)
class Contender:
    """One side of a comparison."""

    name: str
    """For tables and programs."""
    drive: Drive
    """Without addresses: they are those of ``hostings``."""
    hostings: Sequence[Hosting] = ()
    """Endpoints, each a process of its own; empty where environments are in the client's."""
    num_sessions: int = 1
    """With each endpoint."""
    server: Sequence[str] = OUR_SERVER
    """What runs an endpoint; told its ``Hosting``."""
    client: Sequence[str] = _OUR_DRIVER
    """What steps; told its ``Drive``."""

    def measure(self) -> Reading:
        """Measure in fresh processes.

        Raises:
            EndpointError: A process failed; there is no number.
        """
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    Server(f"the server of {self.name}", [*self.server, hosting.to_line()])
                )
                for hosting in self.hostings
            ]
            addresses = tuple(server.address for server in servers) * self.num_sessions
            drive = replace(self.drive, addresses=addresses)
            return measure([server.pid for server in servers], [self._order(drive)])

    def _order(self, drive: Drive) -> Order:
        return Order(self.client, drive.to_line(), drive.warm_up_s, drive.seconds)


def grpc_contender(name: str, drive: Drive, hosting: Hosting) -> Contender:
    """Return gRPC alone, on the loop on which this package serves."""
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    server = (sys.executable, "-m", "benchmarks.serving.noop_server", NOOP_STYLES[0], loop)
    return Contender(name, drive, (hosting,), server=server)


def released_contender(name: str, drive: Drive, hosting: Hosting, peer: Peer) -> Contender:
    """Return the released rlmesh, client and server.

    Raises:
        ConfigurationError: It is not installed.
    """
    server, client = (
        peer.command("stepping/released_env_server.py"),
        peer.command("stepping/released_driver.py"),
    )
    return Contender(name, drive, (hosting,), server=server, client=client)


def dm_env_rpc_contender(
    name: str,
    drive: Drive,
    hosting: Hosting,
    peer: Peer,
    *,
    server: str = "stepping/dm_env_rpc_server.py",
) -> Contender:
    """Return dm_env_rpc's own client.

    Args:
        name: For tables.
        drive: What it does.
        hosting: What the server hosts.
        peer: Where dm_env_rpc is installed.
        server: A script that runs there, too; by default one made of dm_env_rpc's own library.
            Empty: ours.

    Raises:
        ConfigurationError: It is not installed.
    """
    client = peer.command("stepping/dm_env_rpc_driver.py")
    command = peer.command(server) if server else OUR_SERVER
    return Contender(name, drive, (hosting,), server=command, client=client)
