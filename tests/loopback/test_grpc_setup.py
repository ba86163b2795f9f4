"""How gRPC is loaded; in processes of their own, each with one end only."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from rlmesh_ray.grpc_setup import channel_options

NUM_CALLS = 300

# Echoes until its input ends; then says how often gRPC's own threads were woken, and what the
# variable holds.
SERVER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlmesh_ray.grpc_setup import grpc

handlers = {
    "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
    "Join": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
}
options = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # However often it is asked: on a busy machine several pings arrive at once.
    ("grpc.http2.max_ping_strikes", 0),
]
server = grpc.server(ThreadPoolExecutor(1), options=options)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
wakes = 0
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().startswith("event_engine"):
        _, _, found = (task / "status").read_text().partition("\\nvoluntary_ctxt_switches:")
        wakes += int(found.split()[0])
print(wakes, {name: value for name, value in os.environ.items() if name.startswith("GRPC_")})
"""

# Lets a stream be for twice as long as pings may take, and holds the interpreter meanwhile.
CLIENT = """
import ctypes, sys

from rlmesh_ray.client.join_stream import open_call
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.grpc_setup import grpc

options = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
]
address = sys.argv[1]
stream = JoinStream(open_call(grpc.insecure_channel(address, options), "/s/Join", ()), address)
stream.send(b"before")
print(stream.receive(20.0).decode())
ctypes.PyDLL(None).sleep(4)
stream.send(b"after")
print(stream.receive(20.0).decode())
stream.close()
"""


# Forks while a stream is open, as the start of Ray does.
FORKS = """
import os

import gymnasium

from rlmesh_ray import ModelServer, RemoteModel

if __name__ == "__main__":
    with ModelServer(len) as server, RemoteModel(server.address) as model:
        model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=1))
        for _ in range(10):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        model.close_route()
"""


@contextlib.contextmanager
def started_server(**variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, with these of gRPC's variables, and its address."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment_with(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    return others | variables


def wakes_of_grpcs_own_threads(**variables: str) -> int:
    """Return how often a server's were woken for the calls; what it starts sees ``variables``."""
    with started_server(**variables) as (server, address):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/s/Echo")
            assert [call(b"request") for _ in range(NUM_CALLS)] == [b"request"] * NUM_CALLS
        output, errors = server.communicate(timeout=60)
    wakes, _, after = output.partition(" ")
    # What this program starts loads gRPC as it would without it.
    assert (after.strip(), errors) == (str(variables), "")
    return int(wakes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; elsewhere gRPC stays as it is")
def test_messages_wake_no_threads_of_grpcs_own_unless_the_user_chooses() -> None:
    by_itself = wakes_of_grpcs_own_threads()
    as_it_comes = wakes_of_grpcs_own_threads(GRPC_EXPERIMENTS=",")
    # Who has chosen how often the timer reads may have chosen too seldom for the older way.
    with_a_timer = wakes_of_grpcs_own_threads(GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS="5000")

    assert by_itself < NUM_CALLS <= min(as_it_comes, with_a_timer)


def test_a_server_that_was_away_for_long_is_dialed_again_within_seconds() -> None:
    assert dict(channel_options())["grpc.max_reconnect_backoff_ms"] == 2_000


@pytest.mark.slow  # pings come after seconds
def test_pings_are_answered_while_a_client_waits_for_nothing() -> None:
    # As while a runner learns from what it has sampled: its own pings, and the server's.
    with started_server() as (_, address):
        client = subprocess.run(
            [sys.executable, "-c", CLIENT, address],
            env=environment_with({}),
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert (client.stdout.split(), client.stderr) == (["before", "after"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork with")
@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_a_fork_with_open_calls_is_no_noise_unless_the_user_wants_it(verbosity: str | None) -> None:
    chosen = {} if verbosity is None else {"GRPC_VERBOSITY": verbosity}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS],  # Python 3.12 warns, too
        env=environment_with(chosen),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ("skipping fork() handlers" in done.stderr) == (verbosity is not None)
    assert verbosity is not None or not done.stderr
