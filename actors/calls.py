"""Answers of Ray actors, with this package's errors in place of Ray's."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rlmesh_ray.errors import (
    CapacityError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RlmeshError,
)


def answer(reference: Any, timeout_s: float | None = None) -> Any:
    """Wait for the answer to one actor call.

    Raises:
        RlmeshError: As the actor raised it.
        EndpointTimeoutError: There is none after ``timeout_s``.
        EndpointUnreachableError: The actor is restarting, or dead.
    """
    return answers([reference], timeout_s)[0]


def answers(references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for the answers to several actor calls; see ``answer``."""
    found = outcomes(references, timeout_s)
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return found


def await_start(
    starting: Sequence[Any], what: str, needs: Mapping[str, float], timeout_s: float
) -> None:
    """Wait until actors have answered their first call.

    Args:
        starting: The calls.
        what: The actors, in the plural; also the end of the option that says how many.
        needs: What Ray sets aside for each, by Ray's names ("CPU", "GPU").
        timeout_s: For all of them.

    Raises:
        RlmeshError: As one of them raised it.
        CapacityError: The cluster did not place all of them in time.
    """
    ready, waiting = ray.wait(list(starting), num_returns=len(starting), timeout=timeout_s)
    answers(ready)
    if not waiting:
        return
    free = ray.available_resources()
    lower = ", ".join(f"num_{name.lower()}s" for name in needs)
    raise CapacityError(
        f"{len(waiting)} of {len(starting)} {what} did not start in {timeout_s:g} s; each needs "
        f"{_amounts(needs)} and the cluster has {_amounts({n: free.get(n, 0.0) for n in needs})} "
        f"free: lower {lower} or num_{what}, or add nodes"
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def outcomes(references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for several actor calls; return each one's answer, or the error in its place."""
    _, late = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    # All of them, also those behind a failure: Ray logs failures that nobody looks at.
    return [
        EndpointTimeoutError(f"an actor did not answer within {timeout_s:g} s")
        if reference in late
        else _outcome(reference)
        for reference in references
    ]


def _outcome(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # Ray's own text of it is a traceback of many lines.
        return error.cause if isinstance(error.cause, RlmeshError) else error
    except ray.exceptions.RayActorError as error:
        reason = str(error).splitlines()[0]
        return EndpointUnreachableError(f"an actor is restarting or gone: {reason}")
    except ray.exceptions.ObjectLostError:
        return EndpointUnreachableError("what an actor kept is gone with it")
