"""Check that the actors of an algorithm fit into the Ray cluster, beside its endpoints.

RLlib waits without end, and logs nothing, for actors that Ray cannot place.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.placement import Resources, fits, may_grow, node_resources
from rlmesh_ray.compat.ray import own_resources
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.config_checks import is_tune_param

_SETTLE_S = 2.0
"""How long resources may take to become free after an algorithm or a fleet was stopped."""
_LOOK_EVERY_S = 0.2
_ROUNDING = 1e-4

_SETTINGS = (
    "num_env_runners",
    "num_cpus_per_env_runner",
    "num_gpus_per_env_runner",
    "custom_resources_per_env_runner",
    "evaluation_num_env_runners",
    "evaluation_config",
    "num_learners",
    "num_cpus_per_learner",
    "num_gpus_per_learner",
    "custom_resources_per_learner",
    "num_aggregator_actors_per_learner",
)


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """Actors that need the same resources, each on one node."""

    name: str
    count: int
    each: Resources
    settings: str
    """The options that set the number and the resources, for messages."""

    def __str__(self) -> str:
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in self.each.items())
        return f"{self.count} {self.name} with {amounts}" + (" each" if self.count > 1 else "")


def find_shortage(groups: Iterable[ActorGroup], nodes: Sequence[Resources]) -> str | None:
    """Return why these actors can never run at the same time; None: they may fit.

    The sum of each resource is compared with that of all nodes, and each actor with single nodes.

    Args:
        groups: All actors that run at the same time.
        nodes: The resources of each node.
    """
    wanted = [group for group in groups if group.count and group.each]
    for name in dict.fromkeys(name for group in wanted for name in group.each):
        needed = _sum_of(name, wanted)
        there = sum(node.get(name, 0.0) for node in nodes)
        if needed > there + _ROUNDING:
            listed = ", ".join(map(str, wanted))
            return f"{listed} need {needed:g} {name}, and there are {there:g}"
    for group in wanted:
        if not any(fits(group.each, node) for node in nodes):
            return f"of {group}, none can be placed, since each needs it on one node"
    return None


def _sum_of(name: str, groups: Iterable[ActorGroup]) -> float:
    return sum(group.count * group.each.get(name, 0.0) for group in groups)


def actor_groups(config: AlgorithmConfig) -> Iterator[ActorGroup]:
    """Yield the actors that RLlib starts for a config; parts that run in the driver need none."""
    yield _runners("EnvRunner(s)", config, config.num_env_runners, "num_env_runners")
    if config.evaluation_num_env_runners:
        own = config.get_evaluation_config_object()
        group = _runners(
            "evaluation EnvRunner(s)",
            own,
            config.evaluation_num_env_runners,
            "evaluation_num_env_runners",
        )
        yield replace(group, settings=f"{group.settings} in evaluation_config")
    num_learners = int(config.num_learners or 0)
    gpus, cpus = config.num_gpus_per_learner, config.num_cpus_per_learner
    if cpus == "auto":
        cpus = 0 if gpus else 1
    needs = _needs(cpus, gpus, config.custom_resources_per_learner)
    settings = f"num_learners, {_options('learner', needs)}"
    yield ActorGroup("Learner(s)", num_learners, needs, settings)
    yield ActorGroup(
        "aggregator actor(s)",
        max(num_learners, 1) * int(config.num_aggregator_actors_per_learner or 0),
        {"CPU": 1.0},
        "num_aggregator_actors_per_learner",
    )


def _runners(name: str, config: AlgorithmConfig, count: int | None, setting: str) -> ActorGroup:
    needs = _needs(
        config.num_cpus_per_env_runner,
        config.num_gpus_per_env_runner,
        config.custom_resources_per_env_runner,
    )
    return ActorGroup(name, int(count or 0), needs, f"{setting}, {_options('env_runner', needs)}")


def _needs(cpus: float, gpus: float, custom: Resources | None) -> dict[str, float]:
    amounts = {"CPU": cpus, "GPU": gpus, **(custom or {})}
    return {name: float(amount) for name, amount in amounts.items() if amount > 0}


def _options(kind: str, needs: Resources) -> str:
    options = {"CPU": f"num_cpus_per_{kind}", "GPU": f"num_gpus_per_{kind}"}
    names = (options.get(name, f"custom_resources_per_{kind}") for name in needs)
    return ", ".join(dict.fromkeys(names))


def endpoint_groups(fleets: Iterable[EnvFleet]) -> Iterator[ActorGroup]:
    every = [each for fleet in fleets for each in fleet.resources]
    for index, each in enumerate(every):
        if every.index(each) == index:
            yield ActorGroup("endpoint(s)", every.count(each), each, "EnvFleet(num_cpus=...)")


def capacity_warnings(config: AlgorithmConfig, fleets: Iterable[EnvFleet] = ()) -> Iterator[str]:
    """Compare the resources of an algorithm and its endpoints with those of the cluster.

    Before Ray runs, they are compared with this machine's, where ``build_algo`` would start Ray.
    Nothing is checked for settings that Tune has yet to choose, and within a placement group,
    which has its own resources.

    Args:
        config: The complete config.
        fleets: The fleets it samples from, which hold their resources as long as it trains.

    Yields:
        A warning, if the actors cannot be placed now, or the cluster is not known yet.

    Raises:
        ConfigurationError: They never can, and the cluster has no autoscaler.
    """
    if is_tune_param(config, *_SETTINGS):
        return
    groups = list(actor_groups(config))
    if not any(group.count for group in groups):
        return
    if not ray.is_initialized():
        yield from _warnings_before_ray_runs(groups)
        return
    if ray.util.get_current_placement_group() is not None:
        return
    endpoints, nodes = list(endpoint_groups(fleets)), node_resources()
    shortage = find_shortage([*groups, *endpoints], nodes)
    if shortage is not None:
        remedy = remedy_for([*groups, *endpoints], nodes)
        if not may_grow():
            raise ConfigurationError(
                f"build_algo would wait without end: {shortage} in the cluster; {remedy}"
            )
        yield (
            f"{shortage} in the cluster now: build_algo waits, and logs nothing, until there are "
            f"more nodes; {remedy}"
        )
        return
    shortage = _shortage_now(groups)
    if shortage is not None:
        yield (
            f"{shortage} free in the cluster now: build_algo waits, and logs nothing, until "
            "the holder of the rest (another algorithm, trial or fleet) ends; end it first, or "
            f"lower {_settings(groups)}"
        )


def _warnings_before_ray_runs(groups: Sequence[ActorGroup]) -> Iterator[str]:
    machine = own_resources()
    if machine is None:
        yield (
            "Ray does not run in this program yet, so whether its cluster has room for "
            f"{', '.join(str(group) for group in groups if group.count)} is not known, and "
            "build_algo waits without a word if it has not; call ray.init() before configure"
        )
        return
    shortage = find_shortage(groups, [machine])
    if shortage is not None:
        raise ConfigurationError(
            f"build_algo would start Ray on this machine and wait without end: {shortage}; "
            f"{remedy_for(groups, [machine])}; to use a cluster, call "
            "ray.init(address=...) before configure"
        )


def remedy_for(groups: Sequence[ActorGroup], nodes: Sequence[Resources]) -> str:
    remedy = f"lower {_settings(groups)}, or add nodes"
    cpus = _sum_of("CPU", groups)
    if cpus <= sum(node.get("CPU", 0.0) for node in nodes):
        return remedy
    return (
        f"{remedy}; a Ray that runs on this machine alone can claim more CPUs than there are: "
        f"ray.init(num_cpus={math.ceil(cpus)})"
    )


def _settings(groups: Iterable[ActorGroup]) -> str:
    return ", ".join(dict.fromkeys(group.settings for group in groups if group.count))


def _shortage_now(groups: Sequence[ActorGroup]) -> str | None:
    """Return the shortage of resources that are free, or become free within a moment."""
    deadline_s = time.monotonic() + _SETTLE_S
    # Ray gives a driver the sum of free resources only, not those of each node.
    while shortage := find_shortage(groups, [ray.available_resources()]):
        if time.monotonic() > deadline_s:
            return shortage
        time.sleep(_LOOK_EVERY_S)
    return None
