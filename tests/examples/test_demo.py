"""What `make demo` runs, with a goal that is soon reached."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
pytestmark = pytest.mark.ray


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--out", "made", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},  # it starts a Ray of its own
        check=False,
    )


@pytest.mark.slow
def test_the_demo_does_the_whole_job(tmp_path: Path) -> None:
    (tmp_path / "made" / "checkpoint").mkdir(parents=True)
    (tmp_path / "made" / "checkpoint" / "old").touch()

    done = demo("--goal", "20", "--episodes", "4", folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "made"
    summary = json.loads((made / "summary.json").read_text())
    assert summary["train_return_mean"] >= 20
    assert summary["eval_return_mean"] >= 20
    assert summary["eval_episodes"] == 4
    assert summary["eval_imported"] == {"ray": False, "torch": False}
    assert len(summary["where"]["endpoints"]) == 2
    assert summary["env_steps"] > 0
    assert summary["wall_s"] > summary["train_wall_s"] > 0
    assert (made / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "checkpoint" / "rllib_checkpoint.json").is_file()
    assert not (made / "checkpoint" / "old").exists()
    assert "env steps" in done.stdout
    assert " serve-model made/checkpoint" in done.stdout


@pytest.mark.nightly
def test_a_goal_that_is_missed_fails_the_demo(tmp_path: Path) -> None:
    done = demo("--goal", "501", "--most-iterations", "1", "--episodes", "2", folder=tmp_path)

    assert done.returncode == 1
    assert "MISSED" in done.stdout
    assert "501 was the goal" in done.stderr


# One seed takes another course on another processor: so several, none of which may miss.
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_goal_is_reached_with_every_seed(seed: int, tmp_path: Path) -> None:
    done = demo("--seed", str(seed), folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
