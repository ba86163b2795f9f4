import math
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.evaluation.result import (
    EndpointReport,
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
    endpoint_reports,
    success_of,
)


def episodes(*successes: bool | None) -> tuple[EpisodeResult, ...]:
    return tuple(
        EpisodeResult(index, index, float(index), index + 1, True, False, success)
        for index, success in enumerate(successes)
    )


def test_the_summary_covers_the_finished_episodes() -> None:
    result = EvaluationResult(episodes(True, None, False, True), 2.0)

    assert result.return_mean == 1.5
    assert result.return_stderr == pytest.approx(math.sqrt(5 / 3) / 2)
    assert (result.return_min, result.return_max) == (0.0, 3.0)
    assert result.env_steps == 10
    assert result.length_mean == 2.5
    assert result.success_rate == 2 / 4
    assert result.success_reports == 3
    assert result.interruptions == 0


@pytest.mark.parametrize(
    ("returns", "mean"),
    [
        ((1.0, math.nan), math.nan),
        ((math.inf, -math.inf), math.nan),
        ((math.inf, 1.0), math.inf),
    ],
)
def test_rewards_that_are_not_finite_leave_a_summary(
    returns: tuple[float, ...], mean: float
) -> None:
    finished = (EpisodeResult(0, 0, one, 1, True, False, None) for one in returns)
    result = EvaluationResult(tuple(finished), 1.0)

    assert result.return_mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(result.return_stderr)


def test_a_single_episode_has_no_standard_error_and_maybe_no_success() -> None:
    result = EvaluationResult(episodes(None), 1.0)

    assert math.isnan(result.return_stderr)
    assert result.success_rate is None
    assert result.success_reports == 0


def test_an_episode_without_a_report_is_no_success() -> None:
    assert EvaluationResult(episodes(True, None, True, None), 1.0).success_rate == 0.5
    assert EvaluationResult(episodes(False, None), 1.0).success_rate == 0.0


def test_episodes_are_equal_wherever_they_ran() -> None:
    here = EpisodeResult(0, 0, 1.0, 1, True, endpoint="here", model="a")

    assert here == EpisodeResult(0, 0, 1.0, 1, True, endpoint="there", model="b")


@pytest.mark.parametrize(
    ("infos", "reported"),
    [
        ({"is_success": np.array([True, False])}, [True, False]),
        (
            {
                "is_success": np.array([1.0, 0.0]),
                "_is_success": np.array([True, False]),
            },
            [True, None],
        ),
        ({"success": np.array([0, 1])}, [False, True]),
        ({"success": [0, 1]}, [False, True]),
        ({"success": True}, [True, True]),
        ({"success": np.float64(0.0)}, [False, False]),
        ({"success": np.array([0.5, 1.0])}, [None, True]),
        ({"success": "yes"}, [None, None]),
        ({"success": np.zeros((0,))}, [None, None]),
        ({"success": [None, [1]]}, [None, None]),
        ({"success": [[1], [1, 0]]}, [None, None]),
        ({"success": np.array([None, True])}, [None, True]),
        ({"is_success": "?", "success": np.array([1, 1])}, [True, True]),
        ({}, [None, None]),
        (
            {
                "final_info": {
                    "is_success": np.array([1.0, 0.0]),
                    "_is_success": np.array([True, False]),
                },
                "_final_info": np.array([True, False]),
                # Of the next episode, under autoreset mode SAME_STEP.
                "is_success": np.array([0.0, 0.0]),
            },
            [True, False],
        ),
    ],
)
def test_success_is_read_from_the_last_infos(infos: dict[str, Any], reported: list[Any]) -> None:
    assert [success_of(infos, lane) for lane in range(2)] == reported


def test_counters_are_kept_for_each_endpoint() -> None:
    news: list[EpisodeResult | Loss] = [
        EpisodeResult(0, 0, 1.0, 1, True, endpoint="a", model="m"),
        EpisodeResult(1, 1, 1.0, 1, True, endpoint="b"),
        Loss(EndpointRole.MODEL, "m", "gone", (2, 3)),
        Loss(EndpointRole.ENV, "c", "unreachable", ()),
    ]

    assert endpoint_reports(news) == (
        EndpointReport(EndpointRole.ENV, "a", 1, 0),
        EndpointReport(EndpointRole.ENV, "b", 1, 0),
        EndpointReport(EndpointRole.ENV, "c", 0, 0),
        EndpointReport(EndpointRole.MODEL, "m", 1, 1),
    )
