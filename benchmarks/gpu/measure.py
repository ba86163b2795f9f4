"""How fast policies run on a device: batches beside a plain loop of torch, clients beside the CPU.

All sides of a repetition are there at once, and are measured by turns: to compile a network takes
longer than to measure it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.findings import Finding
from benchmarks.gpu.plan import BatchJob, GpuPlan, Network, ServedNetwork, Workload
from benchmarks.processes import Process, Reading, Server, measure
from benchmarks.record import Note, Record, by_turns
from benchmarks.serving.targets import Bench, Task
from benchmarks.statistics import Spread, percentiles, ratio

_ROWS_RATE, _MESSAGES_RATE, _MS_A_BATCH = "rows/s", "messages/s", "ms a batch"
_P50, _P99 = "p50, ms", "p99, ms"
_TORCH = "torch"
# The policies of ``batch_loop``, in tables that are not too wide.
_AS_IT_IS = ("policy", "buckets", _TORCH)
_COMPILED = ("compiled", "compiled, buckets", _TORCH)
_DIALECTS = {Network.MLP: "ours", Network.CNN: "ours-images"}
_COMPILATION_S = 600.0
_ROW_BYTES = {Network.MLP: 16, Network.CNN: 84 * 84 * 4}
_FEW_REQUESTS, _SLOW_BYTES_PER_S = 5, 200e6


def measure_gpu(plan: GpuPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield the findings, one table after the other.

    Args:
        plan: What to measure; its device is available.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed, or answered with anything but predictions.
    """
    for network in plan.networks:
        if Workload.BATCHES in plan.workloads:
            yield from _batches(plan, network, note)
        if Workload.CLIENTS in plan.workloads:
            yield _clients(plan, network, note)


# --- batches ---------------------------------------------------------------------------


def _batches(plan: GpuPlan, network: Network, note: Note) -> Iterator[list[Finding]]:
    workload = f"batches in the process, {network}"
    rates, durations = Record(workload, note), Record(workload, note)
    for rows, side, repetition, reading in _in_process(plan, network):
        value = reading.answers_per_s * rows
        rates.add(_case(rows), side, repetition, value, _ROWS_RATE, reading)
        median_ms = percentiles(reading.latencies_us).p50 / 1000
        durations.add(_case(rows), side, repetition, median_ms, _MS_A_BATCH, reading)
    for name, names in {workload: _AS_IT_IS, f"compiled {workload}": _COMPILED}.items():
        if names is _AS_IT_IS or plan.compiles:
            for record, unit in ((rates, _ROWS_RATE), (durations, _MS_A_BATCH)):
                yield [
                    _finding(name, _case(rows), unit, _some(record, rows, names), _TORCH)
                    for rows in plan.rows
                ]
    workload = f"served batches, {network}"
    served = Record(workload, note)
    with ExitStack() as stack:
        servers = _servers(plan, network, {"served": plan.device}, stack)
        for repetition in range(plan.repetitions):
            for rows in plan.rows:
                for side, server in by_turns(list(servers.items()), repetition):
                    per_s = rates.sides(_case(rows))[_TORCH].median
                    few_s = _FEW_REQUESTS * (rows / per_s + _message_s(network, rows))
                    task = Task(1, rows=rows, seconds=max(plan.seconds, few_s))
                    reading = _ask(plan, server, network, task)
                    value = reading.answers_per_s * rows
                    served.add(_case(rows), side, repetition, value, _ROWS_RATE, reading)
    yield [
        _finding(
            workload,
            _case(rows),
            _ROWS_RATE,
            {**served.sides(_case(rows)), _TORCH: rates.sides(_case(rows))[_TORCH]},
            _TORCH,
        )
        for rows in plan.rows
    ]


def _message_s(network: Network, rows: int) -> float:
    """Return how long a message of that many rows takes where messages are slow."""
    return rows * _ROW_BYTES[network] / _SLOW_BYTES_PER_S


def _some(record: Record, rows: int, names: Sequence[str]) -> dict[str, Spread]:
    sides = record.sides(_case(rows))
    return {name: sides[name] for name in names}


def _in_process(plan: GpuPlan, network: Network) -> Iterator[tuple[int, str, int, Reading]]:
    """Yield rows, side, repetition and reading of each turn of ``batch_loop``."""
    job = BatchJob(
        network=network,
        device=plan.device,
        rows=plan.rows,
        compiles=plan.compiles,
        torch_threads=plan.torch_threads,
        repetitions=plan.repetitions,
        warm_up_s=plan.warm_up_s,
        seconds=plan.seconds,
    )
    command = [sys.executable, "-m", "benchmarks.gpu.batch_loop"]
    with Process("the process that runs batches", command) as process:
        process.send(job.to_line())
        while True:
            turn: dict[str, Any] = process.receive(_COMPILATION_S)
            if "done" in turn:
                return
            durations_us = tuple(turn["durations_us"])
            reading = Reading(
                answers_per_s=len(durations_us) / turn["seconds"],
                latencies_us=durations_us,
                lags_us=(),
                server_cores=turn["cpu_s"] / turn["seconds"],
                client_cores=(),
                other_cores=None,
            )
            yield turn["rows"], turn["side"], turn["repetition"], reading


# --- clients ---------------------------------------------------------------------------


def _clients(plan: GpuPlan, network: Network, note: Note) -> list[Finding]:
    workload = f"clients, {network}"
    records = {unit: Record(workload, note) for unit in (_MESSAGES_RATE, _P50, _P99)}
    devices = {name: name for name in dict.fromkeys(("cpu", plan.device))}
    with ExitStack() as stack:
        servers = _servers(plan, network, devices, stack)
        for repetition in range(plan.repetitions):
            for clients in plan.clients:
                for side, server in by_turns(list(servers.items()), repetition):
                    task = Task(clients, has_connection_each=True)
                    reading = _ask(plan, server, network, task)
                    waited = percentiles(reading.latencies_us)
                    for unit, value in (
                        (_MESSAGES_RATE, reading.answers_per_s),
                        (_P50, waited.p50 / 1000),
                        (_P99, waited.p99 / 1000),
                    ):
                        records[unit].add(
                            _case(clients, "client"), side, repetition, value, unit, reading
                        )
    return [
        _finding(workload, case, unit, record.sides(case), "cpu")
        for case in [_case(clients, "client") for clients in plan.clients]
        for unit, record in records.items()
    ]


# --- both ------------------------------------------------------------------------------


def _servers(
    plan: GpuPlan, network: Network, devices: Mapping[str, str], stack: ExitStack
) -> dict[str, Server]:
    """Start a server for each device, by its name, and one more that compiles for the last."""
    sides = {
        name: ServedNetwork(network, device, torch_threads=plan.torch_threads)
        for name, device in devices.items()
    }
    if plan.compiles:
        name, device = list(devices.items())[-1]
        sides[f"{name}, compiled, buckets"] = ServedNetwork(
            network, device, tuple(plan.rows), True, plan.torch_threads
        )
    return {
        name: stack.enter_context(
            Server(
                f"the server of {name}",
                [sys.executable, "-m", "benchmarks.gpu.model_server", served.to_line()],
                loading_s=_COMPILATION_S,
            )
        )
        for name, served in sides.items()
    }


def _ask(plan: GpuPlan, server: Server, network: Network, task: Task) -> Reading:
    bench = Bench(plan.warm_up_s, plan.seconds, plan.client_processes)
    loads = bench.loads(server.port, _DIALECTS[network], task)
    return measure([server.pid], [load.job() for load in loads])


def _finding(
    workload: str, case: str, unit: str, sides: Mapping[str, Spread], base: str
) -> Finding:
    """Compare each side with ``base``, which is one of them."""
    comparisons = {
        f"{side} / {base}": ratio(spread, sides[base])
        for side, spread in sides.items()
        if side != base
    }
    return Finding(workload, case, unit, sides, comparisons)


def _case(count: int, of: str = "row") -> str:
    return f"{count:,} {of}" if count == 1 else f"{count:,} {of}s"
