"""Ray's actors: calls with this package's errors, their restarts, and arguments for these."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, Self

import cloudpickle
import ray
from ray.util.annotations import RayDeprecationWarning

from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RlmeshError,
)

_MAX_INLINE_BYTES = 64 * 1024
"""Largest argument that Ray keeps with the actor; Ray's own limit is 100 KiB."""


class StoppedAtExit:
    """A handle that is stopped at the end of a ``with`` block."""

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def get_result(reference: Any, timeout_s: float | None = None) -> Any:
    """Wait for the answer to one actor call.

    Raises:
        RlmeshError: The call raised it.
        EndpointTimeoutError: There is no answer after ``timeout_s``.
        EndpointUnreachableError: The actor is restarting, or dead.
    """
    return get_results([reference], timeout_s)[0]


def get_results(references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    found = get_outcomes(references, timeout_s)
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return found


def stop_actor(actor: Any, timeout_s: float) -> None:
    # Without Ray the actor has ended already, and a call would start another Ray.
    if not ray.is_initialized():
        return
    try:
        with contextlib.suppress(RlmeshError):
            get_result(actor.stop.remote(), timeout_s)
    finally:
        ray.kill(actor)


def get_outcomes(references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for several actor calls; return each answer, or the error in its place."""
    _, late = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    # All of them, also after a failure: Ray logs each failure that no caller retrieves.
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
        # The text of Ray's error is a traceback of many lines.
        return error.cause if isinstance(error.cause, RlmeshError) else error
    except ray.exceptions.RayActorError as error:
        lines = str(error).strip().splitlines()
        if getattr(error, "actor_init_failed", False):
            # The text of Ray's error ends with the cause's traceback.
            return EndpointUnreachableError(
                f"an actor cannot be created: {lines[-1]}; its node needs the same rlmesh_ray and "
                "Ray as this one"
            )
        return EndpointUnreachableError(f"an actor is restarting or gone: {lines[0]}")
    except ray.exceptions.ObjectLostError:
        return EndpointUnreachableError("an object is lost, because the actor that held it is gone")


def is_restarted() -> bool:
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():
        # Ray's property uses a deprecated one of Ray's own; each actor would print the warning.
        warnings.filterwarnings("ignore", "(?s).*get_actor_id", RayDeprecationWarning)
        return bool(context.was_current_actor_reconstructed)


def durable(name: str, value: object) -> object:
    """Return ``value``, or an object reference to it, as an argument that survives restarts.

    Ray keeps small arguments with the actor. An object in Ray's store lives only as long as a
    reference to it: the caller keeps the result as long as the actor may restart.

    Raises:
        ConfigurationError: ``value`` cannot be pickled.
    """
    if isinstance(value, str):
        return value
    try:
        num_bytes = len(cloudpickle.dumps(value))
    except Exception as error:  # the operator's own code may raise anything
        raise ConfigurationError(
            f"{name}, a {type(value).__name__}, cannot be sent to Ray's actors "
            f"({type(error).__name__}: {error}); name a file, or module:factory"
        ) from error
    return value if num_bytes < _MAX_INLINE_BYTES else ray.put(value)
