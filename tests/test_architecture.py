"""The dependency rules of the package, checked from its import statements."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_SERVER = {
    "compat/grpc",
    "errors",
    "options",
    "spaces",
    "protocol",
    "auth",
    "wire",
    "envs",
    "models",
    "polling",
    "histogram",
    "grpc_setup",
    "transport",
    "dialects/registry",
}
_CLIENT = {
    "compat/grpc",
    "errors",
    "options",
    "spaces",
    "protocol",
    "auth",
    "wire",
    "polling",
    "grpc_setup",
    "transport",
    "dialects/registry",
}
_RLLIB = {
    "compat/rllib",
    "compat/ray",
    "errors",
    "files",
    "options",
    "spaces",
    "protocol",
    "auth",
    "wire",
    "server",
    "client",
    "actors",
    "models",
    "polling",
    "dialects/registry",
}

# room -> (what of rlmesh_ray it may import, which heavy third parties). A room is a module or a
# folder, and may import itself; of two rooms that hold a module, the inner one has the rule.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "options": ({"errors"}, set()),
    "files": (set(), set()),
    "polling": ({"errors", "options"}, set()),
    "histogram": (set(), set()),
    "grpc_setup": ({"errors", "options"}, {"grpc"}),
    "compat": (set(), set()),
    "compat/grpc": ({"grpc_setup", "compat/single_threaded_call"}, set()),
    "compat/single_threaded_call": ({"grpc_setup"}, {"grpc"}),
    "compat/ray": (set(), set()),
    "compat/rllib": (set(), {"ray"}),
    "spaces": ({"errors", "files"}, {"gymnasium"}),
    "protocol": ({"errors", "dialects/registry"}, set()),
    "auth": ({"errors", "files", "protocol", "grpc_setup"}, set()),
    "wire": ({"errors", "spaces", "protocol"}, set()),
    "envs": (
        {"errors", "options", "spaces", "protocol", "wire", "polling", "histogram", "transport"},
        {"gymnasium"},
    ),
    "transport": (
        {"errors", "options", "histogram", "spaces", "protocol", "wire", "polling"},
        {"asyncio"},
    ),
    "models": (
        {"errors", "files", "options", "spaces", "protocol", "wire/rlmesh_v1/specs"},
        {"torch"},
    ),
    "server": (_SERVER | {"recording"}, {"asyncio"}),
    "client": (_CLIENT, {"asyncio", "gymnasium"}),
    "sb3": ({"errors", "spaces", "client"}, {"stable_baselines3"}),
    "evaluation": (
        {"errors", "options", "spaces", "protocol", "auth", "client", "recording"},
        {"asyncio", "gymnasium"},
    ),
    "recording": (
        {"errors", "files", "options", "spaces", "wire/rlmesh_v1/specs", "envs"},
        {"gymnasium"},
    ),
    "recording/rllib_episodes": (
        {"compat/rllib", "errors", "options", "spaces", "recording", "rllib/config/rollout_plan"},
        {"ray"},
    ),
    "actors": (_SERVER | {"client", "server", "evaluation", "compat/ray"}, {"asyncio", "ray"}),
    "rllib": (_RLLIB, {"gymnasium", "ray", "torch"}),
    "compliance": ({"errors", "spaces", "protocol", "wire", "client"}, set()),
    "cli": (
        _SERVER
        | {
            "files",
            "client",
            "server",
            "actors",
            "rllib",
            "compliance",
            "evaluation",
            "recording",
            "watch",
        },
        {"ray"},
    ),
    "watch": (
        {"errors", "files", "protocol", "auth", "server", "client", "recording"},
        {"asyncio"},
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
    "dialects": ({"errors", "options", "protocol/capabilities"}, set()),
}
# Public names of a room that a dialect defines.
REEXPORTS = {"rlmesh_ray/rllib/__init__.py": {"dialects/rllink/runner"}}

# A dialect is built as the core is: each layer of it may import what the core's layer may, that
# layer itself, and these layers of its own dialect. No server knows a client, or a client a server.
_DIALECT_LAYERS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "protocol": ({"errors", "protocol"}, set(), set()),
    "wire": ({"errors", "spaces", "protocol", "wire"}, {"protocol"}, set()),
    "server": (_SERVER | {"server"}, {"protocol", "wire"}, {"asyncio"}),
    "client": (_CLIENT | {"client", "models/onnx"}, {"protocol", "wire"}, {"asyncio", "gymnasium"}),
    "runner": (_RLLIB | {"rllib"}, {"server", "wire"}, {"gymnasium", "ray", "torch"}),
}
DIALECTS = sorted(
    path.name
    for path in (ROOT / "rlmesh_ray" / "dialects").iterdir()
    if path.is_dir() and path.name != "__pycache__"
)
for _dialect in DIALECTS:
    for _layer, (_core, _own, _heavy) in _DIALECT_LAYERS.items():
        RULES[f"dialects/{_dialect}/{_layer}"] = (
            _core | {f"dialects/{_dialect}/{each}" for each in _own},
            _heavy,
        )

HEAVY = {"asyncio", "grpc", "gymnasium", "ray", "stable_baselines3", "torch"}
# These may import what their room may not; they are loaded inside functions only.
LAZY_MODULES = {
    "compat/single_threaded_call.py": set(),
    "models/rllib/checkpoint.py": {"ray"},
    "models/rllib/fast_path.py": {"ray"},
    "models/rllib/forward.py": {"ray"},
    "models/rllib/checkpoint_policy.py": {"ray"},
}
IO = {"logging", "os", "random", "select", "socket", "subprocess", "threading", "time"}
STANDARD_LIBRARY_ONLY = {"grpc", "gymnasium", "numpy", "google", "cloudpickle", "PIL", "rich"}


@functools.cache
def room_of(name: str) -> str:
    """Return the innermost room of a module, given its name below the package, as a path."""
    rooms = [room for room in RULES if f"{name}/".startswith(f"{room}/")]
    assert rooms, f"no rule for {name}"
    return max(rooms, key=len)


@functools.cache
def product_modules() -> dict[str, Path]:
    """Return each module by its name below rlmesh_ray, or that of actors, as a path."""
    found = {}
    for folder, above in (("rlmesh_ray", ROOT / "rlmesh_ray"), ("actors", ROOT)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(above).with_suffix("").as_posix().removesuffix("/__init__")
            if "_pb" not in path.parts and name != "__init__":
                found[name] = path
    return found


def modules(room: str) -> list[Path]:
    return [path for name, path in product_modules().items() if room_of(name) == room]


@functools.cache
def import_statements(path: Path) -> tuple[list[ast.Import | ast.ImportFrom], set[str]]:
    """Return all imports of a module, and what importing the module imports at once."""
    tree = ast.parse(path.read_text())
    at_once = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            at_once |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            at_once.add(node.module or "")
    nodes = ast.walk(tree)
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)], at_once


def imports(room: str) -> Iterator[tuple[Path, list[str]]]:
    for path in modules(room):
        for node in import_statements(path)[0]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name.split(".")
            else:
                assert node.level == 0, f"{path}: relative import"
                module = (node.module or "").split(".")
                for alias in node.names:
                    yield path, [*module, alias.name]


def is_within(name: str, rooms: set[str]) -> bool:
    return any(f"{name}/".startswith(f"{room}/") for room in rooms)


@pytest.mark.parametrize("room", RULES)
def test_room_imports_only_what_it_may(room: str) -> None:
    ours, third_party = RULES[room]

    for path, (top, *rest) in imports(room):
        if top == "rlmesh_ray" and rest and rest != ["__version__"]:
            name = "/".join(rest)
            own = {room} | REEXPORTS.get(path.relative_to(ROOT).as_posix(), set())
            assert is_within(name, ours | own), f"{path} imports rlmesh_ray.{'.'.join(rest)}"
        assert top not in {"benchmarks", "tests"}, f"{path} imports {top}, which is not installed"
        if top in HEAVY:
            name = path.relative_to(ROOT).as_posix().removeprefix("rlmesh_ray/")
            allowed = third_party | LAZY_MODULES.get(name, set())
            assert top in allowed, f"{path} imports {top}"


# A runner and its ways of sampling know each other.
IN_CIRCLES = ("rllib/runner/",)


def test_imports_have_no_circle() -> None:
    """Imports inside functions count, too."""
    modules, folders = graphlib.TopologicalSorter[str](), graphlib.TopologicalSorter[str]()
    names = product_modules()
    for name, path in names.items():
        folder = name.rpartition("/")[0]
        for node in import_statements(path)[0]:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            module = node.module.removeprefix("rlmesh_ray.").replace(".", "/")
            for each in {module, *(f"{module}/{alias.name}" for alias in node.names)} & set(names):
                if each != name and not name.startswith(IN_CIRCLES):
                    modules.add(name, each)
                if folder != each.rpartition("/")[0] and name.startswith(("server/", "client/")):
                    folders.add(folder, each.rpartition("/")[0])

    modules.prepare()
    folders.prepare()


def legs_of_walks() -> dict[str, list[str]]:
    """Return the files of each table in ARCHITECTURE.md whose first column is ``file``."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tables = re.findall(
        r"^### (.+)\n(?:.*\n)*?\| file \|.*\n\|---\|---\|\n((?:\| `.+\n)+)", text, re.M
    )
    return {leg: re.findall(r"^\| `([\w/.]+)`", rows, re.M) for leg, rows in tables}


def test_the_walks_have_a_table_for_each_process() -> None:
    assert len(legs_of_walks()) == 5


@pytest.mark.parametrize("leg", legs_of_walks())
def test_each_file_of_a_walk_is_imported_by_one_before_it(leg: str) -> None:
    names = {f"{name}.py": path for name, path in product_modules().items()}
    files = legs_of_walks()[leg]
    assert len(files) == len(set(files))
    reached = set(files[:1])

    for file in files:
        assert file in names, f"{file} does not exist"
        assert file in reached, f"no file before {file} imports it"
        for node in import_statements(names[file])[0]:
            if isinstance(node, ast.ImportFrom) and node.module:
                module = node.module.removeprefix("rlmesh_ray.").replace(".", "/")
                reached |= {
                    f"{each}.py"
                    for each in (module, *(f"{module}/{alias.name}" for alias in node.names))
                }


@pytest.mark.parametrize("lazy", LAZY_MODULES)
def test_modules_with_heavy_imports_are_loaded_on_demand_only(lazy: str) -> None:
    module = f"rlmesh_ray.{lazy.removesuffix('.py').replace('/', '.')}"

    for name, path in product_modules().items():
        if f"{name}.py" in LAZY_MODULES or LAZY_MODULES[lazy] <= RULES[room_of(name)][1]:
            continue  # has loaded what is heavy already
        assert module not in import_statements(path)[1], f"{path} imports {module} at once"


def test_private_parts_of_grpc_ray_and_rllib_are_used_in_compat_alone() -> None:
    kept = [path for name, path in product_modules().items() if is_within(name, {"compat"})]
    docstrings = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in kept]
    names = set(re.findall(r"``(_\w+)``", " ".join(docstrings)))
    assert "_cython_call" in names
    assert "_del_hanging" in names

    for path in product_modules().values():
        if path in kept:
            continue
        used = {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.Constant)
        }
        for node in import_statements(path)[0]:
            aliases = [alias.name for alias in node.names]
            modules = aliases if isinstance(node, ast.Import) else [node.module or ""]
            if {each.partition(".")[0] for each in modules} & {"grpc", "ray"}:
                parts = ".".join([*modules, *aliases]).split(".")
                used |= {part for part in parts if part[0] == "_"}
                names |= {part for part in parts if part[0] == "_"}
        found = {each for each in used if isinstance(each, str)} & names
        assert not found, f"{path} uses {found}"


SANS_IO = [
    "errors",
    "spaces",
    "protocol",
    "wire",
    *(f"dialects/{dialect}/{layer}" for dialect in DIALECTS for layer in ("protocol", "wire")),
]


@pytest.mark.parametrize("room", SANS_IO)
def test_core_does_no_io(room: str) -> None:
    for path, (top, *_) in imports(room):
        assert top not in IO, f"{path} imports {top}"


@pytest.mark.parametrize(
    "room", ["errors", "protocol", *(f"dialects/{dialect}/protocol" for dialect in DIALECTS)]
)
def test_the_heart_needs_only_the_standard_library(room: str) -> None:
    for path, (top, *_) in imports(room):
        assert top not in STANDARD_LIBRARY_ONLY, f"{path} imports {top}"


def test_every_module_has_a_rule() -> None:
    for name in product_modules():
        room_of(name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_is_built_in_the_layers_that_have_rules(dialect: str) -> None:
    folder = ROOT / "rlmesh_ray" / "dialects" / dialect
    layers = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}

    assert layers <= set(_DIALECT_LAYERS)


UNIT_TESTS = sorted((ROOT / "tests" / "unit").rglob("test_*.py"))


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_a_unit_test_stands_where_its_module_stands_and_begins_with_its_name(path: Path) -> None:
    folder = path.parent.relative_to(ROOT / "tests" / "unit")
    package = ROOT if folder.parts[:1] == ("actors",) else ROOT / "rlmesh_ray"
    room = package / folder
    name = path.stem.removeprefix("test_")

    assert room.is_dir(), f"there is no {room.relative_to(ROOT)}"
    modules = {each.stem for each in room.iterdir() if each.suffix in {"", ".py"}}
    names = (modules - {"__init__", "__pycache__"}) | {room.name}  # the room's name: all of it
    assert any(f"{name}_".startswith(f"{each}_") for each in names), (
        f"no module of {room.relative_to(ROOT)} has a name that {path.name} begins with"
    )
