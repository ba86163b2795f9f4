"""A few trials of each kind; `make chaos` makes all of them."""

from pathlib import Path

import pytest

from rlmesh_ray.transport.direct_connection import DirectConnector
from tests.chaos import driver
from tests.chaos.trials import ROWS, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TRIALS = {
    "cut_direct-vector-shared_memory": 50,
    "cut_direct-runner-shared_memory": 10,
    "cut_direct-agents-shared_memory": 5,
    "cut_join-vector-shared_memory": 5,
    "cut_join-runner-lockstep-grpc": 3,
    "kill_worker-vector-grpc": 3,
    "kill_worker-runner-shared_memory": 3,
    "kill_endpoint-agents-lockstep-shared_memory": 2,
    "freeze_worker-vector-shared_memory": 2,
    "slow_env-vector-shared_memory": 2,
    "raising_env-runner-grpc": 3,
    "calls-vector-tcp": 5,
}
ROWS_BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize(("name", "num_trials"), NUM_TRIALS.items(), ids=NUM_TRIALS)
def test_no_step_is_lost_doubled_or_stitched(name: str, num_trials: int, tmp_path: Path) -> None:
    verdict, _ = run(ROWS_BY_NAME[name], num_trials, 1, tmp_path)

    assert verdict.violations == []
    assert verdict.num_faults == num_trials
    assert verdict.num_steps > 0


def test_a_row_whose_steps_take_no_direct_connection_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LIMIT_S", 2.0)
    monkeypatch.setattr(DirectConnector, "connection", lambda _: None)

    with pytest.raises(TimeoutError, match="no step took a direct connection"):
        run(ROWS_BY_NAME["cut_direct-vector-shared_memory"], 1, 1, tmp_path)
