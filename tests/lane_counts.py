"""Counts of lanes without a worker."""

from rlmesh_ray.server.counts import LaneCounts
from rlmesh_ray.transport.progress import Progress


def note_step(
    lanes: LaneCounts, took_ns: int, num_lanes: int, num_ended: int, num_deviations: int = 0
) -> None:
    """Have ``lanes`` count a vector step, in which ``num_ended`` episodes have ended."""
    progress = Progress.local(num_lanes)
    progress.count(took_ns, num_lanes, num_ended, num_deviations)
    lanes.follow(progress)
