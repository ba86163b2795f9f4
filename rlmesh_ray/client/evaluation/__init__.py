"""Evaluation: endpoints of an environment and of a policy, and what the episodes earn."""

from rlmesh_ray.client.evaluation.result import (
    EndpointReport,
    Episode,
    EvaluationResult,
    Loss,
    Role,
    Tally,
)
from rlmesh_ray.client.evaluation.run import Options, evaluate, evaluate_indices
from rlmesh_ray.client.evaluation.schedule import Schedule
from rlmesh_ray.client.evaluation.seeds import check_seeds

__all__ = [
    "EndpointReport",
    "Episode",
    "EvaluationResult",
    "Loss",
    "Options",
    "Role",
    "Schedule",
    "Tally",
    "check_seeds",
    "evaluate",
    "evaluate_indices",
]
