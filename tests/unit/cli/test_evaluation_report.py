from pathlib import Path

import pytest

from rlmesh_ray.cli.evaluation_report import output_file
from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import ConfigurationError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--env-timeout", "0"),
        ("--env-timeout", "inf"),
        ("--model-timeout", "-1"),
        ("--reconnect-timeout", "nan"),
    ],
)
def test_impossible_deadlines_are_wrong_usage(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "--env", "a:1", "--model", "b:1", f"{option}={value}"]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert option in line
    assert "finite number of seconds" in line


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text("precious")

    with pytest.raises(ConfigurationError, match="name another file"), output_file(path):
        pass

    assert path.read_text() == "precious"


def test_a_file_without_episodes_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with pytest.raises(ZeroDivisionError), output_file(path):
        raise ZeroDivisionError

    assert not path.exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "episodes.jsonl"

    with pytest.raises(ConfigurationError, match="nowhere"), output_file(path):
        pass
