import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.cli import local_ray
from rlmesh_ray.cli.main import main
from rlmesh_ray.cli.options.training_run import TrainingRun, claimed, resumed_run, write_run
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
from tests.odd_files import IRREGULAR, NONSENSE, put
from tests.unit.cli.full_disks import room_for

MAKERS = IRREGULAR | NONSENSE


@pytest.mark.parametrize(
    ("env", "cause"),
    [
        ("127.0.0.1", "is an address without a port"),
        ("localhost", "is an address without a port"),
        ("rlmesh://127.0.0.1", "is not an address; write HOST:PORT"),
        ("127.0.0.1:70000", "is above 65535"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_ray_is_started(
    env: str,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(local_ray, "connected_ray", lambda *_, **__: pytest.fail("Ray was started"))

    assert main(["train", env]) == 2

    assert cause in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize("option", [["--env-kwargs", "{}"], ["--reset-threads", "8"]])
def test_an_option_that_does_not_fit_a_running_endpoint_is_named_alone(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "127.0.0.1:1", *option]) == 2

    error = capsys.readouterr().err
    assert option[0] in error
    assert "--num-envs" not in error


SAVED: dict[str, Any] = {
    "env": "CartPole-v1",
    "algo": "PPO",
    "num_envs": 8,
    "num_env_runners": 0,
    "settings": {"lr": 1e-4, "gamma": 0.9},
    "stop_iters": 100,
}


def saved_run(folder: Path, **options: object) -> str:
    (folder / "run.json").write_text(json.dumps({**SAVED, **options}))
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of a command that is wrong usage."""
    assert main(["train", *arguments]) == 2
    return re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "was"),
    [
        (["Pendulum-v1"], 'ENV_OR_ADDRESS was "CartPole-v1"'),
        (["127.0.0.1:1"], 'ENV_OR_ADDRESS was "CartPole-v1"'),
        (["--algo", "dqn"], '--algo was "PPO"'),
        (["--num-envs", "4"], "--num-envs was 8"),
        (["--reset-threads", "8"], "--reset-threads was not given"),
        (["--seed", "1"], "--seed was not given"),
        (["--set", "lr=1e-3"], '--set and --config was {"lr": 0.0001, "gamma": 0.9}'),
    ],
)
def test_an_option_that_contradicts_the_run_is_refused(
    option: list[str], was: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--resume", saved_run(tmp_path), "--keep", "2", *option)

    assert f"was configured in another way: {was}; leave this out to go on with it" in error


def test_options_that_agree_with_the_run_and_later_goals_are_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreeing = ["CartPole-v1", "--algo", "ppo", "--num-envs", "8", "--set", "gamma=0.9"]
    later = ["--stop-return", "400", "--checkpoint-every", "5", "--evaluate-every", "5"]

    # It comes as far as the checkpoint, which this run has not.
    error = refused(capsys, "--resume", saved_run(tmp_path), *agreeing, *later)

    assert "checkpoint is no checkpoint that a training can go on from" in error


def test_a_python_file_runs_only_where_the_command_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved_run(tmp_path, config_code="raise SystemExit('it ran')")
    other = tmp_path / "other.py"
    other.write_text("raise SystemExit('it ran')  # changed")

    assert "give it again: --config FILE.py" in refused(capsys, "--resume", run)
    changed = refused(capsys, "--resume", run, "--config", str(other))
    assert "--config was another file" in changed


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[]",
        "{}",
        json.dumps({**SAVED, "colour": 3}),
        json.dumps({**SAVED, "env": 5}),
        json.dumps({**SAVED, "settings": None}),
        json.dumps({**SAVED, "keep": "3"}),
        json.dumps({**SAVED, "stop_return": "475"}),
        json.dumps({**SAVED, "track": "csv"}),
    ],
)
def test_a_folder_without_a_run_is_not_resumed(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)

    assert "holds no run of this version of train" in refused(capsys, "--resume", str(tmp_path))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_anything_in_place_of_a_run_is_not_resumed(
    make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(make, tmp_path / "run.json")

    assert "holds no run of this version of train" in refused(capsys, "--resume", str(tmp_path))


def test_a_run_is_read_and_written_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    write_run(tmp_path / "own", TrainingRun(**SAVED))
    (tmp_path / "shared").mkdir()
    for name in ("run.json", "run.json.partial"):
        (tmp_path / "shared" / name).symlink_to(tmp_path / "own" / "run.json")

    with pytest.raises(ConfigurationError, match="symbolic link"):
        resumed_run(tmp_path / "shared", TrainingRun())
    write_run(tmp_path / "shared", TrainingRun(**{**SAVED, "stop_iters": 200}))

    assert json.loads((tmp_path / "own" / "run.json").read_text()) == SAVED


def test_a_run_goes_on_in_its_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "--resume", saved_run(tmp_path), "--checkpoint-dir", "other")

    assert "a run goes on in its folder" in error


def saved_iteration(folder: Path) -> None:
    """Have the run in a folder end after one iteration, with a mean return of 20."""
    progress = TrainingProgress(1, 100, 50.0, 20.0, 5, 2.0, 0)
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "training.json").write_text(json.dumps([asdict(progress)]))


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        (["--stop-iters", "1"], "has reached its goal: it had 1 iterations"),
        (["--stop-return", "20"], "give a later goal to go on with it (--stop-iters"),
        (["--stop-return", "nan"], "stop_return=nan must be a finite number"),
    ],
)
def test_a_refused_goal_leaves_those_of_the_run(
    goal: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved_run(tmp_path, stop_return=400.0)
    saved_iteration(tmp_path)

    assert words in refused(capsys, "--resume", run, *goal)
    assert json.loads((tmp_path / "run.json").read_text()) == {**SAVED, "stop_return": 400.0}


@pytest.mark.parametrize("goal", ["nan", "inf"])
def test_a_new_training_needs_a_finite_goal(
    goal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["CartPole-v1", "--checkpoint-dir", str(tmp_path / "made")]

    error = refused(capsys, *options, "--stop-return", goal)

    assert f"stop_return={goal} must be a finite number" in error
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["file/made", "x" * 300, "/proc/made"])
def test_a_folder_that_cannot_be_written_is_refused_before_ray_is_started(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    error = refused(capsys, "CartPole-v1", "--checkpoint-dir", str(tmp_path / name))

    assert "made cannot be written" in error or "File name too long" in error
    assert "a new run may have another --checkpoint-dir" in error


def test_a_folder_is_not_left_where_no_training_begins(tmp_path: Path) -> None:
    with claimed(tmp_path / "runs" / "made"):
        assert (tmp_path / "runs" / "made").is_dir()

    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_into_which_a_training_writes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed(tmp_path):
        error = refused(capsys, "CartPole-v1", "--checkpoint-dir", str(tmp_path))

    assert "another training writes into" in error
    with claimed(tmp_path):  # it has ended
        assert tmp_path.is_dir()


def test_a_full_disk_leaves_the_options_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, TrainingRun(**SAVED))

    with room_for(10), pytest.raises(ConfigurationError, match=r"cannot be written .* free space"):
        write_run(tmp_path, TrainingRun(**{**SAVED, "stop_iters": 200}))

    assert json.loads((tmp_path / "run.json").read_text()) == SAVED
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_training_needs_an_environment_or_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ENV_OR_ADDRESS: missing, without --resume" in refused(capsys)
