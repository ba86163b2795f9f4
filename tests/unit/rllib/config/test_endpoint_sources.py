import pytest
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.errors import AddressError
from rlmesh_ray.rllib.config.endpoint_sources import find_endpoints
from rlmesh_ray.rllib.config.rollout_plan import Access
from rlmesh_ray.rllib.config.session_endpoints import RunnerSpec


def test_a_host_without_a_port_is_refused_before_ray_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "init", lambda: pytest.fail("Ray was started"))

    with pytest.raises(AddressError, match="is an address without a port"):
        find_endpoints(
            PPOConfig(),
            "127.0.0.1",
            RunnerSpec(1, None),
            Access(),
            num_endpoints=None,
            num_evaluation_endpoints=None,
            options={},
        )
