import numpy as np
import pytest

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.loading import CallablePolicy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, UpdatablePolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

CONTRACT = EnvContract("Counting-v0", DiscreteSpec(9), DiscreteSpec(9), 2, AutoresetMode.DISABLED)
ROWS = Rows(np.array([3, 4]), [RouteRows("r", [PredictSlot(n, "", 0, False) for n in range(2)])])


def test_the_function_gets_the_batch_and_its_result_is_the_batch_of_actions() -> None:
    policy = CallablePolicy(lambda observations: np.asarray(observations) + 1)

    policy.check_contract(CONTRACT)

    assert np.array_equal(np.asarray(policy.predict(CONTRACT, ROWS)), [4, 5])


def test_what_the_function_raises_is_the_cause_of_a_policy_error() -> None:
    def broken(observations: object) -> object:
        raise KeyError("speed")

    with pytest.raises(PolicyError, match="raised KeyError: 'speed'") as caught:
        CallablePolicy(broken).predict(CONTRACT, ROWS)

    assert isinstance(caught.value.__cause__, KeyError)


def test_a_callable_policy_is_a_policy_and_has_nothing_to_forget() -> None:
    policy = CallablePolicy(len)

    policy.forget("r", None)

    assert isinstance(policy, Policy)
    assert not isinstance(policy, UpdatablePolicy)
    assert ROWS.num_rows == 2
