"""The dependency rules of the package, checked from its import statements."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# part -> (parts of rlmesh_ray it may import, heavy third parties it may import)
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "options": ({"errors"}, set()),
    "waiting": ({"errors", "options"}, set()),
    "histogram": (set(), set()),
    "rpc": (set(), {"grpc"}),
    "spaces": ({"errors"}, {"gymnasium"}),
    "protocol": ({"errors"}, set()),
    "credentials": ({"errors", "protocol"}, set()),
    "wire": ({"errors", "spaces", "protocol"}, set()),
    "envs": (
        {"errors", "options", "spaces", "protocol", "wire", "waiting", "histogram", "transport"},
        {"gymnasium"},
    ),
    "transport": (
        {"errors", "options", "histogram", "spaces", "protocol", "wire", "waiting"},
        {"asyncio"},
    ),
    "models": ({"errors", "spaces", "protocol"}, {"torch"}),
    "server": (
        {
            "errors",
            "options",
            "spaces",
            "protocol",
            "credentials",
            "wire",
            "envs",
            "models",
            "waiting",
            "histogram",
            "rpc",
            "transport",
        },
        {"asyncio"},
    ),
    "client": (
        {
            "errors",
            "options",
            "spaces",
            "protocol",
            "credentials",
            "wire",
            "waiting",
            "rpc",
            "transport",
        },
        {"asyncio", "gymnasium"},
    ),
    "sb3": ({"errors", "spaces", "client"}, {"stable_baselines3"}),
    "actors": (
        {
            "errors",
            "options",
            "spaces",
            "protocol",
            "credentials",
            "client",
            "server",
            "envs",
            "models",
            "histogram",
        },
        {"asyncio", "ray"},
    ),
    "rllib": (
        {
            "errors",
            "options",
            "spaces",
            "protocol",
            "credentials",
            "wire",
            "server",
            "client",
            "actors",
            "models",
            "waiting",
        },
        {"gymnasium", "ray", "torch"},
    ),
    "compliance": ({"errors", "spaces", "protocol", "wire", "client"}, set()),
    "cli": (
        {
            "errors",
            "options",
            "histogram",
            "spaces",
            "protocol",
            "credentials",
            "envs",
            "client",
            "server",
            "models",
            "actors",
            "rllib",
            "compliance",
        },
        {"ray"},
    ),
    "testing": (
        {
            "errors",
            "spaces",
            "protocol",
            "wire",
            "envs",
            "models",
            "server",
            "client",
            "compliance",
        },
        {"gymnasium", "grpc"},
    ),
    "__main__": ({"cli"}, set()),
}
HEAVY = {"asyncio", "grpc", "gymnasium", "ray", "stable_baselines3", "torch"}
# These may import what their room may not; nobody loads them but inside functions.
LAZY_MODULES = {
    ("client", "direct_call.py"): {"grpc"},
    ("models", "rllib_actors.py"): {"ray"},
    ("models", "rllib_bare_forward.py"): {"ray"},
    ("models", "rllib_checkpoint.py"): {"ray"},
    ("models", "rllib_drawing.py"): {"ray"},
    ("models", "rllib_forward.py"): {"ray"},
    ("models", "rllib_policy.py"): {"ray"},
}
IO = {"logging", "os", "random", "select", "socket", "subprocess", "threading", "time"}
STANDARD_LIBRARY_ONLY = {"grpc", "gymnasium", "numpy", "google", "cloudpickle", "PIL", "rich"}


def modules(part: str) -> list[Path]:
    if part == "actors":
        return sorted((ROOT / "actors").rglob("*.py"))
    single = ROOT / "rlmesh_ray" / f"{part}.py"
    package = ROOT / "rlmesh_ray" / part
    return [single] if single.exists() else sorted(package.rglob("*.py"))


def imports(part: str) -> Iterator[tuple[Path, list[str]]]:
    for path in modules(part):
        if "_pb" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name.split(".")
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield path, (node.module or "").split(".")


def top_level_imports(path: Path) -> set[str]:
    """What importing the module imports at once."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("part", RULES)
def test_part_imports_only_what_it_may(part: str) -> None:
    ours, third_party = RULES[part]

    for path, (top, *rest) in imports(part):
        if top == "rlmesh_ray" and rest:
            assert rest[0] in ours | {part}, f"{path} imports rlmesh_ray.{rest[0]}"
        assert top not in {"benchmarks", "tests"}, f"{path} imports {top}, which is not installed"
        if top in HEAVY:
            allowed = third_party | LAZY_MODULES.get((part, path.name), set())
            assert top in allowed, f"{path} imports {top}"


@pytest.mark.parametrize(("part", "name"), LAZY_MODULES)
def test_modules_with_heavy_imports_are_loaded_on_demand_only(part: str, name: str) -> None:
    module = f"rlmesh_ray.{part}.{name.removesuffix('.py')}"

    heavy = LAZY_MODULES[part, name]
    lazy = {ROOT / "rlmesh_ray" / part / name for part, name in LAZY_MODULES}
    for path in set((ROOT / "rlmesh_ray").rglob("*.py")) - lazy:
        room = path.relative_to(ROOT / "rlmesh_ray").parts[0].removesuffix(".py")
        if room in RULES and heavy <= RULES[room][1]:
            continue  # whoever loads it has loaded that already
        assert module not in top_level_imports(path), f"{path} imports {module} at once"


@pytest.mark.parametrize("part", ["errors", "spaces", "protocol", "wire"])
def test_core_does_no_io(part: str) -> None:
    for path, (top, *_) in imports(part):
        assert top not in IO, f"{path} imports {top}"


@pytest.mark.parametrize("part", ["errors", "protocol"])
def test_the_heart_needs_only_the_standard_library(part: str) -> None:
    for path, (top, *_) in imports(part):
        assert top not in STANDARD_LIBRARY_ONLY, f"{path} imports {top}"


def test_every_part_has_a_rule() -> None:
    parts = {p.stem for p in (ROOT / "rlmesh_ray").iterdir() if p.suffix in {"", ".py"}}

    assert parts - {"__init__", "__pycache__"} == set(RULES)
