"""Placement options of a fleet, as options of Ray actors."""

import math
from typing import Any

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.model_fleet import ModelFleet
from rlmesh_ray.actors.placement import Placement, require_resources
from rlmesh_ray.errors import ConfigurationError

X, Y, Z = (each * 56 for each in "abc")
"""Ids of nodes."""


def placement(where: Any = "near", options: Any = None, num_endpoints: int = 2) -> Placement:
    return Placement.of(where, {"num_cpus": 0.5}, options, num_endpoints, {X, Y})


def test_endpoints_are_near_by_default_and_in_no_placement_group() -> None:
    placed = placement()

    assert placed.options_of(1) == {"num_cpus": 0.5, "scheduling_strategy": "DEFAULT"}
    assert placed.is_near(1)


def test_cpus_and_gpus_are_reserved_for_each_endpoint() -> None:
    resources = {"num_cpus": 2.0, "num_gpus": 0.5}
    placed = Placement.of("near", resources, {"num_cpus": 1.0}, 1, {X})

    assert {name: placed.options_of(0)[name] for name in resources} == {
        "num_cpus": 1.0,
        "num_gpus": 0.5,
    }


def test_spread_is_the_strategy_spread_of_ray() -> None:
    placed = placement("spread")

    assert placed.options_of(0)["scheduling_strategy"] == "SPREAD"
    assert not placed.is_near(0)


def test_nodes_are_used_in_turn_and_may_be_lost() -> None:
    placed = placement([X, Y])

    strategies = [placed.options_of(index)["scheduling_strategy"] for index in range(3)]
    assert all(isinstance(each, NodeAffinitySchedulingStrategy) for each in strategies)
    assert [each.node_id for each in strategies] == [X, Y, X]
    assert all(each.soft for each in strategies)
    assert not placed.is_near(0)


@pytest.mark.parametrize(
    "options",
    [{"resources": {"arm": 1}}, {"label_selector": {"a": "b"}}, {"scheduling_strategy": "SPREAD"}],
)
def test_options_that_name_nodes_override_near(options: dict[str, Any]) -> None:
    placed = placement(options=options)

    assert not placed.is_near(0)
    assert placed.options_of(0) == {
        "num_cpus": 0.5,
        "scheduling_strategy": "DEFAULT",
        **options,
    }


def test_a_list_of_options_has_one_for_each_endpoint_and_starts_over() -> None:
    placed = placement(options=[{"num_cpus": 1}, {"resources": {"arm": 1}}])

    assert [placed.options_of(index)["num_cpus"] for index in range(3)] == [1, 0.5, 1]
    assert [placed.is_near(index) for index in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"where": "far"}, "neither 'near' nor 'spread'"),
        ({"where": [X, Z]}, f"{Z} names no node that is alive; the cluster has: {X}, {Y}"),
        ({"where": []}, "an empty list"),
        ({"options": [{}]}, "1 mappings for 2 endpoints"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        placement(**arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": -1}, "num_gpus=-1 must be a number, 0 or more"),
        ({"num_cpus": "x"}, "num_cpus='x' must be a number"),
        ({"num_cpus": math.inf}, "num_cpus=inf must be a number"),
        ({"actor_options": 5}, "actor_options=5 must be a mapping of Ray's options"),
        ({"allow_calls": "gravity"}, "allow_calls='gravity' must be several names"),
    ],
)
def test_a_fleet_refuses_resources_and_options_that_ray_would_not_take(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EnvFleet("CartPole-v1", **options)
    if "allow_calls" not in options:
        with pytest.raises(ConfigurationError, match=words):
            ModelFleet("module:factory", name="walkers", **options)


def test_options_may_be_a_list_only_where_each_endpoint_has_its_own() -> None:
    require_resources([{"num_cpus": 1}, {}], is_per_endpoint=True, num_cpus=1.0)

    with pytest.raises(ConfigurationError, match="must be a mapping"):
        require_resources([{}], num_cpus=1.0)
