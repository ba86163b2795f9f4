"""Ray's actors: calls with this package's errors, their restarts, and arguments for these."""

import contextlib
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import cloudpickle
import ray
from ray.util.annotations import RayDeprecationWarning

from rlmesh_ray.actors.cluster_resources import fits, is_unplaced
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RlmeshError,
)

_LOG = logging.getLogger(__name__)

_ALIKE_S = 1.0
"""After the first failure: how long to wait for others with the same cause."""
_FIRST_NOTICE_S = 5.0
_NOTICE_EVERY_S = 30.0
"""How often the log reports that actors have no node yet."""
MAX_INLINE_BYTES = 64 * 1024
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


def await_start(
    starting: Sequence[Any],
    what: str,
    needs: Sequence[Mapping[str, float]],
    timeout_s: float,
) -> None:
    """Wait until actors have answered their first call.

    While some of them have no node yet, the log says so after a few seconds, and then every 30 s,
    with what they need and what is free.

    Args:
        starting: The first call to each actor.
        what: Plural name of the actors; ``num_<what>`` is the option with their number.
        needs: What Ray reserves for each actor, by Ray's names ("CPU", "GPU").
        timeout_s: Time for all of them together.

    Raises:
        RlmeshError: An actor failed.
        CapacityError: The cluster did not place all of them in time.
    """
    deadline_s = time.monotonic() + timeout_s
    notice_s = time.monotonic() + _FIRST_NOTICE_S
    waiting = list(starting)

    def wanted() -> Mapping[str, float]:
        """Return the needs of the first actor that is not ready."""
        return needs[list(starting).index(waiting[0])]

    # One at a time: an actor that never gets a node must not hide the failure of another one.
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        ready, waiting = ray.wait(
            waiting, timeout=min(left_s, max(notice_s - time.monotonic(), 0.0))
        )
        if any(isinstance(each, Exception) for each in get_outcomes(ready)):
            if waiting:
                ray.wait(waiting, num_returns=len(waiting), timeout=_ALIKE_S)
            get_results(ready)
        if waiting and time.monotonic() >= notice_s:
            is_reported = is_unplaced(wanted())
            if is_reported:
                _LOG.warning(
                    "%d of %d %s have no node yet; %s: %s. The wait ends in %.0f s",
                    len(waiting),
                    len(starting),
                    what,
                    _needed_and_free(wanted()),
                    _more_room(wanted(), what),
                    max(deadline_s - time.monotonic(), 0.0),
                )
            notice_s = time.monotonic() + (_NOTICE_EVERY_S if is_reported else _FIRST_NOTICE_S)
    if not waiting:
        return
    remedy = (
        "so they start slowly, or die while they start (see Ray's log): raise start_timeout_s, or "
        "fix the cause"
        if fits(wanted(), ray.available_resources())
        else f"{_more_room(wanted(), what)}; where an autoscaler adds nodes, which takes minutes, "
        "raise start_timeout_s"
    )
    raise CapacityError(
        f"{len(waiting)} of {len(starting)} {what} did not start in {timeout_s:g} s; "
        f"{_needed_and_free(wanted())}: {remedy}"
    )


def _needed_and_free(wanted: Mapping[str, float]) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    there = ", ".join(
        f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in wanted
    )
    needed = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    return f"each needs {needed or 'no resources'}, and the cluster has {there or 'nodes'} free"


def _more_room(wanted: Mapping[str, float], what: str) -> str:
    options = [{"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, name) for name in wanted]
    return (
        f"lower {', '.join(options)} or num_{what}, stop what uses the rest (an algorithm, another "
        "fleet), or add nodes"
    )


def stop_actor(actor: Any, timeout_s: float) -> None:
    """Call an actor's method ``stop``, and then kill the actor in any case."""
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

    Args:
        name: Name of the value, for error messages.
        value: The value; text is returned as it is.

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
    return value if num_bytes < MAX_INLINE_BYTES else ray.put(value)
