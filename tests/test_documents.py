"""The Python blocks of README.md and CLUSTERS.md are whole programs, which run on two CPUs."""

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TWO_CPUS = """
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
"""


def blocks() -> Iterator[tuple[str, str]]:
    """Where each block stands, and the block."""
    for name in ("README.md", "CLUSTERS.md"):
        text = (ROOT / name).read_text()
        for found in BLOCK.finditer(text):
            yield f"{name}:{text[: found.start()].count(chr(10)) + 1}", found[1]


BLOCKS = dict(blocks())
# The others dial a server, or serve what `make demo` has trained.
BY_THEMSELVES = [
    place
    for place, code in BLOCKS.items()
    if re.search(r"EnvFleet\(|save_to_path", code) and "build_algo" in code
]


@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_names_nothing_that_it_has_not_made_or_imported(place: str) -> None:
    names = [node for node in ast.walk(ast.parse(BLOCKS[place])) if isinstance(node, ast.Name)]
    imports = [node for node in ast.walk(ast.parse(BLOCKS[place])) if isinstance(node, ast.alias)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.asname or node.name.split(".")[0] for node in imports}

    assert {node.id for node in names} - made - set(dir(builtins)) == set()


EXAMPLES = {
    f"{path.relative_to(ROOT)}": path.read_text() for path in (ROOT / "examples").glob("*.py")
}
PUBLIC = ("", ".actors", ".errors", ".models", ".rllib", ".sb3", ".testing")


def public_names(module: str) -> set[str]:
    """What a module exports: its ``__all__``, or the names of its classes if it has none."""
    inner = module.removeprefix("rlmesh_ray").strip(".")
    folder = ROOT / "actors" if inner == "actors" else ROOT / "rlmesh_ray" / inner
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    body = ast.parse(file.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("place", [*BLOCKS, *EXAMPLES])
def test_a_document_imports_what_a_public_module_exports(place: str) -> None:
    tree = ast.parse({**BLOCKS, **EXAMPLES}[place])
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).split(".")[0] == "rlmesh_ray"]

    for node in ours:
        module = str(node.module)
        assert module.removeprefix("rlmesh_ray") in PUBLIC
        assert {alias.name for alias in node.names} <= public_names(module)


def test_the_events_of_the_log_are_listed() -> None:
    calls = re.compile(r"(?<!\.)\bfacts\(\s*\"(\w+)\"")
    code = [*(ROOT / "rlmesh_ray").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]
    logged = {event for path in code for event in calls.findall(path.read_text())}

    _, _, section = (ROOT / "CLUSTERS.md").read_text().partition("**In the log.**")
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == logged


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute, where nothing else keeps the cores busy
@pytest.mark.parametrize("place", BY_THEMSELVES)
def test_a_block_runs_on_two_cpus(place: str, tmp_path: Path) -> None:
    code = BLOCKS[place].replace("/tmp/untrained", str(tmp_path / "untrained"))
    program = tmp_path / "block.py"
    program.write_text(TWO_CPUS + code)

    subprocess.run([sys.executable, str(program)], check=True, timeout=580, cwd=tmp_path)
