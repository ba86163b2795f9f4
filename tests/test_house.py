"""The figures of tests/house.py find what they are there for, in small sources."""

import tomllib
from collections.abc import Callable, Sequence

import pytest

from tests import house
from tests.measured_module import Module

PROTOCOL = "from typing import Protocol\nclass Kept(Protocol[T]): ...\n"


def module(source: str, name: str = "rlmesh_ray.room.planted") -> Module:
    return Module(name, source)


def test_statements_and_tokens_leave_out_docstrings_and_comments() -> None:
    planted = module(
        '"""Doc."""\n\nx = 1  # why\n"""Of x."""\n\ndef f() -> None:\n    """Doc."""\n    g()\n'
    )

    assert planted.num_statements == 3
    assert planted.num_tokens == 16  # each docstring is one
    assert (planted.room, planted.num_lines, len(planted.functions)) == ("room", 8, 1)


@pytest.mark.parametrize(
    ("figure", "refused", "allowed"),
    [
        (lambda each: each.made_code, "exec(text)", "re.compile(text)"),
        (lambda each: each.made_code, "builtins.eval(text)", "module.eval()"),
        (lambda each: each.made_code, "compile(text, '', 'exec')", "torch.compile(f)"),
        (lambda each: each.made_code, "type('A', (), {})", "type(x)"),
        (lambda each: each.made_code, "types.FunctionType(code, {})", "FunctionSpec(code)"),
        (lambda each: each.chosen_by_name, "getattr(x, f'on_{name}')()", "getattr(x, 'on', None)"),
        (lambda each: each.chosen_by_name, "operator.methodcaller(n)", "attrgetter('a', 'b')"),
        (lambda each: each.chosen_by_name, "globals()[name]()", "handlers[name]()"),
        (lambda each: each.chosen_by_name, "vars(x)[name]", "vars(x)"),
        (lambda each: each.chosen_by_name, "kind.__dict__[name]", "kind.table[name]"),
        (lambda each: each.code_in_strings, "text = 'x = 1; f(x)'", "text = 'first; second'"),
        (lambda each: each.code_in_strings, "g('def f():\\n    return 1')", "g('two\\nlines')"),
        (lambda each: each.code_in_strings, "g(f'x = {y}\\nf(x)')", "g(f'not ({y}); {x}')"),
        (lambda each: each.strange_names, "runner._slots", "self._slots"),
        (lambda each: each.strange_names, "self.runner._slots = 1", "super()._slots"),
        (lambda each: each.strange_names, "ray._private", "row._replace(x=1).__class__"),
        (lambda each: each.strange_names, "def f(x): return x._y", "def _y(x): return x._y"),
        (
            lambda each: each.strange_names,
            "class A:\n    def f(self, x): return x._y",
            "class A:\n    def f(self, x): self._y = x._y",
        ),
        (lambda each: each.protocols, "class A(Protocol): ...", "class A(H11Protocol): ..."),
        (lambda each: house.long_lines("x", each.text), f"x = '{'x' * 95}'", f"x = '{'x' * 94}'"),
        (
            lambda each: house.long_lines("x", each.text),
            f"x = '{'x' * 95}'  # noqa: E501",
            f"x = '{'x' * 80}'  # type: ignore[index]  # the reason for it",
        ),
        (
            lambda each: [house.is_generated("x.py", each.text)] * ("DO NOT" in each.text),
            "# DO NOT EDIT",
            "x = 1",
        ),
    ],
)
def test_cheap_ways_are_found(
    figure: Callable[[Module], Sequence[str]], refused: str, allowed: str
) -> None:
    assert len(figure(module(refused))) == 1
    assert figure(module(allowed)) == []


def test_a_docstring_may_show_code() -> None:
    assert module('"""Doc.\n\nx = 1\nf(x)\n"""').code_in_strings == []


def test_generated_files_are_known_by_their_name_too() -> None:
    assert house.is_generated("rlmesh_ray/wire/env_pb2.py", "")
    assert not house.is_generated("rlmesh_ray/wire/env.py", "x = 1\n" * 20 + "# do not edit")


def test_each_protocol_has_a_reason_that_holds() -> None:
    planted = [module(PROTOCOL), module("class One: ...\nclass Two: ...")]

    assert house.wrong_protocols(planted, {"Kept": "One, Two; RLlib's"}) == []
    assert house.wrong_protocols(planted, {"Kept": "One, Three"}) == ["Three"]
    assert house.wrong_protocols(planted, {"Gone": "One, Two"}) == ["Gone", "Kept"]


def test_modules_with_one_importer_are_found() -> None:
    used = module("x = 1", "rlmesh_ray.a.used")
    shared = module("x = 1", "rlmesh_ray.a.shared")
    package = module("", "rlmesh_ray.a.__init__")
    users = [
        module("from rlmesh_ray.a.used import x\nimport rlmesh_ray.a.shared", "rlmesh_ray.b"),
        module("from rlmesh_ray.a import shared", "rlmesh_ray.c"),
    ]

    assert house.with_one_importer([used, shared, package, *users]) == [used]


def test_words_that_a_command_has_written_into_a_page_do_not_count() -> None:
    assert house.num_words("one two\n<!-- refresh: part -->\nthree\n<!-- refreshed -->\nfour") == 3


def test_no_file_is_free_of_the_rules_of_layout() -> None:
    ruff = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["ruff"]

    assert ruff["line-length"] == house.LONGEST_LINE
    ignored = {*ruff["lint"]["ignore"]}.union(*ruff["lint"]["per-file-ignores"].values())
    assert not ignored & {"E", "E5", "E501", "E7", "E70", "E701", "E702", "E703"}
