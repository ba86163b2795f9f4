"""A few trials of each kind; `make chaos` makes all of them."""

from pathlib import Path

import pytest

from tests.chaos.trials import ROWS, Row, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TRIALS = {"cut_road": 20, "cut_join": 5, "kill_worker": 3, "kill_endpoint": 2}
FREEZES = {"freeze_worker-vector-shared_memory", "freeze_endpoint-runner-messages"}
CHOSEN = [row for row in ROWS if row.fault in {"cut_road", "kill_worker"}]
CHOSEN += [row for row in ROWS if row.fault in {"cut_join", "kill_endpoint"} and row.shared_memory]
CHOSEN += [row for row in ROWS if row.name in FREEZES]


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
def test_no_step_is_lost_doubled_or_stitched(row: Row, tmp_path: Path) -> None:
    verdict, _ = run(row, NUM_TRIALS.get(row.fault, 2), 1, tmp_path)

    assert verdict.violations == []
    assert verdict.num_steps > 0
