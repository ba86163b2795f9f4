"""How steps of environments are timed, the same on every side.

Standard library only: scripts of other virtual environments use it, too. The messages and when
stands in ``load.ClientJob``.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence

Step = Callable[[], int]
"""Does something, and returns how many environment steps that were."""


def time_steps(step: Step, *, warm_up_s: float, seconds: float) -> None:
    """Call ``step`` repeatedly, and send the parent how often and how long each took."""
    _wait_for_the_start()
    end_s = time.perf_counter() + warm_up_s
    while time.perf_counter() < end_s:
        step()
    cpu_s = time.process_time()
    _say(begun=True)
    latencies_us = []
    answers = 0
    last_s = began_s = time.perf_counter()
    while last_s - began_s < seconds:
        answers += step()
        now_s = time.perf_counter()
        latencies_us.append(round((now_s - last_s) * 1e6))
        last_s = now_s
    _send_and_stay(
        answers=answers,
        seconds=last_s - began_s,
        cpu_s=time.process_time() - cpu_s,
        latencies_us=latencies_us,
    )


def time_threads(steps: Sequence[Step], *, warm_up_s: float, seconds: float) -> None:
    """Call each of ``steps`` again and again in a thread of its own, and count them together.

    The threads end with the process.
    """
    counts = [0] * len(steps)
    failures: list[BaseException] = []
    has_failed = threading.Event()

    def work(index: int) -> None:
        try:
            while True:
                counts[index] += steps[index]()
        except BaseException as failure:  # noqa: BLE001  # it is raised where the parent sees it
            failures.append(failure)
            has_failed.set()

    _wait_for_the_start()
    for index in range(len(steps)):
        threading.Thread(target=work, args=(index,), daemon=True).start()
    has_failed.wait(warm_up_s)
    cpu_s, began_s, before = time.process_time(), time.perf_counter(), sum(counts)
    _say(begun=True)
    has_failed.wait(seconds)
    answers, ended_s = sum(counts) - before, time.perf_counter()
    if failures:
        raise failures[0]
    _send_and_stay(
        answers=answers,
        seconds=ended_s - began_s,
        cpu_s=time.process_time() - cpu_s,
        latencies_us=[],
    )


def time_in_bulk(work: Callable[[int], int], *, warm_up_s: float, seconds: float) -> None:
    """Time one long piece of work, for what cannot be stopped in the middle.

    Args:
        work: Does so many rounds at once, and returns how many environment steps these were.
        warm_up_s: How long to try, to find out how many rounds fill the time.
        seconds: About how long the measured piece takes.
    """
    _wait_for_the_start()
    end_s = time.perf_counter() + warm_up_s
    rounds = 1
    while True:
        began_s = time.perf_counter()
        work(rounds)
        now_s = time.perf_counter()
        rounds_per_s = rounds / (now_s - began_s)
        if now_s >= end_s:
            break
        rounds = max(1, round(rounds_per_s * (end_s - now_s)))
    rounds = max(1, round(rounds_per_s * seconds))
    cpu_s = time.process_time()
    _say(begun=True)
    began_s = time.perf_counter()
    answers = work(rounds)
    ended_s = time.perf_counter()
    _send_and_stay(
        answers=answers,
        seconds=ended_s - began_s,
        cpu_s=time.process_time() - cpu_s,
        latencies_us=[],
    )


def _wait_for_the_start() -> None:
    _say(ready=True)
    if not sys.stdin.readline():
        raise SystemExit("the parent has gone, or wants no measurement any more")


def _send_and_stay(**result: object) -> None:
    """Send the parent the result, and live until it has read the processor time of this process."""
    _say(**result)
    sys.stdin.read()


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
