"""What a page costs the training that it shows, by turns, and how soon the page is there."""

import contextlib
import enum
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding, Goal
from benchmarks.statistics import Spread, ratio

ALONE, WATCHED, PAGE = "alone", "watched", "page"
_COST_GOAL = Goal(f"{WATCHED} / {ALONE} >= 0.98", 0.98)
_PAINT_GOAL = Goal("<= 1 s", 1.0, is_ceiling=True)
_OPEN_GOAL = Goal("<= 2 s", 2.0, is_ceiling=True)
_NUM_LANES = 8
_WARM_UP = 2
_NUM_ENDPOINTS, _NUM_EPISODES = 100, 10_000


class WatchingRow(enum.StrEnum):
    """What can be measured."""

    COST = "cost"
    PAINT = "paint"
    EPISODES = "episodes"


@dataclass(frozen=True, slots=True)
class WatchingPlan:
    """The rows, and how often each is repeated."""

    rows: Sequence[WatchingRow]
    pairs: int
    """Of two iterations of a training each, one watched and one not."""
    repetitions: int
    """Of what a browser opens."""


def measure_watching(plan: WatchingPlan, now: Callable[[str], None]) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other."""
    rows = {
        WatchingRow.COST: lambda: cost(plan.pairs, now),
        WatchingRow.PAINT: lambda: first_paint(plan.repetitions),
        WatchingRow.EPISODES: lambda: many_episodes(plan.repetitions),
    }
    for row in plan.rows:
        yield [rows[row]()]


def cost(num_pairs: int, now: Callable[[str], None]) -> Finding:
    """Train PPO on an endpoint, and watch a lane of it in every other iteration.

    Both sides go first equally often. The page's server runs all the time; the page asks it, or
    is paused. Server, page and endpoint have processes of their own.
    """
    rates: dict[str, list[float]] = {ALONE: [], WATCHED: []}
    with contextlib.ExitStack() as stack:
        env = "benchmarks.watching.cart_pole:DrawnCartPole"
        address = _started(
            stack, ["serve-env", env, "--num-envs", str(_NUM_LANES)], "address", "127.0.0.1:0"
        )
        url = _started(stack, ["watch", address], "url", "127.0.0.1:0")
        page = stack.enter_context(
            _process([sys.executable, "-m", "benchmarks.watching.page_client", url])
        )
        page.send_signal(signal.SIGSTOP)
        stack.callback(page.send_signal, signal.SIGCONT)
        training = stack.enter_context(contextlib.closing(_training(address, num_pairs)))
        for _ in range(_WARM_UP):
            next(training)
        for number in range(num_pairs):
            sides = (ALONE, WATCHED) if number % 2 else (WATCHED, ALONE)
            for side in sides:
                page.send_signal(signal.SIGCONT if side == WATCHED else signal.SIGSTOP)
                rates[side].append(next(training))
                now(f"{side}: {rates[side][-1]:,.0f} env steps/s")
        page.send_signal(signal.SIGCONT)
        page.terminate()
        num_pictures = json.loads(str(page.communicate()[0]).splitlines()[-1])["pictures"]
    alone, watched = Spread(tuple(rates[ALONE])), Spread(tuple(rates[WATCHED]))
    share = ratio(watched, alone)
    case = f"PPO, {_NUM_LANES} lanes of 600x400, {num_pictures} pictures"
    comparisons = {f"/ {ALONE}": share}
    sides_found = {WATCHED: watched, ALONE: alone}
    return Finding("cost", case, "env steps/s", sides_found, comparisons, _COST_GOAL, share)


def _training(address: str, num_pairs: int) -> Generator[float]:
    """Train; yield the rate of each iteration."""
    from rlmesh_ray.cli.log_setup import quiet_rllib
    from rlmesh_ray.rllib.config.configure import configure
    from rlmesh_ray.rllib.config.hyperparameters import algorithm_config
    from rlmesh_ray.rllib.training import train

    config = algorithm_config("PPO")
    quiet_rllib(config)
    config.env_runners(num_env_runners=0).debugging(seed=1)
    configure(config, address)
    for progress in train(config, stop_iters=_WARM_UP + 2 * num_pairs + 1):
        yield progress.env_steps_per_s


def first_paint(repetitions: int) -> Finding:
    """Open the page of 100 endpoints, and wait for the first paint and for their rows."""
    from benchmarks.watching.browsing import browser, served
    from benchmarks.watching.samples import ManyEndpoints

    paints, rows = [], []
    with served(_page(ManyEndpoints(_NUM_ENDPOINTS), Path("none"))) as url, browser() as started:
        for _ in range(repetitions):
            with contextlib.closing(started.new_context()) as context:
                view = context.new_page()
                begun_s = time.perf_counter()
                view.goto(url)
                view.wait_for_selector(f"#envs tbody tr:nth-child({_NUM_ENDPOINTS * 9 // 10})")
                rows.append(time.perf_counter() - begun_s)
                paints.append(view.evaluate(_PAINTED_MS) / 1000)
    sides = {"first paint": Spread(tuple(paints)), "all rows": Spread(tuple(rows))}
    case = f"{_NUM_ENDPOINTS} endpoints"
    return Finding(PAGE, case, "s", sides, {}, _PAINT_GOAL, sides["first paint"])


_PAINTED_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def many_episodes(repetitions: int) -> Finding:
    """Open the page of a recording of 10,000 episodes, and wait for the first of them.

    Each time with a fresh server, which has read nothing yet.
    """
    from benchmarks.watching.browsing import browser, served
    from benchmarks.watching.samples import ManyEndpoints, write_recording

    taken = []
    with tempfile.TemporaryDirectory() as folder, browser() as started:
        write_recording(Path(folder) / "recorded", _NUM_EPISODES)
        for _ in range(repetitions):
            with (
                served(_page(ManyEndpoints(0), Path(folder))) as url,
                contextlib.closing(started.new_context()) as context,
            ):
                view = context.new_page()
                begun_s = time.perf_counter()
                view.goto(url)
                view.wait_for_selector("#episodes tbody tr:nth-child(50)")
                taken.append(time.perf_counter() - begun_s)
    opened = Spread(tuple(taken))
    case = f"{_NUM_EPISODES:,} episodes"
    return Finding(PAGE, case, "s", {"opened": opened}, {}, _OPEN_GOAL, opened)


def _page(source: Any, folder: Path) -> Any:
    from rlmesh_ray.watch.live import LiveView
    from rlmesh_ray.watch.page import page
    from rlmesh_ray.watch.runs import RunFolder

    return page(LiveView(source), RunFolder(folder))


def _started(stack: contextlib.ExitStack, words: list[str], field: str, address: str) -> str:
    """Start a command that serves; return what it reports in ``field``."""
    command = [sys.executable, "-m", "rlmesh_ray", *words, "--address", address, "--json"]
    process = stack.enter_context(_process(command))
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())[field])


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
