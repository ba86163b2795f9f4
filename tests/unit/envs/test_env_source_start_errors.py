from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Discrete

from rlmesh_ray.envs.env_source import build, explain_start_error, make_source
from rlmesh_ray.errors import ConfigurationError


def raised_by_make(env_id: str) -> Exception:
    with pytest.raises(
        (gymnasium.error.Error, ImportError), match=r"no_such|CartPol|thermostat"
    ) as caught:
        gymnasium.make(env_id)
    return caught.value


def test_a_misspelt_id_is_explained_with_gymnasium_s_suggestion() -> None:
    text = explain_start_error(raised_by_make("CartPol-v1"))

    assert "Did you mean: `CartPole`?" in text
    assert "module:Env-v0" in text


def test_a_plain_word_is_explained_with_the_forms_of_names() -> None:
    text = explain_start_error(raised_by_make("thermostat"))

    assert "namespace/Name-v0" in text
    assert "module:factory" in text


def test_a_missing_module_is_explained_with_what_to_do() -> None:
    text = explain_start_error(raised_by_make("no_such_module:Env-v0"))

    assert "no_such_module" in text
    assert "start in the module's folder" in text
    assert "PYTHONPATH" in text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigurationError("say it\nin one line"), "say it in one line"),
        (ValueError("bad\n  value"), "ValueError: bad value"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_explanation_is_one_line(error: BaseException, text: str) -> None:
    assert explain_start_error(error) == text


def fail_in_own_code() -> None:
    assert gymnasium.make("CartPole-v1").unwrapped.spec is None


def call_wrongly() -> None:
    gymnasium.make("CartPole-v1", no_such_keyword=1)


@pytest.mark.parametrize("function", [fail_in_own_code, call_wrongly])
def test_the_line_of_the_users_own_code_is_named(function: Any) -> None:
    with pytest.raises((AssertionError, TypeError)) as caught:
        function()

    line = function.__code__.co_firstlineno + 1
    assert explain_start_error(caught.value).endswith(
        f", in {function.__name__} ({__file__}:{line})"
    )


class Complete(gymnasium.Env[Any, Any]):
    observation_space = action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {}


class WithoutSpace(Complete):
    action_space: Any = None


class WithTextAsSpace(Complete):
    observation_space: Any = "two"


class OldReset(Complete):
    def reset(self) -> Any:  # type: ignore[override]
        return 0


class WithoutStep(gymnasium.Env[Any, Any]):
    observation_space = action_space = Discrete(2)


class Adapted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes an old environment one of gymnasium's."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset(), {}


class HidingItself(Complete):
    """Its ``unwrapped`` is a simulator's own object."""

    unwrapped: Any = object()


class StepGiven(WithoutStep):
    def __init__(self) -> None:
        self.step = Complete().step  # type: ignore[method-assign]

    reset = Complete.reset


@pytest.mark.parametrize(
    "factory",
    [lambda: gymnasium.wrappers.TimeLimit(Adapted(OldReset()), 9), HidingItself, StepGiven],
)
def test_environments_that_are_complete_in_unusual_ways_are_accepted(factory: Any) -> None:
    build(make_source(factory)).close()


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        (WithoutSpace, "has no action_space; set it to a gymnasium.Space"),
        (WithTextAsSpace, "has 'two' as observation_space"),
        (OldReset, "does not take seed and options: define reset"),
        (lambda: gymnasium.wrappers.TimeLimit(OldReset(), 9), "does not take seed and options"),
        (WithoutStep, "has no step"),
    ],
)
def test_an_environment_that_is_incomplete_is_refused_before_its_first_reset(
    factory: Any, cause: str
) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        build(make_source(factory))
    build(make_source(Complete)).close()
