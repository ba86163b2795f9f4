"""A module of the product, as tests/house.py measures it."""

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Sequence
from typing import TypeGuard

PUBLIC_UNDERSCORES = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Documented names of the standard library."""
_NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_CODE_MAKERS = {"exec", "eval", "compile", "FunctionType", "types.FunctionType", "make_dataclass"}
_BY_NAME = {"getattr", "attrgetter", "methodcaller"}
_SCOPES = {"globals", "locals", "vars", "__dict__"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A module of the product, which is read once.

    Args:
        name: As it is imported; a package's ends with ``.__init__``.
        text: Its source.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        inner = name.split(".")[1:]
        self.room = inner[0] if len(inner) > 1 else "(top level)"
        self.is_package = inner[-1] in {"__init__", "__main__"}
        self.classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.functions = [node for node in self.nodes if isinstance(node, _Function)]
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        texts = [node for node in self.nodes if isinstance(node, ast.Expr) and _is_text(node.value)]
        self._texts = {id(node.value) for node in texts}
        self.num_statements = sum(isinstance(node, ast.stmt) for node in self.nodes) - len(texts)

    @property
    def num_lines(self) -> int:
        """All of them, as an editor counts."""
        return self.text.count("\n")

    @property
    def num_tokens(self) -> int:
        """Without comments, indentation and ends of lines; a docstring is one."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type not in _NO_TOKENS for token in tokens)

    @functools.cached_property
    def imported(self) -> set[str]:
        """Full names of what it imports, and of what may be modules among them."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found

    @property
    def public_classes(self) -> list[str]:
        """Names of the classes that it defines for others."""
        classes = (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))
        return [name for name in classes if not name.startswith("_")]

    @property
    def protocols(self) -> list[str]:
        """Names of its classes that derive from ``typing.Protocol``."""
        return [
            node.name
            for node in self.classes
            if any(_last_name(base) == "Protocol" for base in node.bases)
        ]

    @functools.cached_property
    def private_names(self) -> set[str]:
        """What it defines for its own use: attributes, functions, classes, constants."""
        found = {node.name for node in (*self.functions, *self.classes)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
        return {name for name in found if _is_private(name)}

    @property
    def strange_names(self) -> list[str]:
        """Private attributes of others that it uses, as ``module:line name``.

        That is ``x._name``, where x is neither ``self``, ``cls`` nor ``super()``, and the module
        defines no ``_name``: no function, class or variable, and no attribute of ``self``.
        """
        own = {node.name for node in (*self.functions, *self.classes)} | PUBLIC_UNDERSCORES
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        own |= {node.attr for node in attributes if _is_set(node) and _is_own(node.value)}
        own |= {node.id for node in self.nodes if isinstance(node, ast.Name) and _is_set(node)}
        return [
            self._at(node, node.attr)
            for node in attributes
            if _is_private(node.attr) and node.attr not in own and not _is_own(node.value)
        ]

    @property
    def made_code(self) -> list[str]:
        """Where it makes code or classes: ``exec`` and its like, ``type`` with three arguments."""
        return [
            self._at(node, _last_name(node.func))
            for node in self.calls
            if _dotted_name(node.func) in _CODE_MAKERS
            or (_dotted_name(node.func) == "type" and len(node.args) == 3)
        ]

    @property
    def chosen_by_name(self) -> list[str]:
        """Where it chooses an attribute by a name that is no constant, as ``getattr(x, name)``."""
        by_call = [
            node
            for node in self.calls
            if _last_name(node.func) in _BY_NAME
            and not all(isinstance(each, ast.Constant) for each in _names_given(node))
        ]
        by_scope = [
            node
            for node in self.nodes
            if isinstance(node, ast.Subscript)
            and _last_name(getattr(node.value, "func", node.value)) in _SCOPES
        ]
        return [self._at(node, "by name") for node in (*by_call, *by_scope)]

    @property
    def code_in_strings(self) -> list[str]:
        """Its string constants that are several statements, docstrings left out."""
        return [
            self._at(node, "text")
            for node in self.nodes
            if (isinstance(node, ast.JoinedStr) or _is_text(node))
            and id(node) not in self._texts
            and _is_code(_plain_text(node))
        ]

    @property
    def lengths_of_functions(self) -> list[int]:
        """Lines of each function, its docstring left out."""
        return [_length(node) for node in self.functions]

    @property
    def code_lines(self) -> list[str]:
        """Lines that are code, without imports, docstrings, comments and lone brackets."""
        skipped: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom)):
                skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(self.text.splitlines(), 1)
        stripped = (line.split("  #")[0].strip() for number, line in lines if number not in skipped)
        return [line for line in stripped if re.search(r"\w", line) and not line.startswith("#")]

    def _at(self, node: ast.expr, what: str) -> str:
        return f"{self.name}:{node.lineno} {what}"


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, also where it is subscripted; else nothing."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return _dotted_name(node).rpartition(".")[2]


def _dotted_name(node: ast.expr) -> str:
    """Return a name such as ``torch.compile``; that of a builtin stands alone."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}".removeprefix("builtins.")
    return node.id if isinstance(node, ast.Name) else ""


def _names_given(call: ast.Call) -> Sequence[ast.expr]:
    return call.args[1:2] if _last_name(call.func) == "getattr" else call.args


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_set(node: ast.Attribute | ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_own(node: ast.expr) -> bool:
    """Return whether it is the object or class itself."""
    if isinstance(node, ast.Call):
        return _last_name(node.func) == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _plain_text(node: ast.AST) -> str:
    """Return a string constant, or an f-string with a name in the place of each value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_plain_text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "_"


def _is_code(text: str) -> bool:
    """Return whether a text is several statements of Python, not all of them mere values."""
    if "\n" not in text.strip() and ";" not in text:
        return False
    # The first line may be indented as the others are, or stand behind the quotes.
    return any(map(_are_statements, (textwrap.dedent(text), inspect.cleandoc(text))))


def _are_statements(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return False
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    return len(statements) > 1 and any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in statements
    )


def _length(node: _Function) -> int:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length
