import dataclasses

import pytest

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.rllib.plan import (
    FixedAddresses,
    RolloutPlan,
    require_same_contract,
    sessions_per_runner,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

CONTRACT = EnvContract("Toy-v0", DiscreteSpec(5), DiscreteSpec(2), 4, AutoresetMode.NEXT_STEP)


def plan(num_endpoints: int, num_runners: int) -> RolloutPlan:
    addresses = FixedAddresses(tuple(f"127.0.0.1:{port}" for port in range(num_endpoints)))
    return RolloutPlan(addresses, CONTRACT, sessions_per_runner(num_endpoints, num_runners))


def test_the_local_runner_takes_every_endpoint() -> None:
    assert plan(3, 0).endpoints_of(0) == (0, 1, 2)
    assert plan(3, 0).lanes_per_runner == 12


def test_endpoints_are_dealt_out_to_remote_runners_without_overlap() -> None:
    assert [plan(4, 2).endpoints_of(worker) for worker in (1, 2)] == [(0, 1), (2, 3)]


def test_more_runners_than_endpoints_share_them() -> None:
    assert [plan(2, 3).endpoints_of(worker) for worker in (1, 2, 3)] == [(0,), (1,), (0,)]


def test_a_runner_beyond_the_planned_ones_starts_again_at_the_first_endpoint() -> None:
    assert plan(2, 2).endpoints_of(3) == (0,)


def test_endpoints_that_cannot_be_spread_evenly_are_refused_with_the_remedy() -> None:
    with pytest.raises(ContractMismatchError, match="multiple of 2 endpoints"):
        sessions_per_runner(3, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"num_envs": 5},
        {"autoreset_mode": AutoresetMode.DISABLED},
        {"observation_space": DiscreteSpec(6)},
        {"action_space": DiscreteSpec(3)},
    ],
)
def test_an_endpoint_that_differs_is_refused_by_name(change: dict[str, object]) -> None:
    other = dataclasses.replace(CONTRACT, **change)  # type: ignore[arg-type]

    with pytest.raises(ContractMismatchError, match=next(iter(change))):
        require_same_contract(CONTRACT, other, "127.0.0.1:1")


def test_names_and_metadata_may_differ() -> None:
    other = dataclasses.replace(CONTRACT, id="Other", metadata={"fps": 3}, render_mode="human")

    require_same_contract(CONTRACT, other, "127.0.0.1:1")
