"""Training on a dm_env_rpc server runs as its users run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loopback.dm_env_rpc_peer import CORRIDOR, Conduct, Peer, specs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.ray
def test_train_on_dm_env_rpc(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    simple = specs(CORRIDOR.actions, {uid: CORRIDOR.observations[uid] for uid in (1, 7)})
    with Peer(Conduct(specs=simple)) as peer:
        done = subprocess.run(
            [
                sys.executable,
                str(EXAMPLES / "train_on_dm_env_rpc.py"),
                peer.address,
                *["--lanes", "2", "--create", '{"level": "cave"}', "--time-limit", "3"],
                *["--iterations", "1", "--batch", "256"],
            ],
            capture_output=True,
            text=True,
            timeout=280,
            cwd=tmp_path,
            env={**os.environ, **ray_of_programs},
            check=False,
        )

        assert peer.settings("create_world") == [{"level": "cave"}] * 3  # one to ask for the spaces
    assert done.returncode == 0, done.stderr
    # Three moves earn 100 and the place that each has led to.
    reported = re.search(r"iteration 1: mean return ([\d.]+)", done.stdout)
    assert reported is not None, done.stdout
    assert 294.0 <= float(reported[1]) <= 306.0
