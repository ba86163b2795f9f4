from typing import Any

import pytest
import torch

from rlmesh_ray.actors.model_actor import place_on_device
from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.policy import traits_of

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_module_goes_to_its_device_and_a_function_to_none() -> None:
    module: Any = torch.nn.Linear(4, 2, device="meta")
    moved: list[torch.device] = []
    module.to = moved.append
    place_on_device(module, explore=False, device="cpu")
    assert moved == [torch.device("cpu")]
    module = torch.nn.Linear(4, 2)
    assert place_on_device(module, explore=False, device="auto") is module
    assert place_on_device(len, explore=False, device="auto") is len

    with pytest.raises(ConfigurationError, match="device='cuda' is for checkpoints and torch"):
        place_on_device(len, explore=False, device="cuda")


def test_a_function_gets_the_horizon_that_its_actor_was_given() -> None:
    assert traits_of(place_on_device(len, device="auto", horizon=4)).horizon == 4


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "no such device"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"device={device} .*'cpu'"):
        place_on_device(torch.nn.Linear(4, 2), explore=False, device=device)


def test_a_policy_that_cannot_be_moved_is_a_policy_s_error() -> None:
    # What has no data cannot be copied.
    module = torch.nn.Linear(4, 2, device="meta")

    with pytest.raises(PolicyError, match="could not be moved to cpu: NotImplementedError"):
        place_on_device(module, explore=False, device="cpu")
