"""The option ``--metrics-address`` of commands that serve, and what it does."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import OUTPUT
from rlmesh_ray.server.statistics import Measured

MetricsAddress = Annotated[
    str | None,
    typer.Option(
        "--metrics-address",
        metavar="HOST:PORT",
        rich_help_panel=OUTPUT,
        help="Serve metrics to Prometheus here.",
        show_default="nowhere",
    ),
]


@contextlib.contextmanager
def served_metrics(
    console: Console, address: str | None, measured: Measured
) -> Iterator[Callable[[], None]]:
    """Serve metrics, if they have an address; yield what announces that.

    Raises:
        AddressError: The address cannot be used.
    """
    if address is None:
        yield lambda: None
        return
    # It loads gRPC, which no other command needs.
    from rlmesh_ray.server.metrics_server import serve_metrics

    with serve_metrics(address, measured) as bound:

        def announce() -> None:
            console.event("metrics", address=bound)
            console.say(f"metrics for Prometheus at http://{bound}/metrics")

        yield announce
