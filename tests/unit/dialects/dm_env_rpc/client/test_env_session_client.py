"""What a dm_env_rpc session does with values that are no values of their space."""

import logging
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.dialects.dm_env_rpc.client.env_session_client import ValueCheck
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import WARNING_KEY, ValidationMode
from rlmesh_ray.spaces.vector_infos import lane_entries
from rlmesh_ray.testing.equality import assert_identical

SPACE = spaces.Dict(
    {"at": spaces.Box(-1.0, 1.0, (2,), np.float32), "kind": spaces.Discrete(3, start=5)}
)


def check(policy: ValidationMode = ValidationMode.WARN) -> ValueCheck:
    return ValueCheck(from_gymnasium(SPACE), 2, policy, "dm_env_rpc://h:1")


def columns(at: float = 0.0, kind: int = 5) -> list[Any]:
    """Return an observation of two lanes; lane 1 has what is given."""
    return [np.array([[0, 0], [0, at]], np.float32), np.array([5, kind])]


def rewards(second: float) -> Any:
    return np.array([1.0, second])


@pytest.mark.parametrize("policy", ValidationMode)
def test_values_within_their_space_are_nothing_to_tell(policy: ValidationMode) -> None:
    one = check(policy)

    assert one.check(columns(1.0), rewards(-1e300)) == {}
    assert one.check(columns(-1.0)) == {}


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_by_default_each_is_reported_once_and_counted_each_time(
    reward: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = check()

    first = one.check(columns(2.0), rewards(reward))
    later = [one.check(columns(-3.0), rewards(reward)) for _ in range(2)]
    one.summarize()

    texts = [
        "observation.at: 2.0 is above 1.0 (lane 1, element (1,))",
        f"reward: {reward} is not finite (lane 1)",
    ]
    assert_identical(first, lane_entries(WARNING_KEY, {1: texts}, 2))
    assert later == [{}, {}]
    assert len(caplog.messages) == 3
    assert "dm_env_rpc://h:1 sent a value out of range, which is delivered: obs" in caplog.text
    assert "validation='strict'" in caplog.text
    assert "6 values out of range in this session" in caplog.messages[-1]


def test_a_session_that_has_reported_everything_needs_no_sum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = check()
    one.check(columns(2.0))
    with caplog.at_level(logging.WARNING):
        one.summarize()

    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("at", "reward", "reason"),
    [
        (2.0, 0.0, r"sent observation\.at: 2.0 is above 1.0 \(lane 1"),
        (0.0, np.nan, r"sent reward: nan is not finite \(lane 1\)"),
        (0.0, -np.inf, r"sent reward: -inf is not finite \(lane 1\)"),
    ],
)
def test_strict_refuses_them_with_the_remedy(at: float, reward: float, reason: str) -> None:
    with pytest.raises(RemoteEnvError, match=reason + r".*validation='warn'") as caught:
        check(ValidationMode.STRICT).check(columns(at), rewards(reward))

    assert (caught.value.code, caught.value.is_recoverable) == ("INTERNAL", False)


def test_off_does_not_look_at_ranges() -> None:
    one = check(ValidationMode.OFF)

    assert one.check(columns(2.0), rewards(np.nan)) == {}


@pytest.mark.parametrize("policy", ValidationMode)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (columns(np.nan), r"at: is NaN \(lane 1, element \(1,\)\)"),
        (columns(kind=8), r"kind: 8 is above 7 \(lane 1\)"),
        (columns(kind=4), r"kind: 4 is below 5 \(lane 1\)"),
    ],
)
def test_what_no_value_of_the_space_can_be_is_refused_with_every_validation_mode(
    policy: ValidationMode, bad: list[Any], reason: str
) -> None:
    with pytest.raises(RemoteEnvError, match=reason + ".*observations=") as caught:
        check(policy).check(bad)

    assert not caught.value.is_recoverable
