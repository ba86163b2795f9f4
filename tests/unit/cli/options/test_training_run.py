import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from ray import cloudpickle
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.cli.options.training_run import (
    edited_config,
    parse_settings,
    read_config_code,
    read_settings_file,
)
from rlmesh_ray.errors import ConfigurationError
from tests.odd_files import IRREGULAR, put


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lr=1e-4", 1e-4),
        ("lr=-2.5E+3", -2500.0),
        ("gamma=0.9", 0.9),
        ("use_critic=true", True),
        ("grad_clip=null", None),
        ("model_config.fcnet_hiddens=[64, 64]", [64, 64]),
        ("lr=[[0, 1e-3], [100, 1e-4]]", [[0, 1e-3], [100, 1e-4]]),
        ("model_config.fcnet_activation=relu", "relu"),
        ("rollout_fragment_length='auto'", "auto"),
        ("name=a=b", "a=b"),
    ],
)
def test_values_are_read_as_json_or_yaml(text: str, value: object) -> None:
    assert list(parse_settings([text]).values()) == [value]


def test_nothing_is_evaluated() -> None:
    assert parse_settings(["a=__import__('os').getcwd()"]) == {"a": "__import__('os').getcwd()"}
    with pytest.raises(typer.BadParameter, match="neither JSON nor YAML"):
        parse_settings(["a=!!python/object/apply:os.getcwd []"])


def test_the_last_one_of_a_name_counts() -> None:
    assert parse_settings(["lr=1", "gamma=1", "lr=2"]) == {"lr": 2, "gamma": 1}


@pytest.mark.parametrize("text", ["lr", "=3", "", " =3", "lr=", "lr= "])
def test_a_text_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not NAME=VALUE"):
        parse_settings([text])


@pytest.mark.parametrize(
    "text", ['{"lr": 1e-4, "training": {"gamma": 0.9}}', "lr: 1e-4\ntraining:\n  gamma: 0.9\n"]
)
def test_a_file_is_json_or_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)

    assert read_settings_file(tmp_path / "file") == {"lr": 1e-4, "training": {"gamma": 0.9}}


@pytest.mark.parametrize("text", ["", "[1]", "7", "{3: 4}", "lr: [", "a: !!python/name:os.system"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)

    with pytest.raises(ConfigurationError, match=r"file (is neither JSON nor YAML|holds no names)"):
        read_settings_file(tmp_path / "file")


def test_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigurationError, match="neither JSON nor YAML"):
        read_settings_file(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="save it as UTF-8"):
        read_config_code(tmp_path / "file")


EDITS = """
from sibling import RATE

class Callbacks:
    name = "of the file"

def edit_config(config):
    config.callbacks_class = Callbacks
    return config.training(lr=RATE)
"""


def test_a_python_file_edits_the_config_with_what_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "sibling.py").write_text("RATE = 0.5")
    file = tmp_path / "edits.py"
    file.write_text(EDITS)

    edited = edited_config(file, PPOConfig())

    assert edited.lr == 0.5
    packed = cloudpickle.dumps(edited.callbacks_class)
    del sys.modules["config_of_edits"]  # a process that reads the checkpoint does not have it
    assert cloudpickle.loads(packed).name == "of the file"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"AttributeError: .*define edit_config\(config\), which returns the config"),
        ("1 / 0", "fails with ZeroDivisionError: division by zero"),
        ("def edit_config(config:", "fails with SyntaxError"),
        ("def edit_config(config): config.gama = 1", "returned None; return the PPOConfig"),
    ],
)
def test_a_python_file_that_edits_no_config_is_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken.py"
    file.write_text(text)

    with pytest.raises(ConfigurationError, match=words):
        edited_config(file, PPOConfig())


@pytest.mark.parametrize("read", [read_settings_file, read_config_code])
@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_a_name_of_anything_but_a_file_is_refused_at_once(
    make: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="config"):
        read(put(make, tmp_path / "config"))
