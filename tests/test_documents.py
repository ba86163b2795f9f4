"""What documents say of the code is true: names, imports, keyword arguments, flags, metrics, links.

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

from docs import refresh
from rlmesh_ray.cli.main import app
from rlmesh_ray.server.observe.statistics import ALL_METRICS

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
            if re.search(r'"lines of \S+" -->\n$', text[: found.start()]):
                continue  # of a program below, without its imports
            code = re.sub(f"^{found[1]}", "", found[2], flags=re.MULTILINE)
            yield f"{name}:{text[: found.start()].count(chr(10)) + 1}", code


BLOCKS = dict(blocks())


def test_the_readme_is_short() -> None:
    lines = PAGES["README.md"].splitlines()

    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_links_to_exists(name: str) -> None:
    links = re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)|(?:src|srcset)=\"([^\"]+)", PAGES[name]
    )

    for path, anchor, picture in links:
        target = (ROOT / name).parent / (path or picture) if path or picture else ROOT / name
        assert target.exists(), path or picture
        assert not anchor or anchor in anchors(target), anchor


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith("/index.md")])
def test_an_index_links_to_every_page_and_folder_next_to_it(name: str) -> None:
    folder = (ROOT / name).parent
    siblings = {path.name for path in folder.glob("*.md")} - {"index.md"}
    siblings |= {path.parent.name for path in folder.glob("*/index.md")}

    assert siblings <= set(re.findall(r"\]\(([\w.]+)", PAGES[name]))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_plain_markdown(name: str) -> None:
    prose = re.sub(r"^ *```[\w]*\n.*?^ *```$", "", PAGES[name], flags=re.MULTILINE | re.DOTALL)

    assert re.findall(r"```\{.*|:::.*|\{\w+\}`|^: .*|^\(.*\)=$", prose, re.MULTILINE) == []


def test_code_numbers_and_lists_in_pages_are_those_of_the_code() -> None:
    stale = [str(path.relative_to(ROOT)) for path in refresh.stale()]

    assert stale == [], "run: python -m docs.refresh"


def test_a_page_gets_the_values_that_the_code_has() -> None:
    page = "`0`<!-- = rlmesh_ray.watch.live.PICTURES_PER_S --> and 0<!-- = math.pi -->"

    assert refresh.refreshed(page) == (
        "`5`<!-- = rlmesh_ray.watch.live.PICTURES_PER_S --> and 3.14159<!-- = math.pi -->"
    )


def test_a_page_gets_lines_of_a_program() -> None:
    begin = "<!-- refresh: program examples/two_agents.py: def _seen ... return -->"
    page = f"{begin}\nold\n<!-- refreshed -->"

    assert refresh.refreshed(page).splitlines()[2:-2] == [
        '<!-- skip: next "lines of examples/two_agents.py" -->',
        "```python",
        "def _seen(self) -> dict[str, Any]:",
        '    seen = {"scout": self.distance, "carrier": np.sign(self.distance)}',
        "```",
    ]
    with pytest.raises(ValueError, match="no line with 'def seen'"):
        refresh.refreshed(page.replace("_seen", "seen"))


def test_what_a_page_says_of_an_event_stays_and_a_new_one_is_marked() -> None:
    page = "<!-- refresh: log-events -->\n| `stopped` | The \\| end. | |\n<!-- refreshed -->"
    lines = refresh.refreshed(page).splitlines()

    assert "| `stopped` | The \\| end. | `address` |" in lines
    assert [line for line in lines if line.startswith("| `serving` | ? |")]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_describes_what_the_code_has(name: str) -> None:
    assert [line for line in PAGES[name].splitlines() if "| ? |" in line] == []


def test_the_reference_has_every_public_name() -> None:
    described = set(re.findall(r"^### (\w+)$", PAGES["docs/reference/api.md"], re.MULTILINE))

    assert {name.rpartition(".")[2] for name in PUBLIC_NAMES} <= described


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
PUBLIC_NAMES = set(refresh.public_names())


@pytest.mark.parametrize("place", [*BLOCKS, *EXAMPLES])
def test_a_document_imports_what_a_public_module_exports(place: str) -> None:
    tree = ast.parse({**BLOCKS, **EXAMPLES}[place])
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if str(node.module).split(".")[0] == "rlmesh_ray"]

    for node in ours:
        assert {f"{node.module}.{alias.name}" for alias in node.names} <= PUBLIC_NAMES


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


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/reference/")])
def test_a_flag_that_the_reference_names_is_one_of_a_command(name: str) -> None:
    flags = set().union(*COMMANDS.values()) | {"--debug", "--help", "--json", "--version"}

    assert set(re.findall(r"`(--[a-z][\w-]*)", PAGES[name])) <= flags


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
