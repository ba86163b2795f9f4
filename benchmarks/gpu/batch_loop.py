"""Batches in one process, without a server: ``python -m benchmarks.gpu.batch_loop``.

It reads a ``BatchJob`` from standard input, runs the same batches through a plain loop of torch and
through policies with each choice of buckets and compilation, by turns, and says what each turn has
brought; at the end ``done``.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.control import say
from benchmarks.gpu.networks import contract_of, make_network, observations_of
from benchmarks.gpu.plan import BatchJob, Network
from benchmarks.record import by_turns
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot

TORCH = "torch"
"""The plain loop; a side."""

Batch = Callable[[], object]
"""Runs one batch: from an array of observations to an array of actions."""


def main() -> None:
    """Do what standard input says."""
    job = BatchJob.from_line(sys.stdin.readline())
    sides = _sides(job)
    torch.set_num_threads(job.torch_threads)  # after the networks, which set it, too
    for repetition in range(job.repetitions):
        for rows in job.rows:
            for name, make in by_turns(list(sides.items()), repetition):
                batch = make(rows)
                _run_for(batch, job.warm_up_s)
                cpu_s, began_s = time.process_time(), time.perf_counter()
                durations_us = _run_for(batch, job.seconds)
                seconds = time.perf_counter() - began_s
                say(
                    side=name,
                    rows=rows,
                    repetition=repetition,
                    seconds=seconds,
                    cpu_s=time.process_time() - cpu_s,
                    durations_us=durations_us,
                )
    say(done=True)


def _sides(job: BatchJob) -> dict[str, Callable[[int], Batch]]:
    """Return what makes a batch of a number of rows, for each side; all are compiled already."""
    network = Network(job.network)
    options: dict[str, dict[str, Any]] = {
        "policy": {"inference": "torch"},
        "buckets": {"inference": "torch", "buckets": job.rows},
    }
    if job.compiles:
        options["compiled"] = {"inference": "compiled"}
        options["compiled, buckets"] = {"inference": "compiled", "buckets": job.rows}
    sides = {TORCH: _torch_batches(make_network(network).eval().to(job.device), network)}
    for name, chosen in options.items():
        policy = TorchPolicy(make_network(network), device=job.device, **chosen)
        policy.check_contract(contract_of(network, max(job.rows)))
        sides[name] = _policy_batches(policy, network)
    return sides


def _torch_batches(module: torch.nn.Module, network: Network) -> Callable[[int], Batch]:
    device = next(module.parameters()).device

    def make(rows: int) -> Batch:
        observations = observations_of(network, rows)

        def batch() -> object:
            with torch.inference_mode():
                logits = module(torch.from_numpy(observations).to(device))
                return logits.argmax(dim=1).cpu().numpy()

        return batch

    return make


def _policy_batches(policy: TorchPolicy, network: Network) -> Callable[[int], Batch]:
    def make(rows: int) -> Batch:
        observations = observations_of(network, rows)
        observations.flags.writeable = False  # as what comes from the wire
        slots = tuple(PredictSlot(lane, f"episode-{lane}", 1, False) for lane in range(rows))
        batch_rows = Rows(observations, [RouteRows("route", slots)])
        contract = contract_of(network, rows)
        return lambda: policy.predict(contract, batch_rows)

    return make


def _run_for(batch: Batch, seconds: float) -> list[int]:
    """Run batches for some time, one at least; return the duration of each, in us.

    A batch ends with its actions in the memory of the CPU, so the device has done its work.
    """
    durations_us: list[int] = []
    now_s = time.perf_counter()
    end_s = now_s + seconds
    while not durations_us or now_s < end_s:
        began_s = now_s
        batch()
        now_s = time.perf_counter()
        durations_us.append(round((now_s - began_s) * 1e6))
    return durations_us


if __name__ == "__main__":
    main()
