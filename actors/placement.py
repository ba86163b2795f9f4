"""Where Ray's actors run: what they need, what nodes have, and the wait until they run there.

Functions that check a fleet's arguments raise a ConfigurationError.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.ray_calls import get_outcomes, get_results
from rlmesh_ray.compat.ray import autoscaled_node_types, pending_bundles
from rlmesh_ray.errors import CapacityError, ConfigurationError, EnvStartError

_LOG = logging.getLogger(__name__)

_ALIKE_S = 1.0
"""After the first failure: how long to wait for others with the same cause."""
_FIRST_NOTICE_S = 5.0
_NOTICE_EVERY_S = 30.0
"""How often the log reports that actors have no node yet."""
_NODE_GROUP_LABEL = "ray.io/node-group"
_ROUNDING = 1e-4  # Ray counts ten-thousandths

OUTSIDE: Mapping[str, Any] = {"scheduling_strategy": "DEFAULT"}
"""Options of an actor that is not to run in the placement group of its caller."""
ON_HEAD = {**OUTSIDE, "resources": {"node:__internal_head__": 0.001}}
"""Options of an actor that is to run on the head node: no other node's loss ends it."""
PLACES = frozenset({"scheduling_strategy", "label_selector", "resources"})
"""Options that name nodes."""
Resources = Mapping[str, float]
"""Amounts by Ray's names: "CPU", "GPU", "memory" (bytes), and custom resources."""
ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Options of Ray actors: one mapping for all endpoints, or one for each."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The node choice of each endpoint of a fleet, by index. Make one with ``of``."""

    where: str | tuple[str, ...]
    options: tuple[Mapping[str, Any], ...]
    """Of Ray's actors, at least one; repeated where the fleet has more endpoints."""

    @classmethod
    def of(
        cls,
        where: str | Sequence[str],
        resources: Mapping[str, float],
        options: ActorOptions | None,
        num_endpoints: int,
        nodes: Collection[str],
    ) -> Self:
        """Return the placement of a fleet, given ``num_cpus`` and ``num_gpus`` of each endpoint."""
        if isinstance(options, Mapping) or options is None:
            each: tuple[Mapping[str, Any], ...] = (options or {},)
        else:
            each = tuple(options)
            if len(each) != num_endpoints:
                raise ConfigurationError(
                    f"actor_options has {len(each)} mappings for {num_endpoints} endpoints; give "
                    "one for each, or a single mapping for all of them"
                )
        each = tuple({**resources, **options} for options in each)
        if isinstance(where, str) and where in {"near", "spread"}:
            return cls(where, each)
        if isinstance(where, str) or not isinstance(where, Sequence):
            raise ConfigurationError(
                f"placement={where!r} is neither 'near' nor 'spread' nor a list of node ids"
            )
        unknown = sorted(set(where) - set(nodes))
        if unknown or not where:
            raise ConfigurationError(
                f"placement={list(where)!r}: {', '.join(unknown) or 'an empty list'} names no node "
                f"that is alive; the cluster has: {', '.join(sorted(nodes))}"
            )
        return cls(tuple(where), each)

    def options_of(self, index: int) -> dict[str, Any]:
        given = self.options[index % len(self.options)]
        if not isinstance(self.where, str):
            # Soft: when the node is lost, its endpoints restart elsewhere.
            node_id = self.where[index % len(self.where)]
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
            return {"scheduling_strategy": strategy, **given}
        if self.where == "spread":
            return {"scheduling_strategy": "SPREAD", **given}
        return {**OUTSIDE, **given}

    def is_near(self, index: int) -> bool:
        """Return whether the endpoint at ``index`` moves to the node of its first runner."""
        given = self.options[index % len(self.options)]
        return self.where == "near" and not PLACES.intersection(given)


def require_resources(
    actor_options: object, *, is_per_endpoint: bool = False, **amounts: object
) -> None:
    """Require that the options and resources (``amounts``) of actors are such as Ray takes."""
    for name, amount in amounts.items():
        if (
            isinstance(amount, bool)
            or not isinstance(amount, Real)
            or not 0 <= float(amount) < math.inf
        ):
            raise ConfigurationError(f"{name}={amount!r:.40} must be a number, 0 or more")
    each = actor_options if is_per_endpoint and isinstance(actor_options, (list, tuple)) else None
    for options in (actor_options,) if each is None else each:
        if not isinstance(options, (Mapping, NoneType)):
            raise ConfigurationError(
                f"actor_options={actor_options!r:.40} must be a mapping of Ray's options"
            )


def checked_addresses(
    addresses: Sequence[str] | None, count: int, what: str
) -> tuple[str, ...] | None:
    """Return the addresses that ``count`` actors listen on; None: each chooses a free port."""
    if addresses is None:
        return None
    if isinstance(addresses, str) or len(addresses) != count:
        raise ConfigurationError(
            f"addresses={addresses!r} must be a list of {count}, one for each {what}"
        )
    if len(set(addresses)) < count:
        raise ConfigurationError(
            f"addresses={list(addresses)!r}: each {what} needs a port of its own; leave addresses "
            f"out, and every {what} takes a free one"
        )
    return tuple(addresses)


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    needs = {name: float(options.get(option) or 0.0) for name, option in named.items()}
    needs |= {name: float(amount) for name, amount in (options.get("resources") or {}).items()}
    return {name: amount for name, amount in needs.items() if amount > 0.0}


def fits(needs: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) + _ROUNDING >= amount for name, amount in needs.items())


def node_resources() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def may_grow() -> bool:
    """Return whether nodes may be added automatically, by Ray's autoscaler or Kubernetes.

    Ray has no single flag for that. Launchers of several node types name the type in a label of
    each node; Ray's older autoscaler names it in its status only.
    """
    if any(_NODE_GROUP_LABEL in node.get("Labels", {}) for node in ray.nodes()):
        return True
    # Without node types, the status lists each node as its own type.
    ids = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not ids.issuperset(autoscaled_node_types())


def is_unplaced(needs: Resources) -> bool:
    if not any(fits(needs, node) for node in node_resources()):
        return True
    pending = pending_bundles()
    if pending is None:
        return not fits(needs, ray.available_resources())
    return any(
        all(abs(bundle.get(name, 0.0) - amount) < _ROUNDING for name, amount in needs.items())
        for bundle in pending
    )


def await_start(
    starting: Sequence[Any],
    what: str,
    options: Sequence[Mapping[str, Any]],
    timeout_s: float,
) -> None:
    """Wait until actors have answered their first call.

    While some of them have no node yet, the log says so after a few seconds, and then every 30 s,
    with what they need and what is free.

    Args:
        starting: The first call to each actor.
        what: Plural name of the actors; ``num_<what>`` is the option with their number.
        options: Ray's options of each actor.
        timeout_s: Time for all of them together.

    Raises:
        RlmeshError: An actor failed.
        EnvStartError: Its ``runtime_env`` could not be set up.
        EndpointUnreachableError: It could not be created.
        CapacityError: The cluster did not place all of them in time.
    """
    deadline_s = time.monotonic() + timeout_s
    notice_s = time.monotonic() + _FIRST_NOTICE_S
    waiting = list(starting)
    options_of = dict(zip(starting, options, strict=False))
    # One at a time: an actor that never gets a node must not hide the failure of another one.
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        ready, waiting = ray.wait(
            waiting, timeout=min(left_s, max(notice_s - time.monotonic(), 0.0))
        )
        _require_success(ready, waiting, what)
        if waiting and time.monotonic() >= notice_s:
            needs = needs_of(options_of[waiting[0]])
            is_reported = is_unplaced(needs)
            if is_reported:
                _LOG.warning(
                    "%d of %d %s have no node yet; %s: %s. The wait ends in %.0f s",
                    len(waiting),
                    len(starting),
                    what,
                    _needed_and_free(needs),
                    _more_room(needs, what),
                    max(deadline_s - time.monotonic(), 0.0),
                )
            notice_s = time.monotonic() + (_NOTICE_EVERY_S if is_reported else _FIRST_NOTICE_S)
    if not waiting:
        return
    late = options_of[waiting[0]]
    needs = needs_of(late)
    remedy = (
        "so they start slowly, or die while they start (see Ray's log): raise start_timeout_s, or "
        "fix the cause"
        if fits(needs, ray.available_resources())
        else f"{_more_room(needs, what)}; where an autoscaler adds nodes, which takes minutes, "
        "raise start_timeout_s"
    )
    raise CapacityError(
        f"{len(waiting)} of {len(starting)} {what} did not start in {timeout_s:g} s; "
        f"{_needed_and_free(needs)}: {remedy}{_further_needs(late)}"
    )


def _require_success(ready: Sequence[Any], waiting: Sequence[Any], what: str) -> None:
    try:
        if any(isinstance(each, Exception) for each in get_outcomes(ready)):
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=_ALIKE_S)
            get_results(ready)
    except ray.exceptions.RuntimeEnvSetupError as error:
        # The texts of Ray's errors end with the cause's traceback.
        cause = str(error).strip().splitlines()[-1]
        raise EnvStartError(
            f"the runtime_env of the {what} cannot be set up: {cause}", str(error)
        ) from error


def _needed_and_free(needs: Resources) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    there = ", ".join(
        f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in needs
    )
    needed = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    return f"each needs {needed or 'no resources'}, and the cluster has {there or 'nodes'} free"


def _more_room(needs: Resources, what: str) -> str:
    options = [{"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, name) for name in needs]
    return (
        f"lower {', '.join(options)} or num_{what}, stop what uses the rest (an algorithm, another "
        "fleet), or add nodes"
    )


def _further_needs(options: Mapping[str, Any]) -> str:
    needs = []
    if options.get("label_selector"):
        needs.append(f"a node with labels {dict(options['label_selector'])}")
    if options.get("runtime_env"):
        needs.append("its runtime_env to be set up, which may take longer than start_timeout_s")
    return f". By actor_options each also needs {', '.join(needs)}" if needs else ""
