from pathlib import Path

import pytest
import typer

from rlmesh_ray.cli.options.hyperparameter_args import parse_settings, read_settings_file
from rlmesh_ray.errors import ConfigurationError


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


@pytest.mark.parametrize("text", ["lr", "=3", "", " =3"])
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
