"""Checks of options in seconds. Typer's ``min`` would accept infinity and NaN."""

import typer

from rlmesh_ray.options import seconds_problem

_DAY_S = 86_400.0


def positive_s(value: float | None) -> float | None:
    """Return a finite number above 0, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    return _checked(value, allow_zero=False)


def non_negative_s(value: float | None) -> float | None:
    """Return a finite number of 0 or more, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    return _checked(value, allow_zero=True)


def at_most_a_day_s(value: float | None) -> float | None:
    """Return a finite number from 0 to the seconds of a day, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    if value is not None and value > _DAY_S:
        raise typer.BadParameter(f"{value} is more than {_DAY_S:g} seconds, a day")
    return non_negative_s(value)


def _checked(value: float | None, *, allow_zero: bool) -> float | None:
    problem = "" if value is None else seconds_problem(value, allow_zero=allow_zero)
    if problem:
        raise typer.BadParameter(f"{value} {problem}")
    return value
