"""How gRPC is loaded."""

import os
import subprocess
import sys

import pytest

NUM_CALLS = 300
CALLS = f"""
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlmesh_ray.rpc import grpc

server = grpc.server(ThreadPoolExecutor(1))
echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {{"Echo": echo}}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
    call = channel.unary_unary("/s/Echo")
    assert [call(b"request") for _ in range({NUM_CALLS})] == [b"request"] * {NUM_CALLS}
wakes = 0
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().startswith("event_engine"):
        _, _, found = (task / "status").read_text().partition("\\nvoluntary_ctxt_switches:")
        wakes += int(found.split()[0])
print(wakes, os.environ.get("GRPC_EXPERIMENTS"))
"""


def wakes_of_grpcs_own_threads(experiments: str | None) -> tuple[int, str]:
    """Return how often they were woken for the calls, and the variable as it was afterwards."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if experiments is not None:
        environment["GRPC_EXPERIMENTS"] = experiments
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not done.stderr
    wakes, after = done.stdout.split()
    return int(wakes), after


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; elsewhere gRPC stays as it is")
def test_messages_wake_no_threads_of_grpcs_own_unless_the_user_chooses() -> None:
    by_itself, after = wakes_of_grpcs_own_threads(None)
    as_it_comes, after_chosen = wakes_of_grpcs_own_threads(",")

    assert by_itself < NUM_CALLS <= as_it_comes
    # What this program starts loads gRPC as it would without it.
    assert (after, after_chosen) == ("None", ",")
