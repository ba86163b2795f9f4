from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ConformanceError, PolicyError
from rlmesh_ray.models.actions import array_of, nan_rows, refusable, refused_rows
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.models.rllib.checkpoint_policy import zeroed
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import leaves, split
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TupleSpec,
)
from rlmesh_ray.spaces.validation import Checker, ValidationMode, coerce_batch

NAN = torch.nan


def box(dtype: str) -> BoxSpec:
    return BoxSpec((1,), dtype, np.zeros(1, dtype).tobytes(), np.ones(1, dtype).tobytes())


def test_a_row_is_nan_if_any_output_is_anywhere_in_it() -> None:
    first = torch.tensor([[0.0, NAN], [1.0, 2.0], [torch.inf, 0.0], [0.0, 0.0]])
    second = torch.tensor([0, 1, 2, 3])
    third = torch.zeros(4, 1, 2, dtype=torch.bfloat16)
    third[3, 0, 1] = NAN

    found = nan_rows(map(array_of, [first, second, third]))

    assert found is not None
    assert found.tolist() == [True, False, False, True]
    assert nan_rows(map(array_of, [first[1:3], second])) is None


def test_zeros_take_the_place_of_whole_rows() -> None:
    output = torch.tensor([[[1.0, NAN]], [[2.0, 3.0]]])

    copied = zeroed(output, np.array([True, False]))

    assert copied.tolist() == [[[0.0, 0.0]], [[2.0, 3.0]]]
    assert output[0, 0, 0] == 1.0


def test_all_rows_of_a_request_with_nan_are_refused() -> None:
    slots = [PredictSlot(lane, "", 0, reset=False) for lane in range(2)]
    routes = [RouteRows("one", slots[:1]), RouteRows("bad", slots), RouteRows("other", slots)]
    is_nan = np.array([False, True, False, False, False])

    refused = refused_rows(is_nan, Rows(np.zeros(5), routes))

    assert refused.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("spec", "actions"),
    [
        (DiscreteSpec(3, start=-5), np.array([-5, -4, -3])),
        (box("float32"), np.zeros((3, 1), np.float32)),
        (MultiBinarySpec(2), np.zeros((3, 2), np.int8)),
        (MultiDiscreteSpec((3, 4), (2,)), np.zeros((3, 2), np.int64)),
        (
            DictSpec((("a", TupleSpec((DiscreteSpec(2), box("uint8")))),)),
            {"a": (np.zeros(3, np.int64), np.zeros((3, 1), np.uint8))},
        ),
    ],
)
def test_only_actions_of_rows_with_nan_are_refused(spec: SpaceSpec, actions: Any) -> None:
    marked = refusable(spec, actions, np.array([False, True, False]))

    before, _, after = split(coerce_batch(spec, marked, 3), [1, 1, 1])
    with pytest.raises(ConformanceError):
        Checker(leaves(spec), ValidationMode.OFF).check(coerce_batch(spec, marked, 3))
    for columns, row in ((before, 0), (after, 2)):
        Checker(leaves(spec), ValidationMode.OFF).check(columns)
        expected = split(coerce_batch(spec, actions, 3), [1, 1, 1])[row]
        assert all(np.array_equal(*pair) for pair in zip(columns, expected, strict=True))


def test_nan_in_all_rows_is_an_error() -> None:
    with pytest.raises(PolicyError, match="NaN in it; are its weights sound"):
        refusable(DiscreteSpec(2), np.array([0, 1]), np.array([True, True]))


def test_where_every_number_is_an_action_the_batch_fails() -> None:
    with pytest.raises(PolicyError, match="NaN in it for 1 of 2 rows"):
        refusable(box("uint8"), np.zeros((2, 1), np.uint8), np.array([True, False]))


def test_actions_that_fit_no_space_are_returned_unchanged() -> None:
    actions = np.zeros((2, 7))

    assert refusable(DiscreteSpec(2), actions, np.array([True, False])) is actions
