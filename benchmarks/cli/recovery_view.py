"""Output of ``python -m benchmarks recovery``: how long a runner is without its lanes."""

from benchmarks.cli.progress_view import BenchView
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import connected_ray

_LOGICAL_CPUS = 4
_GOAL_S = 5.0
"""At the 95th percentile."""


def measure_recovery(console: Console, num_kills: int, seed: int) -> int:
    """Kill an endpoint repeatedly, and show each time; return the exit code."""
    import numpy as np

    taken: list[float] = []
    view = BenchView(console, "recovery", {"kills": num_kills, "seed": seed})
    is_complete = view.follow(lambda: _measure(console, view, taken, num_kills, seed))
    if not taken:  # interrupted at once
        return view.sum_up(is_complete=is_complete, caveats=[], found={})
    p50_s, p95_s, worst_s = np.quantile(taken, [0.5, 0.95, 1.0], method="higher").tolist()
    found = {"p50_s": p50_s, "p95_s": p95_s, "worst_s": worst_s}
    console.facts(
        f"a runner's lanes are back, seconds after {len(taken)} kills",
        {name.removesuffix("_s"): f"{value:.2f}" for name, value in found.items()},
        [],
    )
    caveats = [f"p95 is above the goal of {_GOAL_S:g} s"] if p95_s > _GOAL_S else []
    return view.sum_up(
        is_complete=is_complete, caveats=caveats, found={**found, "seconds": list(taken)}
    )


def _measure(
    console: Console, view: BenchView, taken: list[float], num_kills: int, seed: int
) -> None:
    # A Ray of its own: elsewhere the endpoint's process could not be killed from here.
    with connected_ray(console, _LOGICAL_CPUS, address="local"):
        from benchmarks.recovery import recoveries

        for seconds in recoveries(num_kills, seed=seed):
            taken.append(seconds)
            console.event("recovery", kill=len(taken), seconds=seconds)
            view.now(f"kill {len(taken)} of {num_kills}: back after {seconds:.2f} s")
