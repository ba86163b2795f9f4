"""Figures of the package's order, and their limits: ``python -m tests.house`` (``make house``).

Exits with 1 where a figure is above its limit. A limit is lowered when its figure has become
smaller. That of lines is raised by a commit that brings users something, and says so; no other is.
"""

import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIDDLE_WORDS = re.compile(r"\b(?:whoever|somebody|nobody|anybody|whatever)\b", re.IGNORECASE)
REPEATED_CLASSES = {
    "Settings": "what a dialect says of an endpoint; each has its own",
}
"""Public class names that may stand in several modules, and why."""
SMALL, LONG_RUN = 40, 6


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure and what it may be at most."""

    name: str
    figure: float
    most: float

    def line(self) -> str:
        """Return it as a line of the report."""
        mark = "ok" if self.figure <= self.most else "TOO MANY"
        return f"{self.name:54} {self.figure:8.0f}  of {self.most:.0f} at most  {mark}"


class Module:
    """A module of the product.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts if parts[0] == "rlmesh_ray" else ("rlmesh_ray", *parts))
        inner = parts[1:] if parts[0] == "rlmesh_ray" else parts
        self.room = inner[0] if len(inner) > 1 else "(top level)"

    @property
    def num_lines(self) -> int:
        """All of them, as an editor counts."""
        return self.text.count("\n")

    @property
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
    def lengths_of_functions(self) -> list[int]:
        """Lines of each function, its docstring left out."""
        return [
            _length(node)
            for node in self.nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]

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


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def product() -> Iterator[Module]:
    """Yield the modules of the installed package, generated ones left out."""
    for folder in ("rlmesh_ray", "actors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "_pb" not in path.parts and "actors" not in path.relative_to(ROOT).parts[1:]:
                yield Module(path)


def repeated_classes(modules: Sequence[Module]) -> list[str]:
    """Return the public class names that stand in several modules without a reason."""
    places = Counter(name for module in modules for name in set(module.public_classes))
    return sorted(name for name, n in places.items() if n > 1 and name not in REPEATED_CLASSES)


def slivers(modules: Sequence[Module]) -> list[str]:
    """Return the small modules that one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in module.imported:
            importers[name].add(module.name)
    return [
        module.name
        for module in modules
        if module.path.name not in {"__init__.py", "__main__.py"}
        and module.num_lines < SMALL
        and len(importers[module.name] - {module.name}) == 1
    ]


def repeated_runs(modules: Sequence[Module]) -> int:
    """Return how many pairs of places share a run of six lines and more."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for module in modules:
        lines = module.code_lines
        for start in range(len(lines) - LONG_RUN + 1):
            places[tuple(lines[start : start + LONG_RUN])].append((module.name, start))
    pairs = {
        pair for same in places.values() if len(same) <= 8 for pair in combinations(sorted(same), 2)
    }
    # A longer run is found at each of its lines: only its beginning counts.
    return sum(
        ((one, at - 1), (other, there - 1)) not in pairs for (one, at), (other, there) in pairs
    )


def tests() -> Iterator[list[ast.AST]]:
    """Yield the nodes of each file of the tests and of what they use."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        yield list(ast.walk(ast.parse(path.read_text())))


def private_names(modules: Sequence[Module]) -> set[str]:
    """Return what the product defines for its own use: attributes, functions, constants."""
    found = set()
    for node in (node for module in modules for node in module.nodes):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_reads(files: Sequence[Sequence[ast.AST]], names: set[str]) -> int:
    """Return how often tests use such an attribute, but of ``self`` and ``super()``."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr in names
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
        for nodes in files
        for node in nodes
    )


def replaced_parts(files: Sequence[Sequence[ast.AST]]) -> Counter[bool]:
    """Return how often tests put something else into the product with ``setattr``.

    By whether it is a constant: a wait or limit that a test shortens. What stands for the outside
    world does not count: an attribute of a library's module or class, or a library's module in one
    of ours.
    """
    counts = Counter[bool]()
    for nodes in files:
        sources: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                sources |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                sources |= {alias.asname or alias.name: node.module or "" for alias in node.names}
        for node in nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "setattr" and _is_replaced(node, sources):
                name = ast.unparse(node.args[isinstance(node.args[1], ast.Constant)])
                counts[name.strip("'").rpartition(".")[2].isupper()] += 1
    return counts


def _is_replaced(call: ast.Call, sources: dict[str, str]) -> bool:
    owner, name = (ast.unparse(argument).strip("'") for argument in call.args[:2])
    if isinstance(call.args[0], ast.Constant):
        return owner.startswith("rlmesh_ray.")
    source = sources.get(owner.partition(".")[0], "rlmesh_ray")
    is_ours = source.partition(".")[0] in {"rlmesh_ray", "tests", "benchmarks"}
    return is_ours and name not in {*sys.stdlib_module_names, "grpc", "ray"}


def main() -> int:
    """Print the figures; return the exit status."""
    modules = list(product())
    lines, counts = Counter[str](), Counter[str]()
    for module in modules:
        lines[module.room] += module.num_lines
        counts[module.room] += 1
    for room in sorted(lines):
        sys.stdout.write(f"{room:20} {counts[room]:4} modules {lines[room]:7,} lines\n")
    functions = [length for module in modules for length in module.lengths_of_functions]
    again, small = repeated_classes(modules), slivers(modules)
    riddles = sum(len(RIDDLE_WORDS.findall(module.text)) for module in modules)
    files = list(tests())
    reads, replaced = private_reads(files, private_names(modules)), replaced_parts(files)
    limits = (
        Limit("modules", len(modules), 524),
        Limit("lines", lines.total(), 86_450),
        Limit("public class names in several modules", len(again), 0),
        Limit("words such as whoever, somebody, nobody", riddles, 5),
        Limit("modules under 40 lines with one importer", len(small), 2),
        Limit("lines of a function, 99th percentile", _percentile(functions, 99), 40),
        Limit("pairs of places that share six lines", repeated_runs(modules), 46),
        Limit("private attributes that tests use", reads, 13),
        Limit("waits and limits that tests shorten", replaced[True], 46),
        Limit("functions and classes that tests replace", replaced[False], 48),
    )
    sys.stdout.write("\n" + "\n".join(limit.line() for limit in limits) + "\n")
    if "--names" in sys.argv:
        sys.stdout.write(f"\n{' '.join(again)}\n\n{' '.join(small)}\n")
    return int(any(limit.figure > limit.most for limit in limits))


def _percentile(numbers: Sequence[int], percent: int) -> float:
    return statistics.quantiles(numbers, n=100)[percent - 1]


if __name__ == "__main__":
    sys.exit(main())
