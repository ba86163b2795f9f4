"""Main loop of serve-env and serve-model: announce, wait, stop cleanly on a signal."""

import contextlib
from collections.abc import Callable, Iterator

from rich.live import Live
from rich.text import Text

import rlmesh_ray
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import show_log
from rlmesh_ray.cli.options.common import MonitoringFlags, served_metrics
from rlmesh_ray.cli.signals import require_no_interrupt
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.endpoint.log import LogFormat
from rlmesh_ray.server.observe.statistics import EnvStatistics, MeasuredEndpoint, Statistics

_POLL_S = 1.0
_NO_MEMBER = contextlib.nullcontext(lambda: None)


def quiet_for_programs(console: Console, log_format: LogFormat) -> None:
    """Have ``console`` print no text but errors where programs read it."""
    console.has_json_log = log_format is LogFormat.JSON
    console.people.quiet = console.has_json_log and console.is_json


def serve(
    console: Console,
    server: "rlmesh_ray.EnvServer | rlmesh_ray.ModelServer",
    announce: Callable[[], None],
    monitoring: MonitoringFlags,
    labels: tuple[str, str] | None = None,
    member: contextlib.AbstractContextManager[Callable[[], None]] = _NO_MEMBER,
) -> None:
    """Start ``server``, call ``announce`` once it accepts, and serve until a signal ends it.

    Ctrl-C and SIGTERM stop it alike: running calls get a second. Metrics have the endpoint's id and
    its fleet as ``labels``; default: its address. ``member`` is open while the server serves; it
    yields a function that raises to end that.
    """
    is_started = False

    def measured() -> list[MeasuredEndpoint]:
        if not is_started:
            return []
        endpoint_id, fleet = labels or (server.address, "")
        return [MeasuredEndpoint(endpoint_id, server.statistics(), fleet)]

    show_log(monitoring.log_format)
    quiet_for_programs(console, monitoring.log_format)
    # Metrics first: an address that cannot be used shows before the environment has started.
    metrics = served_metrics(console, monitoring.metrics_address, measured)
    with contextlib.suppress(KeyboardInterrupt), metrics as announce_metrics:
        with console.waiting("starting the endpoint"):
            server.start()
        is_started = True
        freeze_heap()
        try:
            announce()
            announce_metrics()
            with member as require_member, _live_line(console) as show:
                before = server.statistics()
                # Polled: on Windows no signal ends a wait.
                while not server.wait(_POLL_S):
                    require_no_interrupt()
                    require_member()
                    now = server.statistics()
                    show(summary(before, now))
                    before = now
        finally:
            server.stop(grace_s=1.0)
            with contextlib.suppress(OSError):  # the reader is gone
                console.event("stopped", address=server.address)


@contextlib.contextmanager
def _live_line(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a live line on a terminal; elsewhere it does nothing."""
    if console.is_json or not console.people.is_terminal:
        yield lambda text: None
        return
    # Refreshed here: a thread for it would slow the serving loop down.
    with Live(console=console.people, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(text, style="dim"), refresh=True)


def summary(before: Statistics, now: Statistics) -> str:
    seconds = max(now.uptime_s - before.uptime_s, 1e-3)
    what = "steps" if isinstance(now, EnvStatistics) else "rows"
    count = _count(now) - _count(before)
    is_one = now.sessions.open == 1
    return (
        f"{now.sessions.open} session{'' if is_one else 's'} open ({now.sessions.opened} so far), "
        f"{count / seconds:,.0f} {what}/s, "
        f"{sum(now.errors.values())} errors"
    )


def _count(statistics: Statistics) -> int:
    return statistics.lane_steps if isinstance(statistics, EnvStatistics) else statistics.rows
