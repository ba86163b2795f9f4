"""What a forward pass for several slots gives to each of them."""

import numpy as np
import pytest

from rlmesh_ray.rllib.runner.fast_path import ActionBatch

LOGITS = np.arange(12.0).reshape(6, 2)


def test_each_slot_gets_its_own_rows() -> None:
    choice = ActionBatch(np.arange(6), np.arange(6) + 10, {"logits": LOGITS})

    first, second = choice.split([2, 4]) or []

    assert (first.actions.tolist(), second.actions.tolist()) == ([0, 1], [2, 3, 4, 5])
    assert second.actions_for_env.tolist() == [12, 13, 14, 15]
    np.testing.assert_array_equal(first.extras["logits"], LOGITS[:2])
    np.testing.assert_array_equal(second.extras["logits"], LOGITS[2:])


@pytest.mark.parametrize("strange", [np.zeros(5), [0.0] * 6, {"mean": np.zeros(6)}])
def test_what_has_no_row_for_each_lane_is_not_taken_apart(strange: object) -> None:
    choice = ActionBatch(np.arange(6), np.arange(6), {"strange": strange})

    assert choice.split([2, 4]) is None
