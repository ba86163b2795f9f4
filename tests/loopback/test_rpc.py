"""How gRPC is loaded; in processes of their own, each with one end only."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

NUM_CALLS = 300

# Echoes until its input ends; then says how often gRPC's own threads were woken, and what the
# variable holds.
SERVER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlmesh_ray.rpc import grpc

handlers = {
    "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
    "Join": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
}
options = [("grpc.http2.min_recv_ping_interval_without_data_ms", 10)]
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
print(wakes, os.environ.get("GRPC_EXPERIMENTS"))
"""

# Lets a stream be for four times as long as its server may take to answer a ping.
CLIENT = """
import sys, threading

from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.rpc import grpc

options = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.http2.max_pings_without_data", 0),
]
address = sys.argv[1]
stream = JoinStream(grpc.insecure_channel(address, options), "/s/Join", (), address)
stream.send(b"before")
print(stream.receive(20.0).decode())
threading.Event().wait(2.0)
stream.send(b"after")
print(stream.receive(20.0).decode())
stream.close()
"""


@contextlib.contextmanager
def started_server(experiments: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, with ``GRPC_EXPERIMENTS`` as given, and its address."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if experiments is not None:
        environment["GRPC_EXPERIMENTS"] = experiments
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
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


def wakes_of_grpcs_own_threads(experiments: str | None) -> tuple[int, str]:
    """Return how often a server's were woken for the calls, and the variable as it was then."""
    with started_server(experiments) as (server, address):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/s/Echo")
            assert [call(b"request") for _ in range(NUM_CALLS)] == [b"request"] * NUM_CALLS
        output, errors = server.communicate(timeout=60)
    assert not errors
    wakes, after = output.split()
    return int(wakes), after


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; elsewhere gRPC stays as it is")
def test_messages_wake_no_threads_of_a_servers_grpc_unless_the_user_chooses() -> None:
    by_itself, after = wakes_of_grpcs_own_threads(None)
    as_it_comes, after_chosen = wakes_of_grpcs_own_threads(",")

    assert by_itself < NUM_CALLS <= as_it_comes
    # What this program starts loads gRPC as it would without it.
    assert (after, after_chosen) == ("None", ",")


def test_a_client_that_waits_for_nothing_hears_the_answers_to_its_pings() -> None:
    # As while a runner learns from what it has sampled.
    with started_server() as (_, address):
        client = subprocess.run(
            [sys.executable, "-c", CLIENT, address], capture_output=True, text=True, timeout=60
        )

    assert (client.stdout.split(), client.stderr) == (["before", "after"], "")
