"""Answers of Ray actors, with this package's errors in place of Ray's."""

from collections.abc import Sequence
from typing import Any

import ray

from rlmesh_ray.errors import EndpointTimeoutError, EndpointUnreachableError, RlmeshError


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
