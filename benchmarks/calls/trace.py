"""Counts the functions of the package that are called, in each thread of a process.

So that the counts are the same in every run and for every Python, these are left out: generators
and coroutines that are resumed, since what they wait for may have come already; what is called
between two polls; comparisons, since a dictionary makes none where a key is the same object; and
comprehensions, which Python 3.12 runs inside their function.
"""

import dis
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from types import CodeType, FrameType
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from rlmesh_ray import polling

PACKAGE = polling.__name__.partition(".")[0]
TRACE = "trace"
"""Key of a reset's options, True or False, and of its info."""
_LEFT_OUT = {"<listcomp>", "<setcomp>", "<dictcomp>", "__eq__", polling.no_work.__name__}


class Trace:
    """Counts calls in this thread and in those that Python starts meanwhile. A context manager."""

    def __init__(self) -> None:
        self._is_on = False
        self._counts: dict[threading.Thread, Counter[str]] = defaultdict(Counter)
        self._starts: dict[CodeType, int] = {}

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def start(self) -> None:
        """Begin to count."""
        self._counts.clear()
        self._is_on = True

    def stop(self) -> dict[threading.Thread, Counter[str]]:
        """Return how often each function, such as ``"rlmesh_ray.polling:keep_cpu"``, was called."""
        self._is_on = False
        return dict(self._counts)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self._is_on or event != "call":
            return
        # A data class's __init__ has no file, but the globals of its module.
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module.partition(".")[0] != PACKAGE or code.co_name in _LEFT_OUT:
            return
        if frame.f_lasti <= self._start_of(code):
            self._counts[threading.current_thread()][f"{module}:{code.co_qualname}"] += 1

    def _start_of(self, code: CodeType) -> int:
        """Return the offset at which a function starts: its first RESUME."""
        if code not in self._starts:
            resumes = (each.offset for each in dis.get_instructions(code) if each.opcode == _RESUME)
            self._starts[code] = next(resumes)
        return self._starts[code]


_RESUME = dis.opmap["RESUME"]
_traces: list[Trace] = []
"""Of a worker; it has one."""


class TracedEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Does next to nothing, and its episodes never end; counts the calls of its worker's process.

    ``reset(options={TRACE: True})`` begins to count; with False its info has the counts, as JSON.

    Args:
        step_s: How long a step sleeps.
    """

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        wanted = (options or {}).get(TRACE)
        info = {}
        if wanted:  # each lane begins anew: what the last one counts has no resets
            if not _traces:
                _traces.append(Trace().__enter__())
            _traces[0].start()
        elif wanted is False and _traces:  # in the first lane; the other ones find none
            with _traces.pop() as trace:
                counts = trace.stop()
            info = {TRACE: json.dumps(sum(counts.values(), Counter[str]()))}
        return np.zeros(4, np.float32), info

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Answer."""
        if self._step_s:
            time.sleep(self._step_s)
        return np.zeros(4, np.float32), 1.0, False, False, {}
