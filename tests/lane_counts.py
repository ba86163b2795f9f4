"""Counts of lanes without a worker."""

from rlmesh_ray.server.observe.counters import LaneCounters
from rlmesh_ray.transport.exactly_once import SessionProgress


def note_step(
    lanes: LaneCounters, took_ns: int, num_lanes: int, num_ended: int, num_deviations: int = 0
) -> None:
    """Have ``lanes`` count a vector step, in which ``num_ended`` episodes have ended."""
    if lanes.progress is None:
        lanes.progress = SessionProgress.local(num_lanes)
    lanes.progress.count_vector_step(took_ns, num_lanes, num_ended, num_deviations)
