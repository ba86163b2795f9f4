"""Flags that are made from a table of options, and from an object of flags."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

import pytest
import typer
from typer.testing import CliRunner

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import flag
from rlmesh_ray.cli.options.flags import as_command
from rlmesh_ray.options import Group, Option, require_count, require_flag, require_seconds


class Brewing(TypedDict, total=False):
    """The options of a teapot, each declared here alone."""

    num_cups: Annotated[
        int, Option("Cups to fill. Each gets the same.", Group.ENVIRONMENT, 1, require_count)
    ]
    kind: Annotated[
        str, Option("Kind of tea.", Group.ENVIRONMENT, "green", choices=("green", "black"))
    ]
    extras: Annotated[Collection[str], Option("What goes in.", Group.ENVIRONMENT, ())]
    steep_s: Annotated[
        float | None,
        Option("Wait.", Group.LIMITS, None, require_seconds, shown_default="for ever"),
    ]
    lid: Annotated[bool, Option("Close it.", Group.LIMITS, True, require_flag)]
    water: Annotated[
        str, Option("Water.", Group.LIMITS, "cold", has_flag=False, flag_help="never shown")
    ]


@dataclass(frozen=True)
class Serving:
    """How tea is served."""

    on_tray: bool = flag("Serving", "Serve it on a tray.", False)
    after_s: float = flag("Serving", "When.", 1.0, check=require_seconds)
    notes: str = ""


def brewed(*words: str) -> Any:
    """Run a command that takes the options; return those, or what it printed."""
    taken: list[dict[str, Any]] = []
    app = typer.Typer()

    def brew(
        console: Console,
        name: Annotated[str, typer.Argument()],
        serving: Serving,
        **options: Unpack[Brewing],
    ) -> None:
        assert console.is_json
        taken.append({"name": name, "serving": serving, **options})

    app.command()(as_command(brew))
    console = Console(is_json=True)
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "100"}, obj=console)
    return taken[0] if taken else done.output


def test_what_is_not_given_has_the_default_of_the_table() -> None:
    assert brewed("pot") == {
        "name": "pot", "serving": Serving(on_tray=False, after_s=1.0),
        "num_cups": 1, "kind": "green", "extras": (), "steep_s": None, "lid": True,
    }  # fmt: skip


def test_flags_give_the_options_their_values() -> None:
    words = ["--num-cups", "3", "--kind", "black", "--extra", "milk", "--extra", "ice"]
    words += ["--steep", "2.5", "--no-lid", "--on-tray", "--after", "2", "--json"]

    assert brewed("pot", *words) == {
        "name": "pot", "serving": Serving(on_tray=True, after_s=2.0),
        "num_cups": 3, "kind": "black", "extras": ["milk", "ice"], "steep_s": 2.5, "lid": False,
    }  # fmt: skip


def test_the_help_shows_first_sentences_and_defaults_in_groups() -> None:
    text = " ".join(brewed("--help").split())

    assert "Environment" in text
    assert "Cups to fill. [default: 1]" in text
    assert "Each gets the same" not in text
    assert "[default: (for ever)]" in text
    assert "never shown" not in text
    assert "--notes" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-cups", "0"], "--num-cups"),
        (["--kind", "red"], "'red' is not one of"),
        (["--after", "nan"], "nan must be a finite number of seconds above 0"),
        (["--steep", "nan"], "nan must be a finite number of seconds above 0"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_flag(words: list[str], message: str) -> None:
    text = " ".join(brewed("pot", *words).replace("│", " ").split())

    assert message in text
    assert words[0] in text
