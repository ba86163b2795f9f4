"""Evaluation: runs episodes of environment endpoints with a policy, and summarizes the returns."""

from rlmesh_ray.evaluation.episode_schedule import Schedule
from rlmesh_ray.evaluation.result import (
    EndpointCounters,
    EndpointReport,
    EndpointRole,
    EpisodeResult,
    EvaluationResult,
    Loss,
)
from rlmesh_ray.evaluation.run import (
    EvaluationOptions,
    evaluate,
    evaluate_indices,
    warn_of_missing_reports,
)
from rlmesh_ray.evaluation.seeds import check_seeds

__all__ = [
    "EndpointCounters",
    "EndpointReport",
    "EndpointRole",
    "EpisodeResult",
    "EvaluationOptions",
    "EvaluationResult",
    "Loss",
    "Schedule",
    "check_seeds",
    "evaluate",
    "evaluate_indices",
    "warn_of_missing_reports",
]
