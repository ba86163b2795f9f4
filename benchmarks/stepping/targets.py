"""The servers and the client of one measurement, and how they are run."""

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from benchmarks.load import ClientJob
from benchmarks.peers import Peer
from benchmarks.processes import Reading, Server, measure
from benchmarks.serving.targets import NOOP_STYLES
from benchmarks.stepping.specs import ClientSpec, ServerSpec

UNIT = "env-steps/s"
OUR_SERVER = (sys.executable, "-m", "benchmarks.stepping.env_server")
_OUR_DRIVER = (sys.executable, "-m", "benchmarks.stepping.driver")


@dataclass(frozen=True, slots=True)
class Target:
    """One side of a comparison."""

    name: str
    """For tables and programs."""
    client_spec: ClientSpec
    """Without addresses: they are those of ``server_specs``."""
    server_specs: Sequence[ServerSpec] = ()
    """Endpoints, each a process of its own; empty where environments are in the client's."""
    num_sessions: int = 1
    """With each endpoint."""
    server: Sequence[str] = OUR_SERVER
    """Command of an endpoint; its last argument is the ``ServerSpec``."""
    client: Sequence[str] = _OUR_DRIVER
    """Command of the client, which reads its ``ClientSpec``."""

    def measure(self) -> Reading:
        """Measure in fresh processes.

        Raises:
            EndpointError: A process failed; there is no number.
        """
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    Server(f"the server of {self.name}", [*self.server, server_spec.to_line()])
                )
                for server_spec in self.server_specs
            ]
            addresses = tuple(server.address for server in servers) * self.num_sessions
            client_spec = replace(self.client_spec, addresses=addresses)
            return measure([server.pid for server in servers], [self._job(client_spec)])

    def _job(self, client_spec: ClientSpec) -> ClientJob:
        return ClientJob(
            self.client, client_spec.to_line(), client_spec.warm_up_s, client_spec.seconds
        )


def grpc_target(name: str, client_spec: ClientSpec, server_spec: ServerSpec) -> Target:
    """Return gRPC alone, on the loop on which this package serves."""
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    server = (sys.executable, "-m", "benchmarks.serving.noop_server", NOOP_STYLES[0], loop)
    return Target(name, client_spec, (server_spec,), server=server)


def released_target(
    name: str, client_spec: ClientSpec, server_spec: ServerSpec, peer: Peer
) -> Target:
    """Return the released rlmesh, client and server.

    Raises:
        ConfigurationError: It is not installed.
    """
    server, client = (
        peer.command("stepping/released_env_server.py"),
        peer.command("stepping/released_driver.py"),
    )
    return Target(name, client_spec, (server_spec,), server=server, client=client)


def dm_env_rpc_target(
    name: str,
    client_spec: ClientSpec,
    server_spec: ServerSpec,
    peer: Peer,
    *,
    server: str = "stepping/dm_env_rpc_server.py",
) -> Target:
    """Return dm_env_rpc's own client.

    Args:
        name: For tables.
        client_spec: What it does.
        server_spec: What the server hosts.
        peer: Where dm_env_rpc is installed.
        server: A script that runs there, too; by default one made of dm_env_rpc's own library.
            Empty: ours.

    Raises:
        ConfigurationError: It is not installed.
    """
    client = peer.command("stepping/dm_env_rpc_driver.py")
    command = peer.command(server) if server else OUR_SERVER
    return Target(name, client_spec, (server_spec,), server=command, client=client)
