from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.options import EvaluationOptions, checked_seed
from rlmesh_ray.evaluation.run import evaluate
from rlmesh_ray.options import completed


@pytest.mark.parametrize(
    ("episodes", "seed"), [(1, None), (1, 0), (1, 2**63 - 1), (10, 2**63 - 10)]
)
def test_seeds_of_64_bits_are_valid(episodes: int, seed: int | None) -> None:
    assert checked_seed(episodes, seed) == seed


@pytest.mark.parametrize(
    ("episodes", "seed", "message"),
    [
        (0, None, "episodes=0 must be at least 1"),
        (20, -4, f"seed=-4 .* -4 to 15; give one from 0 to {2**63 - 20}, or none"),
        (2, 2**63 - 1, f"to {2**63}; give one from 0 to {2**63 - 2}"),
    ],
)
def test_other_seeds_are_refused_before_anything_is_dialed(
    episodes: int, seed: int | None, message: str
) -> None:
    from rlmesh_ray.actors import evaluate_on_ray  # Ray takes its time to import

    for run in (evaluate, evaluate_on_ray):
        with pytest.raises(ConfigurationError, match=message):
            run("absent:1", "absent:2", episodes=episodes, seed=seed)


@pytest.mark.parametrize("number", [1.5, 2.0, True, "a", np.float64(1), np.bool_(True), [1]])
@pytest.mark.parametrize("name", ["episodes", "seed"])
def test_an_option_that_is_no_whole_number_is_refused_by_name(name: str, number: Any) -> None:
    arguments = {"episodes": 1, name: number}

    with pytest.raises(ConfigurationError, match=rf"^{name}=.* must be a whole number$"):
        evaluate("absent:1", "absent:2", **arguments)


def test_integers_of_numpy_are_whole_numbers_and_seeds_become_plain_ones() -> None:
    most = np.int8(127)
    seed = checked_seed(most, most)  # type: ignore[arg-type]  # their sum is beyond 8 bits

    assert type(seed) is int
    assert seed == 127


@pytest.mark.parametrize(
    "value", ["x", True, None, 0, -1.0, float("nan"), float("inf"), 10**400, np.float32(-1)]
)
@pytest.mark.parametrize("name", ["step_timeout_s", "reset_timeout_s"])
def test_an_option_that_is_no_time_above_zero_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}=.* finite .* seconds above 0$"):
        evaluate("absent:1", "absent:2", episodes=1, **{name: value})


@pytest.mark.parametrize("value", [0.5, 60, np.float32(0.5), np.int64(60), Fraction(1, 2)])
def test_any_real_number_is_a_time(value: Any) -> None:
    given = EvaluationOptions(
        step_timeout_s=value, reset_timeout_s=value, reconnect_timeout_s=value
    )
    assert completed("evaluate", EvaluationOptions, given)["step_timeout_s"] == value


@pytest.mark.parametrize("value", ["x", False, -1, float("nan")])
def test_the_reconnect_timeout_may_be_zero(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^reconnect_timeout_s=.* seconds, 0 or more$"):
        evaluate("absent:1", "absent:2", episodes=1, reconnect_timeout_s=value)

    given = EvaluationOptions(reconnect_timeout_s=0)
    assert completed("evaluate", EvaluationOptions, given)["reconnect_timeout_s"] == 0


@pytest.mark.parametrize(
    ("gone", "instead"),
    [
        ("env_timeout_s", "give step_timeout_s"),
        ("model_timeout_s", "give step_timeout_s"),
        ("model_token", r"ConnectOptions\(address, token\)"),
        ("max_interruptions", "more than 5 times"),
    ],
)
def test_an_option_that_has_left_is_named_with_what_to_give_instead(
    gone: str, instead: str
) -> None:
    with pytest.raises(TypeError, match=rf"takes no '{gone}' any more: .*{instead}"):
        evaluate("absent:1", "absent:2", episodes=1, **{gone: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", ["-4", str(2**63)])
def test_invalid_values_are_wrong_usage_of_the_command(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["evaluate", "--env", "CartPole-v1", "--model", "no:where", "--seed", seed])

    assert code == 2
    assert "error: seed=" in (error := capsys.readouterr().err)
    assert "give one from 0 to" in error
