from typing import Any

import pytest
import ray

from rlmesh_ray.compat import ray as of_ray


@pytest.mark.parametrize(
    "part",
    [
        ("ray._private.services", "find_bootstrap_address"),
        ("ray._private.accelerators",),
        ("ray._private.utils", "get_num_cpus"),
    ],
)
def test_the_resources_of_this_machine_are_not_known(part: tuple[str, ...], without: Any) -> None:
    assert of_ray.own_resources() is not None
    without(*part)

    assert of_ray.own_resources() is None


def test_what_is_free_on_a_node_is_not_known(without: Any) -> None:
    without("ray._private.state", "available_resources_per_node")

    assert of_ray.free_resources("a node") == {}


def test_what_waits_for_a_node_is_not_known_without_a_client(
    without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray._private.worker.global_worker, "gcs_client", object(), raising=False)
    without("ray.autoscaler.v2.sdk")

    assert of_ray.pending_bundles() is None


def test_ray_without_its_key_value_store_has_no_older_autoscaler(without: Any) -> None:
    without("ray.experimental.internal_kv")

    assert of_ray.autoscaled_node_types() == set()
