from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.loading import CallablePolicy, as_policy, load_policy
from rlmesh_ray.models.policy import (
    Policy,
    PolicyTraits,
    RouteRows,
    Rows,
    UpdatablePolicy,
    traits_of,
)
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import DiscreteSpec
from rlmesh_ray.testing.equality import assert_identical

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


def test_random_draws_from_any_action_space_the_same_actions_whatever_the_batches() -> None:
    space = spaces.Dict(move=spaces.Box(-2.0, 2.0, (2,)), grip=spaces.Discrete(3))
    actions = from_gymnasium(space)
    contract = EnvContract("Arm-v0", DiscreteSpec(9), actions, 2, AutoresetMode.DISABLED)
    slot = PredictSlot(0, "", 0, False)
    rows = [Rows(np.zeros(n), [RouteRows("r", [slot] * n)]) for n in (1, 3, 4)]

    policy = load_policy("random")
    policy.check_contract(contract)
    first, rest = (cast(dict[str, Any], policy.predict(contract, each)) for each in rows[:2])
    together = cast(dict[str, Any], load_policy("random").predict(contract, rows[2]))

    for key in ("move", "grip"):
        assert_identical(np.concatenate([first[key], rest[key]]), together[key])
    assert batch_space(space, 4).contains(together)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"inference": "compiled"}, {"horizon": 2}])
def test_random_takes_no_options(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the random policy"):
        load_policy("random", **option)


# --- how many actions at once ----------------------------------------------------------


class Saying:
    """Acts, and says how many actions it chooses at once."""

    def __init__(self, horizon: object) -> None:
        self.horizon = horizon

    def __call__(self, observations: object) -> object:
        return observations


@pytest.mark.parametrize(
    ("said", "given", "horizon"), [(None, None, 1), (4, None, 4), (None, 4, 4), (4, 4, 4)]
)
def test_the_function_or_the_operator_says_how_many_actions(
    said: int | None, given: int | None, horizon: int
) -> None:
    policy = as_policy(Saying(said), horizon=given)

    assert traits_of(policy).horizon == horizon


@pytest.mark.parametrize(
    ("said", "given", "text"),
    [
        (None, 0, "horizon=0 must be a whole number of actions from 1 to 1024; leave it out"),
        (None, 1025, "horizon=1025 must be"),
        (None, 2.5, "horizon=2.5 must be"),
        (None, True, "horizon=True must be"),
        ("far", None, "the attribute horizon of the function: horizon='far' must be"),
        (4, 3, "horizon=3 was given, and the function says 4 itself: leave the option out"),
    ],
)
def test_a_horizon_that_is_none_is_refused(said: object, given: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        as_policy(Saying(said), horizon=given)

    assert text in str(caught.value)


def test_a_policy_says_itself_how_many_actions() -> None:
    class Own(CallablePolicy):
        """A policy of the operator's own."""

    own = Own(len, horizon=4)

    assert traits_of(as_policy(own)).horizon == 4
    assert as_policy(own, horizon=4) is own
    with pytest.raises(ConfigurationError, match=r"Own \(PolicyTraits.horizon\) says 4 itself"):
        as_policy(own, horizon=2)
    own.traits = PolicyTraits(horizon=0)
    with pytest.raises(ConfigurationError, match="horizon=0"):
        as_policy(own)
