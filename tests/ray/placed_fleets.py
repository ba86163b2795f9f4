"""Fleets on a cluster of three nodes: ``python -m tests.ray.placed_fleets``.

It says a line of JSON for each thing that it has tried; nodes are called "head", "left" and
"right". A process of its own: a test that is connected to one Ray cannot join another.
"""

import json
import logging
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus
from tests.loopback.eventually import eventually

_ENV = "CartPole-v1"


@ray.remote(num_cpus=0)
class Runner:
    """Claims assignments and uses them, where it is."""

    def sit(self, resolver: Any, session: str, index: int) -> str:
        """Open an environment at an assigned endpoint; return the endpoint's id."""
        assignment = resolver.assign(session, index, ray.get_runtime_context().get_node_id())
        env = RemoteVectorEnv(assignment.address, token=assignment.token)
        env.reset(seed=0)
        env.step(np.zeros(1, np.int64))
        env.close()
        return str(assignment.endpoint_id)


@ray.remote(num_cpus=2)
class Blocker:
    """Takes the room of a node."""


class Nodes:
    """A head with room for four endpoints, and two nodes with room for two each."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
        )
        left = self.cluster.add_node(num_cpus=2)
        self.right = self.cluster.add_node(num_cpus=2, resources={"arm": 1})
        ray.init(self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        self.ids = {
            "head": self.cluster.head_node.node_id,
            "left": left.node_id,
            "right": self.right.node_id,
        }
        self._names = {node_id: name for name, node_id in self.ids.items()}
        self._runners = {name: self._at(name, Runner) for name in self.ids}

    def _at(self, name: str, actor_class: Any) -> Any:
        there = NodeAffinitySchedulingStrategy(self.ids[name], soft=False)
        return actor_class.options(scheduling_strategy=there).remote()

    def reported(self, fleet: EnvFleet) -> list[EndpointStatus]:
        """Return what the registry knows of a fleet's endpoints, also of those that are lost."""
        by_id = {each.endpoint_id: each for each in ray.get(find_registry().overview.remote())}
        return [by_id[each] for each in fleet.resolver.endpoint_ids]

    def where(self, fleet: EnvFleet) -> list[str]:
        """Return the names of the nodes where a fleet's endpoints are."""
        return [self._names[each.node] for each in self.reported(fleet)]

    def sit(self, fleet: EnvFleet, name: str, index: int) -> None:
        """Use an endpoint of a fleet from a node."""
        session = f"{name}/{index}"
        granted = ray.get(self._runners[name].sit.remote(fleet.resolver, session, index))
        if granted != fleet.resolver.endpoint_ids[index]:
            raise AssertionError(f"{session} was granted {granted}")

    def fleet_on_head(self, num_endpoints: int) -> EnvFleet:
        """Start a fleet while the other nodes are full; then they are empty again."""
        blockers = [self._at(name, Blocker) for name in ("left", "right")]
        ray.get([each.__ray_ready__.remote() for each in blockers])
        fleet = EnvFleet(_ENV, num_endpoints=num_endpoints)
        for each in blockers:
            ray.kill(each)
        assert eventually(lambda: ray.available_resources()["CPU"] == 8 - num_endpoints)
        return fleet

    def stop(self) -> None:
        """End everything."""
        ray.shutdown()
        self.cluster.shutdown()


def try_named_nodes(nodes: Nodes) -> None:
    """Endpoints are where they were placed, and stay there."""
    with EnvFleet(_ENV, num_endpoints=2, placement=[nodes.ids["head"]]) as fleet:
        nodes.sit(fleet, "left", 0)
        say("named nodes", nodes=nodes.where(fleet))


def try_spread(nodes: Nodes) -> None:
    """Endpoints are on all nodes."""
    with EnvFleet(_ENV, num_endpoints=3, placement="spread") as fleet:
        say("spread", nodes=sorted(nodes.where(fleet)))


def try_near(nodes: Nodes) -> None:
    """Endpoints come to the first runner that claims them, unless they are in use."""
    with nodes.fleet_on_head(3) as fleet:
        say("started", nodes=nodes.where(fleet))
        env = RemoteVectorEnv(fleet.addresses[2], token=fleet.tokens[2])
        env.reset(seed=0)
        nodes.sit(fleet, "right", 0)
        say("brought", nodes=nodes.where(fleet))
        nodes.sit(fleet, "left", 0)
        say("claimed again", nodes=nodes.where(fleet))
        nodes.sit(fleet, "left", 2)
        env.step(np.zeros(1, np.int64))
        env.close()
        say("in use", nodes=nodes.where(fleet))
        nodes.sit(fleet, "head", 1)
        nodes.sit(fleet, "right", 1)
        reported = [each.restarts + 1 for each in nodes.reported(fleet)]
        say("settled", nodes=nodes.where(fleet), incarnations=reported)
        ray.kill(fleet.actors[0], no_restart=False)
        assert eventually(lambda: nodes.reported(fleet)[0].restarts == 2)
        say("restarted", nodes=nodes.where(fleet))


def try_full_node(nodes: Nodes) -> None:
    """Who finds no room stays where it is, and can be used."""
    with nodes.fleet_on_head(3) as fleet:
        for index in range(3):
            nodes.sit(fleet, "left", index)
        say("full", nodes=nodes.where(fleet))


def try_resources(nodes: Nodes) -> None:
    """Who says what endpoints need says where they are."""
    with EnvFleet(_ENV, actor_options={"resources": {"arm": 1}}) as fleet:
        nodes.sit(fleet, "left", 0)
        say("resources", nodes=nodes.where(fleet))


def try_lost_node(nodes: Nodes) -> None:
    """An endpoint that was brought to a node is not bound to it."""
    with nodes.fleet_on_head(1) as fleet:
        nodes.sit(fleet, "right", 0)
        say("before the loss", nodes=nodes.where(fleet))
        nodes.cluster.remove_node(nodes.right, allow_graceful=False)
        assert eventually(lambda: nodes.where(fleet) != ["right"])
        nodes.sit(fleet, "left", 0)
        say("after the loss", nodes=nodes.where(fleet))


def say(what: str, **facts: object) -> None:
    """Write a line."""
    print(json.dumps({"what": what, **facts}), flush=True)  # noqa: T201  # this is a program


def main() -> None:
    """Try everything."""
    nodes = Nodes()
    try:
        try_named_nodes(nodes)
        try_spread(nodes)
        try_near(nodes)
        try_full_node(nodes)
        try_resources(nodes)
        try_lost_node(nodes)
    finally:
        nodes.stop()


if __name__ == "__main__":
    main()
