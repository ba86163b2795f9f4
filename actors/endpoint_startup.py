"""Startup of a fleet's endpoints: waiting for it, and errors that name the cause."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rlmesh_ray.actors.cluster_resources import needs_of
from rlmesh_ray.actors.ray_calls import await_start
from rlmesh_ray.errors import CapacityError, EndpointUnreachableError, EnvStartError


def await_endpoints(
    starting: Sequence[Any], options: Sequence[Mapping[str, Any]], timeout_s: float
) -> None:
    """Wait until endpoints serve.

    Args:
        starting: The first call to each endpoint's actor.
        options: Ray's options of each actor.
        timeout_s: Time for all of them together.

    Raises:
        RlmeshError: An endpoint could not start its server.
        EnvStartError: An actor could not be created, or its ``runtime_env`` not be set up.
        CapacityError: The cluster did not place all of them in time.
    """
    try:
        await_start(starting, "endpoints", [needs_of(each) for each in options], timeout_s)
    except CapacityError as error:
        _, late = ray.wait(list(starting), num_returns=len(starting), timeout=0)
        further = _further_needs(options[list(starting).index(late[0])]) if late else ""
        if not further:
            raise
        raise CapacityError(f"{error}. By actor_options each also needs {further}") from error
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise EnvStartError(
            f"the runtime_env of the endpoints cannot be set up: {_last_line(error)}", str(error)
        ) from error
    except EndpointUnreachableError:
        _raise_failed_creation(starting)
        raise


def serves(starting: Any) -> bool:
    """Return whether an endpoint serves, by the first call to its actor."""
    ready, _ = ray.wait([starting], timeout=0)
    try:
        return bool(ready and ray.get(ready[0]))
    except ray.exceptions.RayError:
        return False


def _further_needs(options: Mapping[str, Any]) -> str:
    """Return what an actor needs besides resources, as text."""
    needs = []
    if options.get("label_selector"):
        needs.append(f"a node with labels {dict(options['label_selector'])}")
    if options.get("runtime_env"):
        needs.append("its runtime_env to be set up, which may take longer than start_timeout_s")
    return ", ".join(needs)


def _raise_failed_creation(starting: Sequence[Any]) -> None:
    """Raise the cause, if an actor could not be created at all."""
    for reference in ray.wait(list(starting), num_returns=len(starting), timeout=0)[0]:
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise EnvStartError(
                    f"the actors of the endpoints cannot be created: {_last_line(error)}; their "
                    "nodes and runtime_env need the same rlmesh_ray and Ray as the driver",
                    str(error),
                ) from error


def _last_line(error: Exception) -> str:
    # The texts of Ray's errors end with the cause's traceback.
    return str(error).strip().splitlines()[-1]
