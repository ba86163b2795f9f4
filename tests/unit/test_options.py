import inspect
import math
from collections.abc import Collection
from fractions import Fraction
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import (
    Group,
    Option,
    as_int,
    as_names,
    as_seed,
    completed,
    declared,
    flag_name,
    removed_option,
    require_count,
    require_finite,
    require_flag,
    require_seconds,
    takes_options,
)


@pytest.mark.parametrize("value", [0, -3, np.int64(4), 10**30])
def test_a_whole_number_becomes_a_plain_integer(value: Any) -> None:
    number = as_int("seed", value)

    assert number == value
    assert type(number) is int


@pytest.mark.parametrize("value", [1.0, "1", True, None, math.nan])
def test_what_is_no_whole_number_is_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^seed=.* must be a whole number$"):
        as_int("seed", value)


@pytest.mark.parametrize("value", [0, -2.5, np.float32(3), 10**400])
def test_a_finite_number_is_taken(value: Any) -> None:
    require_finite("goal", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), True, "1", 1j])
def test_what_is_no_finite_number_is_named(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^goal=.* must be a finite number$"):
        require_finite("goal", value)


def test_a_seed_is_a_whole_number_from_zero_on() -> None:
    assert as_seed(np.int64(0)) == 0
    with pytest.raises(ConfigurationError, match=r"^seed=-1 must be 0 or more$"):
        as_seed(-1)
    with pytest.raises(ConfigurationError, match=r"^seed='1' must be a whole number$"):
        as_seed("1")


def test_a_flag_is_true_or_false_and_perhaps_none() -> None:
    require_flag("fast", True)
    require_flag("fast", None, allow_none=True)
    with pytest.raises(ConfigurationError, match=r"^fast='foo' must be True, False or None$"):
        require_flag("fast", "foo", allow_none=True)
    for value in (None, 1):
        with pytest.raises(ConfigurationError, match=rf"^fast={value} must be True or False$"):
            require_flag("fast", value)


@pytest.mark.parametrize("value", [0, -3, 1.5, "1", True, None, math.nan])
def test_a_count_is_a_whole_number_from_one_on(value: object) -> None:
    require_count("rows", 1)
    require_count("rows", np.int32(7))
    with pytest.raises(ConfigurationError, match=r"^rows=.* must be a whole number, 1 or more"):
        require_count("rows", value)


@pytest.mark.parametrize("value", [0.1, 3, Fraction(1, 3), np.float32(2)])
def test_seconds_are_numbers_of_any_kind(value: object) -> None:
    require_seconds("wait_s", value)


@pytest.mark.parametrize("value", [-1.0, math.nan, -math.inf, "1", True, None, 1j])
def test_an_invalid_duration_is_named_with_every_option(value: object) -> None:
    for allow_zero in (False, True):
        for allow_infinite in (False, True):
            with pytest.raises(ConfigurationError, match=r"^wait_s=.* number of seconds"):
                require_seconds(
                    "wait_s", value, allow_zero=allow_zero, allow_infinite=allow_infinite
                )


@pytest.mark.parametrize("value", [math.inf, 10**400])
def test_seconds_are_finite_unless_they_may_be_endless(value: object) -> None:
    require_seconds("wait_s", value, allow_infinite=True)
    with pytest.raises(ConfigurationError, match=r"must be a finite number of seconds above 0$"):
        require_seconds("wait_s", value)


def test_more_seconds_than_a_message_holds_are_refused() -> None:
    require_seconds("wait_s", 1e15)
    with pytest.raises(ConfigurationError, match=r"^wait_s=1e\+17 must be at most 1e\+15 seconds$"):
        require_seconds("wait_s", 1e17)


def test_no_time_at_all_is_enough_where_it_may_be() -> None:
    require_seconds("wait_s", 0, allow_zero=True)
    with pytest.raises(ConfigurationError, match=r"above 0$"):
        require_seconds("wait_s", 0)


def test_several_names_are_kept_once_each_in_their_order() -> None:
    assert as_names("dialects", ["b", "a", "b"]) == ("b", "a")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("gravity", r"^allow_calls='gravity' must be several names: \('gravity',\)$"),
        (5, r"^allow_calls=5 must be a list of names$"),
        (["a", 3], r"must be a list of names$"),
    ],
)
def test_a_single_text_or_no_texts_are_refused_where_names_are_needed(
    values: object, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        as_names("allow_calls", values)


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
        float | None, Option("Seconds to wait.", Group.LIMITS, None, require_seconds)
    ]
    lid: Annotated[bool, Option("Whether it is closed.", Group.LIMITS, True, require_flag)]


@takes_options(Brewing)
class Teapot:
    """Makes tea.

    Args:
        water: What to heat.
        **options: Those of ``Brewing``.

    Raises:
        ConfigurationError: It cannot.
    """

    def __init__(self, water: str, **options: Unpack[Brewing]) -> None:
        self.options = completed("Teapot", Brewing, options)


def test_options_are_complete() -> None:
    assert Teapot("cold", kind="black").options == {
        "num_cups": 1, "kind": "black", "extras": (), "steep_s": None, "lid": True,
    }  # fmt: skip
    assert Teapot("cold", steep_s=None, lid=False).options["lid"] is False


def test_a_signature_and_a_docstring_show_the_options_that_are_declared() -> None:
    assert str(inspect.signature(Teapot)) == (
        "(water: str, *, num_cups: int = 1, kind: str = 'green', "
        "extras: collections.abc.Collection[str] = (), steep_s: float | None = None, "
        "lid: bool = True) -> None"
    )
    assert (
        inspect.getdoc(Teapot)
        == """\
Makes tea.

Args:
    water: What to heat.
    num_cups: Cups to fill. Each gets the same.
    kind: Kind of tea.
    extras: What goes in.
    steep_s: Seconds to wait.
    lid: Whether it is closed.

Raises:
    ConfigurationError: It cannot."""
    )


def test_a_taker_may_show_an_option_as_something_else_or_leave_it_out() -> None:
    own = Option("Kind of cocoa.", Group.SERVING, "dark")

    @takes_options(Brewing, without={"lid", "steep_s"}, kind=own)
    def brew(*, _lid_is_hot: bool = True, **options: Unpack[Brewing]) -> None:
        pass

    shown = inspect.signature(brew).parameters
    assert list(shown) == ["num_cups", "kind", "extras"]
    assert shown["kind"].default == "dark"


def test_flags_are_named_after_options() -> None:
    flags = [flag_name(name, *found) for name, found in declared(Brewing).items()]

    assert flags == ["--num-cups", "--kind", "--extra", "--steep", "--no-lid"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"num_cup": 2},
            TypeError,
            "unexpected keyword argument 'num_cup'; did you mean 'num_cups'",
        ),
        ({"sugar": 2}, TypeError, "unexpected keyword argument 'sugar'$"),
        ({"num_cups": 0}, ConfigurationError, "num_cups=0 must be a whole number, 1 or more"),
        ({"kind": "red"}, ConfigurationError, "kind='red' is not one of green, black"),
        ({"steep_s": math.nan}, ConfigurationError, "steep_s=nan must be a finite number"),
        ({"lid": None}, ConfigurationError, "lid=None must be True or False"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Teapot("cold", **given)


LISTENING = ("data_address", "accept_edition_texts", "idle_timeout_s", "openpi")


@pytest.mark.parametrize("owner", [EnvServer, ModelServer, RemoteEnv, RemoteVectorEnv])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("spin", "RLMESH_RAY_SPIN=0"),
        ("data_advertise", "data_address .*HOST:PORT/ADVERTISED"),
        ("no_token", "give a server token=False; a client without a token needs no option"),
        ("step_grace_s", "has 5 s more"),
        ("stuck_after_s", "more than 5 s for a batch"),
        ("endpoint_id", "an actor, a fleet and a pool have ids"),
        *((name, rf"address=ListenOptions\(\.\.\., {name}=\.\.\.\)") for name in LISTENING),
    ],
)
def test_an_option_that_has_left_is_refused_with_the_remedy(
    owner: Any, name: str, instead: str
) -> None:
    with pytest.raises(
        TypeError, match=f"{owner.__name__}.. takes no '{name}' any more: .*{instead}"
    ):
        owner("CartPole-v1", **{name: 1})


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--threads", "give --torch-threads"),
        ("--env-timeout", "--step-timeout"),
        ("--connect-timeout", ""),  # what a call takes instead, no command does
        ("--model-token", ""),
    ],
)
def test_a_flag_that_has_left_names_what_a_command_takes(flag: str, instead: str) -> None:
    found = removed_option(flag)

    assert instead in found
    assert bool(instead) == bool(found)


def test_clients_of_one_and_of_several_lanes_take_the_same_options() -> None:
    one, several = (inspect.signature(each) for each in (RemoteEnv, RemoteVectorEnv))

    assert one.parameters == several.parameters
