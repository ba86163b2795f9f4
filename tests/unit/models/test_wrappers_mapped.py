from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError
from rlmesh_ray.models.loading import CallablePolicy
from rlmesh_ray.models.policy import (
    Policy,
    PolicyTraits,
    RouteRows,
    Rows,
    UpdatablePolicy,
    traits_of,
)
from rlmesh_ray.models.wrappers import MappedPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.observation_map import ObservationMap
from rlmesh_ray.spaces.spec import DictSpec, DiscreteSpec

POSE = from_gymnasium(spaces.Box(-1, 1, (2,), np.float32))
COUNT = from_gymnasium(spaces.Box(0, 9, (2,), np.int64))
ARM = DictSpec((("agent_pos", POSE), ("count", COUNT)))
CONTRACT = EnvContract("Arm-v0", ARM, DiscreteSpec(2), 2, AutoresetMode.DISABLED)
ROWS = Rows(
    {"agent_pos": np.ones((2, 2), np.float32), "count": np.array([[1, 2], [3, 4]])},
    [RouteRows("r", [PredictSlot(lane, "", 0, False) for lane in range(2)])],
)
STATE = ObservationMap(["state=agent_pos"])


class Recorder:
    """A policy that keeps what it is called with."""

    traits = PolicyTraits(is_repeatable=True, only_computes=True, kind="recorder")

    def __init__(self, traits: PolicyTraits = traits) -> None:
        self.traits = traits
        self.calls: list[Any] = []

    def check_contract(self, contract: EnvContract) -> None:
        self.calls.append(contract)
        if contract.id == "Other-v0":
            raise ContractMismatchError("the policy needs other spaces")

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self.calls.append((contract, rows))
        return np.zeros(rows.num_rows, np.int64)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.calls.append((route_key, env_index))


class Learner(Recorder):
    def get_weights(self) -> object:
        return "weights"

    def set_weights(self, weights: object) -> None:
        self.calls.append(weights)


def test_the_policy_gets_mapped_observations_and_their_space() -> None:
    policy = Recorder()
    mapped = MappedPolicy(policy, STATE)

    mapped.check_contract(CONTRACT)
    actions = mapped.predict(CONTRACT, ROWS)
    mapped.forget("r", 1)

    checked, (contract, rows), forgotten = policy.calls
    assert checked == contract
    assert contract.observation_space == DictSpec((("state", POSE),))
    assert contract.action_space == CONTRACT.action_space
    assert list(rows.observations) == ["state"]
    assert rows.routes is ROWS.routes
    assert forgotten == ("r", 1)
    assert isinstance(actions, np.ndarray)


@pytest.mark.parametrize(("inner", "is_updatable"), [(Recorder, False), (Learner, True)])
def test_weights_can_be_replaced_where_those_of_the_policy_can(
    inner: type[Recorder], is_updatable: bool
) -> None:
    policy = inner()
    mapped = MappedPolicy(policy, STATE)

    assert isinstance(mapped, Policy)
    assert isinstance(mapped, UpdatablePolicy) is is_updatable
    if isinstance(mapped, UpdatablePolicy):
        mapped.set_weights("new")
        assert (mapped.get_weights(), policy.calls) == ("weights", ["new"])


def test_traits_are_those_of_the_policy_but_for_the_observations() -> None:
    known = PolicyTraits(only_computes=True, observation_space=DictSpec((("state", POSE),)))
    mapped = MappedPolicy(Recorder(known), STATE)

    before = traits_of(mapped)
    mapped.check_contract(CONTRACT)
    after = traits_of(mapped)

    assert (before.only_computes, before.is_repeatable, before.kind) == (True, False, "Recorder")
    assert before.observation_space is None
    assert before.observation_map == ("state = agent_pos: ? -> float32 (2,)",)
    assert after.observation_map == ("state = agent_pos: float32 (2,) -> float32 (2,)",)


def test_keys_that_the_policy_lacks_are_refused_at_once() -> None:
    known = PolicyTraits(observation_space=DictSpec((("states", POSE),)))

    with pytest.raises(ConfigurationError, match="did you mean states"):
        MappedPolicy(Recorder(known), STATE)


def test_a_known_space_is_completed_with_the_clients_leaves() -> None:
    space = DictSpec((("count", COUNT), ("state", POSE)))
    policy = Recorder(PolicyTraits(observation_space=space))
    mapped = MappedPolicy(policy, STATE)

    mapped.check_contract(CONTRACT)
    mapped.predict(CONTRACT, ROWS)

    assert policy.calls[0].observation_space == space
    assert list(policy.calls[1][1].observations) == ["count", "state"]


def test_an_environment_that_the_map_does_not_fit_is_refused() -> None:
    mapped = MappedPolicy(Recorder(), ObservationMap(["x=resize(agent_pos,4,4)"]))

    with pytest.raises(ContractMismatchError, match=r"map does not fit Arm-v0: .*uint8 images"):
        mapped.check_contract(CONTRACT)


def test_a_policy_that_refuses_what_the_map_makes_is_quoted_with_the_map() -> None:
    mapped = MappedPolicy(Recorder(), STATE)
    other = EnvContract("Other-v0", ARM, DiscreteSpec(2), 2, AutoresetMode.DISABLED)

    with pytest.raises(ContractMismatchError) as caught:
        mapped.check_contract(other)

    assert str(caught.value) == (
        "the policy needs other spaces; the observation map has made: state = agent_pos: "
        "float32 (2,) -> float32 (2,)"
    )


def test_a_number_that_a_cast_cannot_hold_fails_the_prediction() -> None:
    mapped = MappedPolicy(CallablePolicy(len), ObservationMap(["x=cast(count,uint8)"]))
    rows = ROWS._replace(observations={"count": np.array([[1, 2], [3, 400]])})

    with pytest.raises(PolicyError, match=r"the observation map failed: .*400 cannot be held"):
        mapped.predict(CONTRACT, rows)
