"""A profile of a runner, as a process of its own: ``python -m benchmarks.sampling.profile``.

It reads the line that ``benchmarks.sampling.run`` reads, and writes one when it has ended.
"""

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.measured_process import only_for_the_parent
from benchmarks.sampling.run import RunnerTask, sample_for, sampling_runner, start_ray
from rlmesh_ray.rllib.runner.env_runner import SlotRunner
from rlmesh_ray.rllib.runner.fast_path import ArrayPipeline
from rlmesh_ray.rllib.runner.slot import Slot

_NUM_FUNCTIONS = 20
_WARM_UP_S = 1.0
_FORWARD, _ANSWERED, _SENT = "choose", "_process", "step"
"""Methods that are timed: of ``ArrayPipeline``, ``SlotRunner`` and ``Slot``."""
Event = tuple[str, float, float, int]
"""A call of such a method: its name, begin and end in microseconds, and the id of the slot."""


def main() -> None:
    """Do the work that standard input describes."""
    task = RunnerTask(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    start_ray()
    runner = sampling_runner(task)
    sample_for(runner, _WARM_UP_S, task.timesteps)
    tool, own = _own_times(lambda seconds: sample_for(runner, seconds, task.timesteps), task.turn_s)
    events: list[Event] = []
    _time_calls(events, SlotRunner, _ANSWERED, lambda _, slot, *rest: id(slot))
    _time_calls(events, ArrayPipeline, _FORWARD, lambda *_: 0)
    _time_calls(events, Slot, _SENT, lambda slot, *_: id(slot))
    sample_for(runner, task.turn_s, task.timesteps)
    found = {
        "torch_reason": runner.torch_inference_reason,
        "tool": tool,
        "own_time": [[name, part / own.total()] for name, part in own.most_common(_NUM_FUNCTIONS)],
        "spans_us": {
            name: np.percentile(spans, [10, 50, 90]).tolist()
            for name, spans in spans_of(events).items()
        },
    }
    parent.write(json.dumps(found) + "\n")
    parent.flush()
    runner.stop()
    ray.shutdown()


def _own_times(sample: Callable[[float], Any], seconds: float) -> tuple[str, Counter[str]]:
    """Return what functions took by themselves, and which tool says so: py-spy, if it can be used.

    It looks at the stack of the main thread from outside, native frames included.
    """
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder, "stacks")
        options = (
            "--rate 500 --threads --native --function --format raw "
            f"--duration {max(1, round(seconds))}"
        )
        command = f"py-spy record --pid {os.getpid()} {options} --output {stacks}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with subprocess.Popen(["env", f"PATH={path}", *command.split()], stdout=2) as spy:
            while spy.poll() is None:
                sample(0.0)
        if spy.returncode == 0:
            leaves: Counter[str] = Counter()
            for line in stacks.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                if "MainThread" in stack.partition(";")[0]:
                    leaves[stack.rpartition(";")[2]] += int(count)
            return "py-spy", leaves
    with cProfile.Profile() as profile:
        sample(seconds)
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    return "cProfile", Counter(
        {
            f"{function} ({'/'.join(Path(file).parts[-2:])})": entry[2]
            for (file, _, function), entry in stats.items()
        }
    )


def _time_calls(events: list[Event], owner: type, name: str, slot_of: Callable[..., int]) -> None:
    """Have a method note its calls."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            ended_s = time.perf_counter()
            events.append((name, 1e6 * began_s, 1e6 * ended_s, slot_of(*args)))

    setattr(owner, name, timed)


def spans_of(events: Iterable[Event]) -> dict[str, list[float]]:
    """Return the microseconds between the events of each slot, in the order of a step."""
    spans: dict[str, list[float]] = defaultdict(list)
    sent: dict[int, float] = {}
    kept: dict[int, float] = {}
    forward = (0.0, 0.0)
    for name, began_us, ended_us, slot in events:
        if name == _FORWARD:
            forward = began_us, ended_us
        elif name == _ANSWERED:
            spans["step sent to answer taken"].append(began_us - sent.get(slot, began_us))
            spans["answer taken to kept"].append(ended_us - began_us)
            kept[slot] = ended_us
        else:
            if slot in kept:
                spans["answer kept to forward pass"].append(forward[0] - kept[slot])
                spans["forward pass"].append(forward[1] - forward[0])
                spans["forward pass to actions sent"].append(ended_us - forward[1])
            sent[slot] = ended_us
    return spans


if __name__ == "__main__":
    main()
