"""Directives and roles that render what the code says, so that pages cannot drift from it.

A fact that the code lacks, or that a page lacks, is a warning, and `make docs` fails at warnings.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, ClassVar

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock  # type: ignore[attr-defined]
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

from rlmesh_ray import actors, errors
from rlmesh_ray.cli.main import app as command_line
from rlmesh_ray.compliance.clauses import SECTIONS, Clause, Party
from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS
from rlmesh_ray.server.metrics import ALL_METRICS

_LOG = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
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
_NO_COLON = "\ue000"
_NOT_INSTALLED = ["stable_baselines3"]
"""What a public module needs, and the development environment lacks."""


# Reading the code


def public_names() -> Iterator[str]:
    """Yield the full name of everything that a public module exports."""
    for module_name in PUBLIC_MODULES:
        with mock(_NOT_INSTALLED):
            module = importlib.import_module(module_name)
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


def _value(name: str) -> Any:
    """Return what has the full name ``name``; raises AttributeError where nothing has."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


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


def _texts(node: ast.expr) -> list[str]:
    """Return the text of a literal, or both of a choice between two."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


_COMMAND_OF = {
    "console": "any",
    "evaluation_view": "evaluate, compare",
    "local_ray": "train, evaluate",
    "main": "any",
    "register_with_pool": "serve-env, register",
    "metrics": "serve-env, serve-model, pool",
    "serve_loop": "serve-env, serve-model",
    "training_view": "train",
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
    for _, call in _calls(("rlmesh_ray/server", "actors"), "facts"):
        _add(found, call, "")
    return found


def _add(found: dict[str, list[str]], call: ast.Call, prefix: str) -> None:
    for event in _texts(call.args[0]):
        keys = found.setdefault(prefix + event, [])
        keys += [word.arg for word in call.keywords if word.arg and word.arg not in keys]


def _documented_constants(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the values of constants whose docstring begins with ``prefix``, and its rest."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node, following in pairwise(_tree(path).body):
            if isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
                for value, text in product(_texts(node.value), _texts(following.value)):
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


# Directives


class _Markdown(SphinxDirective):
    """Renders Markdown that is made at build time."""

    has_content = True

    def markdown(self) -> str:
        """Return it."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        return self.parse_text_to_nodes(self.markdown(), allow_section_headings=True)

    def described(self, names: Iterable[str]) -> dict[str, str]:
        """Return the content's lines ``name: meaning``; warn where these are not ``names``."""
        found = dict(line.split(": ", 1) for line in self.content if line.strip())
        known = set(names)
        for name in sorted(known ^ set(found)):
            what = "does not describe" if name in known else "describes what the code lacks:"
            _LOG.warning("this page %s %r", what, name, location=self.get_location())
        return found


class PublicNames(_Markdown):
    """Every public name but the errors, with its first line."""

    def markdown(self) -> str:
        """Return a table a module."""
        parts = []
        for module, names in groupby(public_names(), lambda name: name.rpartition(".")[0]):
            rows = [_public_row(name) for name in names if not name.endswith("Error")]
            if rows and module != errors.__name__:
                parts.append(f"**`{module}`**\n\n{_table(('name', 'what it is'), rows)}")
        return "\n".join(parts)


def _public_row(name: str) -> list[str]:
    first_line = inspect.cleandoc(_value(name).__doc__ or "").partition("\n")[0]
    return [f"[`{name.rpartition('.')[2]}`](#{name})", first_line.replace("``", "`")]


class CommandLine(_Markdown):
    """All commands of ``rlmesh-ray``, each with its arguments and options."""

    def markdown(self) -> str:
        """Return a section a command."""
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


class Errors(_Markdown):
    """The tree of errors: when each is raised, and what to do, which the page says."""

    def markdown(self) -> str:
        """Return a table, in which nested errors are indented."""
        found = [*_errors()]
        remedies = self.described(error.__name__ for error, _ in found)
        return _table(
            ("error", "cause", "what to do"),
            (
                [_link(error, depth), first_line, remedies.get(error.__name__, "")]
                for error, depth in found
                for first_line in inspect.cleandoc(error.__doc__ or "").splitlines()[:1]
            ),
        )


class ErrorClasses(_Markdown):
    """The classes of errors."""

    def markdown(self) -> str:
        """Return their docstrings."""
        classes = "".join(
            f".. autoexception:: rlmesh_ray.errors.{error.__name__}\n   :show-inheritance:\n\n"
            for error, _ in _errors()
        )
        return f"```{{eval-rst}}\n{classes}```\n"


def _link(error: type, depth: int) -> str:
    return f"{'&nbsp;' * 3 * depth}[`{error.__name__}`](#rlmesh_ray.errors.{error.__name__})"


def _errors() -> Iterator[tuple[type[Exception], int]]:
    """Yield the errors in the order of their tree, each with its depth."""
    waiting: list[tuple[type[Exception], int]]
    waiting = [(errors.ConfigurationWarning, 0), (errors.RlmeshError, 0)]
    while waiting:
        error, depth = waiting.pop()
        yield error, depth
        own = [each for each in error.__subclasses__() if each.__module__ == error.__module__]
        waiting += [(each, depth + 1) for each in reversed(own)]


class Metrics(_Markdown):
    """What endpoints export to Prometheus."""

    def markdown(self) -> str:
        """Return a table."""
        return _table(
            ("name in Prometheus", "kind", "label", "meaning"),
            (
                [_code(each.exported), each.kind.name.lower(), _label(each), each.description]
                for each in ALL_METRICS
            ),
        )


def _label(metric: Any) -> str:
    return _code(metric.label) if metric.label else ""


class RunnerMetrics(_Markdown):
    """What runners add to RLlib's metrics."""

    def markdown(self) -> str:
        """Return a table."""
        found = [
            *_documented_constants("rlmesh_ray/rllib/runner", "Metric: "),
            *_documented_constants("rlmesh_ray/dialects/rllink/runner", "Metric: "),
        ]
        return _table(("name", "meaning"), ([_code(name), text] for name, text in found))


class JsonEvents(_Markdown):
    """The events of ``--json`` by command, with their keys; the page gives the meanings."""

    def markdown(self) -> str:
        """Return a table."""
        found = _json_events()
        meanings = self.described(found)
        return _table(
            ("command", "event", "meaning", "keys"),
            (
                [
                    *name.split("/")[:1],
                    _code(name.split("/")[1]),
                    meanings.get(name, ""),
                    _keys(keys),
                ]
                for name, keys in found.items()
            ),
        )


class LogEvents(_Markdown):
    """The events of the log, with their facts; the page gives the meanings."""

    def markdown(self) -> str:
        """Return a table."""
        found = _log_events()
        meanings = self.described(found)
        return _table(
            ("event", "meaning", "facts"),
            ([_code(name), meanings.get(name, ""), _keys(keys)] for name, keys in found.items()),
        )


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(map(_code, keys))


class Clauses(_Markdown):
    """The clauses of the edition."""

    def markdown(self) -> str:
        """Return a table a section."""
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


class Capabilities(_Markdown):
    """The capabilities that handshakes may name, as ``protocol/capabilities.py`` says."""

    def markdown(self) -> str:
        """Return a table of those that have a meaning of their own."""
        return _table(
            ("capability", "meaning"),
            (
                [_code(name), text.replace("``", "`")]
                for name, text in _documented_constants("rlmesh_ray/protocol", "")
                if re.fullmatch(r"(rlmesh_ray|rlmesh\.model)\.[\w.]+|subset_step", name)
            ),
        )


# Roles


class _Fact(SphinxRole):
    """Renders text as code, and warns where the code does not know it."""

    read: ClassVar[Callable[[str], str]]

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the node."""
        try:
            text = type(self).read(self.text)
        except (AttributeError, KeyError, LookupError) as error:
            _LOG.warning(
                "the code has no %s %r (%s)",
                self.name,
                self.text,
                error,
                location=self.get_location(),
            )
            text = self.text
        return [nodes.literal(text, text)], []


def _flag(text: str) -> str:
    """Check ``COMMAND --flag``, or ``--flag`` of any command."""
    *names, flag = text.split()
    commands = _commands()
    for command in [commands[name] for name in names] or commands.values():
        context = typer.Context(command, info_name="")
        for param in command.get_params(context):
            if flag in (*param.opts, *param.secondary_opts):
                return flag
    raise LookupError(flag)


def _default_of(text: str) -> str:
    """Return the default of ``full.name.of.callable.parameter``."""
    function, _, parameter = text.rpartition(".")
    return repr(inspect.signature(_value(function)).parameters[parameter].default)


def _metric(text: str) -> str:
    """Check the name of a metric, as it is exported with or without Ray's prefix, or as it is."""
    bare = text.removeprefix("ray_")
    if not any(bare in (each.name, each.exported) for each in ALL_METRICS):
        raise LookupError(text)
    return text


_ROLES = {
    "value": lambda text: str(_value(text)),
    "flag": _flag,
    "default": _default_of,
    "metric": _metric,
}


def _shield(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking what stands before an attribute's first colon for its type."""
    if what in ("attribute", "property"):
        lines[:1] = [line.replace(":", _NO_COLON) for line in lines[:1]]


def _unshield(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = [line.replace(_NO_COLON, ":") for line in lines]


def _readable_signature(*given: Any) -> tuple[str, str] | None:
    """Write "..." for a default that is no code, which Sphinx could not set."""
    signature, result = given[-2:]
    if "<f" not in (signature or ""):
        return None
    return re.sub(r"<factory>|\w+\([^()]*<function[^()]*\)", "...", signature), result


def _show_actors_as_classes() -> None:
    """Put plain classes in the place of Ray's actor classes, which hide docstrings."""
    shown: Any = actors
    _, shown.EnvServiceActor, *_ = shown.EnvServiceActor.__ray_metadata__.modified_class.__mro__
    factory = type(shown.ModelServiceActor)
    factory.__name__ = "ModelServiceActor"
    factory.__doc__ = next(
        text
        for node, following in pairwise(_tree(ROOT / "actors/model_actor.py").body)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == factory.__name__
        for text in _texts(following.value if isinstance(following, ast.Expr) else node.value)
    )
    shown.ModelServiceActor = factory


def _check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page describes."""
    domain = env.get_domain("py")
    assert isinstance(domain, PythonDomain)
    described = {name.rpartition(".")[2] for name in domain.objects}
    for name in public_names():
        if name.rpartition(".")[2] not in described:
            _LOG.warning("no page of the reference describes %s", name)


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directives and roles."""
    app.setup_extension("sphinx.ext.autodoc")
    _show_actors_as_classes()
    for directive in (
        PublicNames,
        CommandLine,
        Errors,
        ErrorClasses,
        Metrics,
        RunnerMetrics,
        JsonEvents,
        LogEvents,
        Clauses,
        Capabilities,
    ):
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", directive.__name__).lower()
        app.add_directive(name, directive)
    for name, read in _ROLES.items():
        app.add_role(name, type(name, (_Fact,), {"read": staticmethod(read)})())
    app.connect("autodoc-process-signature", _readable_signature)
    app.connect("autodoc-process-docstring", _shield, priority=100)
    app.connect("autodoc-process-docstring", _unshield, priority=900)
    app.connect("env-check-consistency", _check_public_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
