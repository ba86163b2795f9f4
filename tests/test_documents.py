"""What documents say of the code is true: names, imports, keyword arguments, flags, metrics.

``tests/test_shown_blocks.py`` runs their blocks.
"""

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from rlmesh_ray.cli.main import app
from rlmesh_ray.server.metrics import ALL_METRICS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "CHANGELOG.md"
}


def blocks() -> Iterator[tuple[str, str]]:
    """Where each Python block of a page stands, and the block."""
    for name, text in PAGES.items():
        for found in BLOCK.finditer(text):
            code = re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE)
            yield f"{name}:{text[: found.start()].count(chr(10)) + 1}", code


BLOCKS = dict(blocks())


def test_the_readme_is_short() -> None:
    lines = PAGES["README.md"].splitlines()

    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_what_a_page_of_the_root_links_to_exists(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[name])

    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("place", BLOCKS)
def test_a_block_names_nothing_that_it_has_not_made_or_imported(place: str) -> None:
    nodes = list(ast.walk(ast.parse(BLOCKS[place])))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.alias):
            made.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)

    assert {node.id for node in names} - made - set(dir(builtins)) == set()


EXAMPLES = {
    f"{path.relative_to(ROOT)}": path.read_text() for path in (ROOT / "examples").glob("*.py")
}
PUBLIC = ("", ".actors", ".errors", ".models", ".recording", ".rllib", ".sb3", ".testing")


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

    _, _, rest = PAGES["docs/reference/events.md"].partition("```{log-events}\n")
    assert set(re.findall(r"^(\w+): ", rest.partition("```")[0], re.MULTILINE)) == logged


@pytest.mark.parametrize("name", PAGES)
def test_the_files_of_the_package_that_a_page_names_are_there(name: str) -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGES[name]))

    assert {
        path for path in named if not any((ROOT / at / path).exists() for at in ("", "rlmesh_ray"))
    } == set()


COMMANDS = {
    name: {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    for name, command in typer.main.get_group(app).commands.items()
}
METRICS = {metric.exported for metric in ALL_METRICS}


def shown_commands(text: str) -> Iterator[tuple[str, set[str]]]:
    """Return the commands of ``rlmesh-ray`` in a page or a docstring, with their flags."""
    for command, rest in re.findall(
        r"\brlmesh-ray ([\w-]+)((?:[^`\n]|\\\n)*)", re.sub(r"\\\n\s*", "", text)
    ):
        yield command, set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest.split("#")[0]))


@pytest.mark.parametrize("name", [*PAGES, *EXAMPLES])
def test_a_command_that_is_shown_has_its_flags(name: str) -> None:
    for command, flags in shown_commands({**PAGES, **EXAMPLES}[name]):
        if command in COMMANDS:
            assert flags - {"--help"} <= COMMANDS[command], command


@pytest.mark.parametrize("name", PAGES)
def test_a_metric_that_is_named_is_exported(name: str) -> None:
    named = set(re.findall(r"`(rlmesh_ray_\w+)`", PAGES[name]))

    assert named <= METRICS


CALLABLES = {
    name: getattr(importlib.import_module(f"rlmesh_ray{module}"), name)
    for module in ("", ".actors", ".rllib")
    for name in importlib.import_module(f"rlmesh_ray{module}").__all__
}


@pytest.mark.parametrize("name", PAGES)
def test_a_call_that_is_shown_has_its_parameters(name: str) -> None:
    shown = re.findall(r"`((?:[\w.]+\.)?\w+\([^`\n]*\))`", PAGES[name])
    programs = [code for place, code in BLOCKS.items() if place.startswith(f"{name}:")]

    for code in [*(call.replace("…", "...") for call in shown), *programs]:
        for node in ast.walk(parsed(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                keywords = {keyword.arg for keyword in node.keywords}
                if node.func.id in CALLABLES and None not in keywords:
                    parameters = inspect.signature(CALLABLES[node.func.id]).parameters
                    assert keywords <= set(parameters), code


def parsed(code: str) -> ast.Module:
    """Parse code, or nothing where it is no Python, such as a call with its arguments left out."""
    try:
        return ast.parse(code)
    except SyntaxError:
        return ast.Module([], [])
