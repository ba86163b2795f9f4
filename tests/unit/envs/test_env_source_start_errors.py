import gymnasium
import pytest

from rlmesh_ray.envs.env_source import explain_start_error
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
