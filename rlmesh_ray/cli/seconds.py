"""Options that are numbers of seconds. Not typer's ``min``: it lets infinity and NaN pass."""

import typer

from rlmesh_ray.options import seconds_problem

_DAY_S = 86_400.0


def above_zero(value: float | None) -> float | None:
    """Return a finite number above 0, or None as it is.

    Raises:
        typer.BadParameter: It is another number.
    """
    return _checked(value, may_be_zero=False)


def zero_or_more(value: float | None) -> float | None:
    """Return a finite number of 0 or more, or None as it is.

    Raises:
        typer.BadParameter: It is another number.
    """
    return _checked(value, may_be_zero=True)


def a_day_at_most(value: float | None) -> float | None:
    """Return a finite number from 0 to the seconds of a day, or None as it is.

    Raises:
        typer.BadParameter: It is another number.
    """
    if value is not None and value > _DAY_S:
        raise typer.BadParameter(f"{value} is more than {_DAY_S:g} seconds, a day")
    return zero_or_more(value)


def _checked(value: float | None, *, may_be_zero: bool) -> float | None:
    problem = "" if value is None else seconds_problem(value, may_be_zero=may_be_zero)
    if problem:
        raise typer.BadParameter(f"{value} {problem}")
    return value
