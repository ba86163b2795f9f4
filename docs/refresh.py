"""Rewrites what the documents say of the code: ``python -m docs.refresh``.

With ``--check`` it writes nothing, names what is out of date and exits with 1. It writes

* what stands between ``<!-- refresh: PART WORDS -->`` and ``<!-- refreshed -->``, by the function
  that ``PARTS`` has for it;
* a value in front of ``<!-- = full.name -->``, as the code has it;
* ``docs/_static/NAME.svg`` from ``NAME.dot``, which takes Graphviz.
"""

import ast
import hashlib
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import EnumType
from functools import cache, cached_property
from itertools import chain, pairwise, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from sphinx.ext.autodoc.mock import mock  # type: ignore[attr-defined]

from rlmesh_ray import errors
from rlmesh_ray.cli.main import app as command_line
from rlmesh_ray.compliance.checks import SECTIONS, Clause, Party
from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS
from rlmesh_ray.server.observe.statistics import ALL_METRICS

ROOT = Path(__file__).parents[1]
_TESTING = ("catch", "envs", "equality", "probe_env", "strategies")
PUBLIC_MODULES = (
    "rlmesh_ray",
    "rlmesh_ray.actors",
    "rlmesh_ray.errors",
    "rlmesh_ray.models",
    "rlmesh_ray.recording",
    "rlmesh_ray.rllib",
    "rlmesh_ray.sb3",
    *(f"rlmesh_ray.testing.{name}" for name in _TESTING),
)
NOT_INSTALLED = ["stable_baselines3"]
"""What a public module needs, and the development environment lacks."""
PART = re.compile(r"(<!-- refresh: ([\w-]+)\s*(.*?)\s*-->\n)(.*?)(<!-- refreshed -->)", re.DOTALL)
_VALUE = re.compile(r"(`?)[^\s`|]+(`?<!-- = ([\w.]+) -->)")
AUTODOC = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:(?: .*)?\n)*)", re.MULTILINE)
"""A directive of Sphinx's autodoc: kind, full name, options."""


# Reading the code


def public_names() -> Iterator[str]:
    """Yield the full name of everything that a public module exports."""
    for module_name in PUBLIC_MODULES:
        module = _module(module_name)
        own = (
            name
            for name, value in vars(module).items()
            if _is_public(name, value) and value.__module__ == module_name
        )
        for name in getattr(module, "__all__", own):
            yield f"{module_name}.{name}"


def _is_public(name: str, value: Any) -> bool:
    """Return whether a module without ``__all__`` exports it: a class, or a helper for tests."""
    if inspect.isclass(value):
        return True
    is_helper = inspect.isfunction(value) and value.__module__.startswith("rlmesh_ray.testing.")
    return is_helper and not name.startswith("_")


def _module(name: str) -> ModuleType:
    """Import a module; what it needs and is not installed is made up, for this import alone."""
    with mock(NOT_INSTALLED):
        module = importlib.import_module(name)
    if name == "rlmesh_ray.sb3":
        del sys.modules[name]
    return module


def value_of(name: str) -> Any:
    """Return what has the full name ``name``; raises AttributeError where nothing has."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = _module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def documented(name: str) -> Any:
    """Return what has this full name; for an actor class of Ray the class that it was made from."""
    value = value_of(name)
    actor = getattr(value, "__ray_metadata__", None)
    return actor.modified_class.__mro__[1] if actor else value


def docstring(name: str) -> str:
    """Return the docstring of what has this full name, or the one below its assignment."""
    value = documented(name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.cleandoc(value.__doc__ or "")
    found = {target: text for target, _, text in _assigned(_source(name, value))}
    return found[name.rpartition(".")[2]]


def _source(name: str, value: Any) -> Path:
    """Return the file that defines a value."""
    module = _module(getattr(value, "__module__", name.rpartition(".")[0]))
    return Path(str(module.__file__))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _calls(folders: Iterable[str], function: str) -> Iterator[tuple[Path, ast.Call]]:
    """Yield the calls of a function, or method, of that name whose first argument is text."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(_tree(path)):
                if isinstance(node, ast.Call) and node.args and _texts(node.args[0]):
                    called = node.func
                    name = called.attr if isinstance(called, ast.Attribute) else None
                    if function in (name, getattr(called, "id", None)):
                        yield path, node


def _texts(node: ast.expr | None) -> list[str]:
    """Return the text of a literal, or both of a choice between two."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


_COMMAND_OF = {
    "console": "any",
    "evaluate": "evaluate, compare",
    "local_ray": "train, evaluate",
    "main": "any",
    "register_with_pool": "serve-env, register",
    "common": "serve-env, serve-model, pool",
    "serve_loop": "serve-env, serve-model",
}
"""The commands that report the events of a module; the others have the name of their command."""


def _json_events() -> dict[str, list[str]]:
    """Return the keys of each event of ``--json``, by ``command: event``."""
    found: dict[str, list[str]] = {}
    for path, call in _calls(("rlmesh_ray/cli",), "event"):
        command = _COMMAND_OF.get(path.stem, path.stem.replace("_", "-"))
        _add(found, call, f"{command}/")
    return dict(sorted(found.items()))


def _log_events() -> dict[str, list[str]]:
    """Return the facts of each event of the log."""
    found: dict[str, list[str]] = {}
    for _, call in _calls(("rlmesh_ray/server", "rlmesh_ray/dialects", "actors"), "facts"):
        _add(found, call, "")
    return found


def _add(found: dict[str, list[str]], call: ast.Call, prefix: str) -> None:
    for event in _texts(call.args[0]):
        keys = found.setdefault(prefix + event, [])
        keys += [word.arg for word in call.keywords if word.arg and word.arg not in keys]


def _assigned(path: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield the names of a module that have docstrings, with their values, if they are texts."""
    for node, following in pairwise(_tree(path).body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            for text in _texts(following.value):
                yield ast.unparse(target), _texts(node.value), inspect.cleandoc(text)


def _documented_constants(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the values of constants whose docstring begins with ``prefix``, and its rest."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for _, values, text in _assigned(path):
            for value in values:
                if text.startswith(prefix):
                    yield value, " ".join(text[len(prefix) :].split())


def _commands() -> dict[str, Any]:
    return dict(typer.main.get_group(command_line).commands)


# Markdown


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


def _described(
    head: Sequence[str], rows: Iterable[Sequence[str]], old: str, *, at: int, num_keys: int = 1
) -> str:
    """Return a table whose column ``at`` is as in the old one, by the first cells; ``?`` if new."""
    lines = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in old.splitlines()]
    said = {tuple(cells[:num_keys]): cells[at] for cells in lines if len(cells) == len(head)}
    found = ([*row, said.get(tuple(map(_cell, row[:num_keys])), "?")] for row in rows)
    return _table(head, ([*row[:at], row[-1].replace("\\|", "|"), *row[at:-1]] for row in found))


def _first_line(text: str, name: str) -> str:
    # The linter requires no docstrings, since most names are for this package alone.
    if not text:
        raise ValueError(f"{name} is in the reference, and has no docstring")
    return text.partition("\n")[0].replace("``", "`")


# Parts of pages


def api(words: str, _old: str) -> str:
    """Return each name of autodoc's directives: signature, first line, where it is, its members."""
    return "\n".join(_entry(*found) for found in AUTODOC.findall(f"{words}\n"))


def _entry(kind: str, name: str, options: str) -> str:
    value = documented(name)
    source = _source(name, value).relative_to(ROOT)
    parts = [f"### {name.rpartition('.')[2]}\n"]
    if kind != "data":
        lines = textwrap.wrap(name + _signature(value), 88, subsequent_indent="    ")
        parts.append("\n".join(["```text", *lines, "```\n"]))
    parts.append(f"{_first_line(docstring(name), name)} [Source](../../{source})\n")
    if kind == "class":
        parts += _members(value if inspect.isclass(value) else type(value), options)
    return "\n".join(parts).rstrip() + "\n"


def _signature(value: Any) -> str:
    """Return the parameters and their defaults, without types."""
    if isinstance(value, EnumType) or getattr(value, "_is_protocol", False):
        return ""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # an instance; an exception with the parameters of Exception
        return "(*args)" if inspect.isclass(value) else ""
    bare = [
        each.replace(annotation=each.empty, default=_shown(each.default))
        for each in found.parameters.values()
        if each.name not in ("self", "cls", "_ray_trace_ctx")
    ]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


class _Dots:
    def __repr__(self) -> str:
        return "..."


def _shown(default: Any) -> Any:
    """Return a parameter's default, or what looks like "..." for one whose text is not code."""
    return _Dots() if "<" in repr(default) and default is not inspect.Parameter.empty else default


def _members(owner: type, options: str) -> Iterator[str]:
    """Yield the public members of a class that autodoc shows, each with its first line."""
    if isinstance(owner, EnumType):
        yield from (f"* {_code(name)}" for name in owner.__members__)
    words = dict(re.findall(r":([\w-]+): (.*)", options))
    last = words.get("inherited-members", owner.__mro__[1].__name__)
    owners = takewhile(lambda each: each.__name__ != last, owner.__mro__)
    names = words["members"].split(", ") if "members" in words else chain(*map(vars, owners))
    for name in dict.fromkeys(names):
        member = inspect.getattr_static(owner, name)
        member = getattr(member, "__func__", member)
        if name[0] != "_" and name not in words.get("exclude-members", "").split(", "):
            if inspect.isfunction(member):
                yield _member(name + _signature(member), member)
            elif isinstance(member, property | cached_property):
                yield _member(name, member)


def _member(shown: str, member: Any) -> str:
    return f"* {_code(shown)}: {_first_line(inspect.cleandoc(member.__doc__ or ''), shown)}"


def commands(_words: str, _old: str) -> str:
    """Return a section for each command of ``rlmesh-ray``, with its arguments and options."""
    return "\n".join(_command(name, command) for name, command in _commands().items())


def _command(name: str, command: Any) -> str:
    context = typer.Context(command, info_name=f"rlmesh-ray {name}")
    parts = [f"## {name}\n", f"```console\n$ {command.get_usage(context)[7:]}\n```\n", command.help]
    if command.epilog:
        examples = "\n".join(f"$ {line}" for line in command.epilog.splitlines())
        parts.append(f"\n```console\n{examples}\n```")
    groups: dict[str, list[Any]] = {}
    for param in command.get_params(context):
        is_argument = param.param_type_name == "argument"
        group = "Arguments" if is_argument else param.rich_help_panel or "Options"
        groups.setdefault(group, []).append(param)
    for group, params in groups.items():
        head = ("", "default", "meaning")
        parts.append(f"\n**{group}**\n\n{_table(head, map(_param_row, params))}")
    return "\n".join(parts) + "\n"


def _param_row(param: Any) -> list[str]:
    if param.param_type_name == "argument":
        names = _code(param.name.upper())
    else:
        value = f" {param.metavar}" if param.metavar else ""
        names = ", ".join(_code(option + value) for option in param.opts)
        names += "".join(f", {_code(option)}" for option in param.secondary_opts)
    return [names, _default(param), param.help or ""]


def _default(param: Any) -> str:
    if param.param_type_name == "argument" or param.required:
        return "required" if param.required else ""
    shown = param.show_default if isinstance(param.show_default, (str, int)) else param.default
    shown = param.default if isinstance(shown, bool) else shown
    is_said = shown not in (None, False, (), [], "")
    return _code(str(getattr(shown, "value", shown))) if is_said else ""


def error_table(_words: str, old: str) -> str:
    """Return the tree of errors, in which nested ones are indented, with the page's remedies."""
    rows = (
        [
            _link(error, depth),
            _first_line(docstring(f"{errors.__name__}.{error.__name__}"), str(error)),
        ]
        for error, depth in _errors()
    )
    return _described(("error", "cause", "what to do"), rows, old, at=2)


def _link(error: type, depth: int) -> str:
    return f"{'&nbsp;' * 3 * depth}[`{error.__name__}`](api.md#{error.__name__.lower()})"


def _errors() -> Iterator[tuple[type[Exception], int]]:
    """Yield the errors in the order of their tree, each with its depth."""
    waiting: list[tuple[type[Exception], int]]
    waiting = [(errors.ConfigurationWarning, 0), (errors.RlmeshError, 0)]
    while waiting:
        error, depth = waiting.pop()
        yield error, depth
        own = [each for each in error.__subclasses__() if each.__module__ == error.__module__]
        waiting += [(each, depth + 1) for each in reversed(own)]


def metrics(_words: str, _old: str) -> str:
    """Return what endpoints export to Prometheus."""
    return _table(
        ("name in Prometheus", "kind", "label", "meaning"),
        (
            [_code(each.exported), each.kind.name.lower(), _label(each), each.description]
            for each in ALL_METRICS
        ),
    )


def _label(metric: Any) -> str:
    return _code(metric.label) if metric.label else ""


def runner_metrics(_words: str, _old: str) -> str:
    """Return what runners add to RLlib's metrics."""
    found = [
        *_documented_constants("rlmesh_ray/rllib/runner", "Metric: "),
        *_documented_constants("rlmesh_ray/dialects/rllink/runner", "Metric: "),
    ]
    return _table(("name", "meaning"), ([_code(name), text] for name, text in found))


def json_events(_words: str, old: str) -> str:
    """Return the events of ``--json`` by command, with the page's meanings, and their keys."""
    rows = (
        [name.split("/")[0], _code(name.split("/")[1]), _keys(keys)]
        for name, keys in _json_events().items()
    )
    return _described(("command", "event", "meaning", "keys"), rows, old, at=2, num_keys=2)


def log_events(_words: str, old: str) -> str:
    """Return the events of the log, with the page's meanings, and their facts."""
    rows = ([_code(name), _keys(keys)] for name, keys in _log_events().items())
    return _described(("event", "meaning", "facts"), rows, old, at=1)


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(map(_code, keys))


def clauses(_words: str, _old: str) -> str:
    """Return the clauses of the edition, a table for each section."""
    return "\n".join(
        f"### {section}\n\n"
        + _table(
            ("clause", "binds", "what it says", "check"),
            ([_code(each.key), each.binds.value, each.says, _check(each)] for each in clauses),
        )
        for section, clauses in SECTIONS.items()
    )


def _check(clause: Clause) -> str:
    """Return the module and the words of what checks a clause."""
    if clause.binds is Party.CLIENT:
        return "tests of our client"
    check = ENV_CHECKS.get(clause.key) or MODEL_CHECKS[clause.key]
    return f"{_code(check.__module__.rpartition('.')[2])}: {check.__name__.replace('_', ' ')}"


def capabilities(_words: str, _old: str) -> str:
    """Return the capabilities of the protocol and their meanings."""
    return _table(
        ("capability", "meaning"),
        (
            [_code(name), text.replace("``", "`")]
            for name, text in _documented_constants("rlmesh_ray/protocol", "")
            if re.fullmatch(r"(rlmesh_ray|rlmesh\.model)\.[\w.]+|subset_step", name)
        ),
    )


def program(words: str, _old: str) -> str:
    """Return lines of a program: ``PATH: from the line with THIS ... to before the one with THAT``.

    Raises:
        ValueError: The program has no such lines.
    """
    path, first, last = re.split(r": | \.\.\. ", words)
    lines = (ROOT / path).read_text().splitlines()
    begin = next((at for at, line in enumerate(lines) if first in line), len(lines))
    end = next((at for at in range(begin + 1, len(lines)) if last in lines[at]), 0)
    if not end:
        raise ValueError(f"{path} has no line with {first!r} and one with {last!r} after it")
    code = textwrap.dedent("\n".join(lines[begin:end])).strip()
    return f'<!-- skip: next "lines of {path}" -->\n```python\n{code}\n```\n'


def quickstart(_words: str, _old: str) -> str:
    """Return the program of README.md."""
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- quickstart -->\n")
    block = rest.partition("<!-- end of quickstart -->")[0]
    return f'<!-- skip: next "that of README.md, which runs" -->\n{block}'


PARTS: dict[str, Callable[[str, str], str]] = {
    "api": api,
    "capabilities": capabilities,
    "clauses": clauses,
    "commands": commands,
    "errors": error_table,
    "json-events": json_events,
    "log-events": log_events,
    "metrics": metrics,
    "program": program,
    "quickstart": quickstart,
    "runner-metrics": runner_metrics,
}


# Files


def refreshed(text: str) -> str:
    """Return a page with its parts and values as the code has them."""
    text = PART.sub(lambda found: f"{found[1]}\n{_part(*found.groups())}\n{found[5]}", text)
    return _VALUE.sub(lambda found: f"{found[1]}{_text(value_of(found[3]))}{found[2]}", text)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _part(_begin: str, name: str, words: str, old: str, _end: str) -> str:
    return PARTS[name](words, old)


def stale() -> Iterator[Path]:
    """Yield the pages and diagrams that differ from what they are made from."""
    for page in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))):
        if page.read_text() != refreshed(page.read_text()):
            yield page
    for diagram in sorted((ROOT / "docs" / "_static").glob("*.dot")):
        drawn = diagram.with_suffix(".svg")
        if not drawn.exists() or _mark(diagram) not in drawn.read_text():
            yield drawn


def _mark(diagram: Path) -> str:
    """Return the comment that a drawing has, by which it is known to be of this diagram."""
    return f"<!-- of {hashlib.sha256(diagram.read_bytes()).hexdigest()} -->"


_IN_THE_DARK = """<style>
@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }
</style>
"""


def _draw(diagram: Path) -> str:
    """Return the drawing of a diagram; in the dark its colours are inverted, with their hues."""
    drawn = subprocess.run(["dot", "-Tsvg", diagram], capture_output=True, text=True, check=True)
    return re.sub(r"(<svg[^>]*>\n)", rf"\1{_mark(diagram)}\n{_IN_THE_DARK}", drawn.stdout)


def main() -> int:
    """Write what is out of date, or with --check name it; return the exit status."""
    files = [*stale()]
    for file in files:
        if "--check" in sys.argv:
            print(f"{file.relative_to(ROOT)} is out of date; run: python -m docs.refresh")  # noqa: T201
        elif file.suffix == ".svg":
            file.write_text(_draw(file.with_suffix(".dot")))
        else:
            file.write_text(refreshed(file.read_text()))
    return int("--check" in sys.argv and bool(files))


if __name__ == "__main__":
    sys.exit(main())
