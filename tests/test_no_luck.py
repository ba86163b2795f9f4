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


def calls(path: Path) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each call of a method: the last name of what it is called on, and its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func.value).rpartition(".")[2], node.func.attr, node


def faults(name: str, path: Path) -> Iterator[str]:
    found = list(calls(path))
    seeded = {owner for owner, method, _ in found if method == "seed"}
    for owner, method, call in found:
        is_bare = not call.args and not call.keywords
        if method == "sample" and is_bare and owner.endswith("space") and owner not in seeded:
            yield f"{name}:{call.lineno}: call {owner}.seed(1) before {owner}.sample()"
        if method in {"default_rng", "Random"} and is_bare:
            yield f"{name}:{call.lineno}: give {owner}.{method}() a seed"
        if owner in {"os", "time"} and method in {"sched_yield", "sleep"} and name not in MAY_SLEEP:
            yield f"{name}:{call.lineno}: wait by tests.loopback.eventually"


def test_nothing_is_left_to_luck() -> None:
    paths = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}

    assert [fault for name in sorted(paths) for fault in faults(name, paths[name])] == []
