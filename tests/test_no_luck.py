"""Tests draw from what they have seeded, and wait for what they can see."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# What may sleep: who looks again and again; environments and peers that take their time; and who
# waits for what nothing tells of, or for what must not come.
MAY_SLEEP = {
    "loopback/eventually.py",
    "loopback/test_access_limits.py",
    "loopback/test_dm_env_rpc_server.py",
    "loopback/test_dm_env_rpc_trouble.py",
    "loopback/test_gateway_calls.py",
    "loopback/test_rllink.py",
    "peers/ray_metrics/exporting.py",
    "peers/rlmesh_released/trouble.py",
    "peers/test_javascript_client.py",
    "ray/autoscaled_fleet.py",
}
MAY_SHARE_CHANNELS = {"golden/relay.py", "loopback/ports.py", "loopback/test_grpc_setup.py"}
GUARD = "unit/conftest.py"


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def calls(*nodes: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each call of a method: what it is called on, and its name."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value), node.func.attr, node


def unseeded_samples(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield where a space is drawn from that neither its function seeds nor one named there."""
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    seeding = {
        name
        for name, node in functions.items()
        if any(method == "seed" and "space" in owner for owner, method, _ in calls(node))
    }
    for name, node in functions.items():
        named = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        if name not in seeding and not named & seeding:
            for owner, method, call in calls(node):
                if method == "sample" and owner.endswith("space") and not call.args:
                    yield owner, call


def faults_of_a_call(name: str, owner: str, method: str, call: ast.Call) -> Iterator[str]:
    is_bare = not call.args and not call.keywords
    if method in {"default_rng", "Random"} and is_bare:
        yield f"give {owner}.{method}() a seed"
    if method == "setattr" and ast.unparse(call.args[0]) == "time" and name != GUARD:
        yield "other threads use time, too; replace that of the module"
    if owner in {"os", "time"} and method in {"sched_yield", "sleep"} and name not in MAY_SLEEP:
        yield "wait by tests.loopback.eventually"
    if (owner, method) == ("grpc", "insecure_channel") and name not in MAY_SHARE_CHANNELS:
        yield "use tests.loopback.ports.plain_channel: others share failed connections to a port"
    if (owner, method) == ("sys", "_current_frames"):
        yield "it stops Python 3.11 now and then; use tests.loopback.eventually.entered"
    if owner == "signal" and method in {"alarm", "setitimer"}:
        yield "pytest-timeout has the timer; use signal.pthread_kill"


def faults(name: str, path: Path) -> Iterator[str]:
    text = path.read_text()
    tree = ast.parse(text)
    if ".sample(" in text:
        for owner, call in unseeded_samples(tree):
            yield f"{name}:{call.lineno}: call {owner}.seed(1) before {owner}.sample()"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, method = ast.unparse(node.func.value), node.func.attr
            for fault in faults_of_a_call(name, owner, method, node):
                yield f"{name}:{node.lineno}: {fault}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield f"{name}:{node.lineno}: import time, so that what sleeps is found"


def test_nothing_is_left_to_luck() -> None:
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}

    assert [fault for name in sorted(paths) for fault in faults(name, paths[name])] == []
