"""Ray for the length of a command: the one that runs already, or one of our own."""

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import is_verbose
from rlmesh_ray.errors import ConfigurationError

_PROBE_TIMEOUT_S = 5.0


def require_rllib(
    command: str, packages: Sequence[str] = ("ray", "torch"), *, instead: str = ""
) -> None:
    """Refuse to go on in the base install.

    Args:
        command: What needs the packages, for the message.
        packages: Which it needs.
        instead: What does without them, as the message's end.

    Raises:
        ConfigurationError: One of them is not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{command} needs {' and '.join(missing)}, which the base install does not have: "
            f"pip install '.[rllib]' in a checkout of rlmesh-ray{instead}"
        )


@contextlib.contextmanager
def connected_ray(console: Console, num_cpus: int, *, address: str | None = None) -> Iterator[None]:
    """Connect to Ray, and disconnect in the end.

    Args:
        console: Told what happens.
        num_cpus: Logical CPUs of a Ray that is started here. Ray counts one an actor, and most
            actors mostly wait: there may be more than the machine has.
        address: As ``ray.init`` takes it; ``"local"`` starts a new one in any case. None: what
            ``RAY_ADDRESS`` says, else the one that ``ray start`` has started, else a new one.

    Raises:
        ConfigurationError: There is no Ray at the address.
    """
    import ray

    is_new = _start_or_join(address, max(num_cpus, os.cpu_count() or 1))
    cpus = ray.cluster_resources().get("CPU", 0.0)
    nodes = sum(node["Alive"] for node in ray.nodes())
    console.event("ray", started=is_new, nodes=nodes, cpus=cpus, version=ray.__version__)
    console.say(
        f"Ray {ray.__version__} {'started' if is_new else 'joined'}: {nodes} node(s), "
        f"{cpus:g} logical CPUs"
    )
    # Ray prints what it has to say of lost workers, log_to_driver or not.
    aside = contextlib.redirect_stdout(sys.stderr) if console.is_json else contextlib.nullcontext()
    with aside:
        try:
            yield
        finally:
            ray.shutdown()  # it prints what it has not yet


@contextlib.contextmanager
def joined_ray(address: str | None) -> Iterator[None]:
    """Connect to a Ray that runs, and disconnect in the end; never starts one.

    Args:
        address: As ``ray.init`` takes it. None: what ``RAY_ADDRESS`` says, else the one that
            ``ray start`` has started here.

    Raises:
        ConfigurationError: There is no Ray at the address.
    """
    import ray

    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _probe(where)
        _init(where)
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_joined(where, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _start_or_join(address: str | None, num_cpus: int) -> bool:
    """Return whether a new Ray was started."""
    where = address or os.environ.get("RAY_ADDRESS") or "this machine"
    try:
        _probe(where)
        try:
            _init(address, num_cpus=num_cpus, include_dashboard=False)
        except ValueError:
            # So says Ray of num_cpus where one runs already.
            _init(address)
            return False
    except (OSError, RuntimeError, ValueError) as error:
        if address not in {None, "local"}:
            raise _not_joined(where, error) from error
        raise ConfigurationError(
            f"cannot use the Ray at {where}: {error}; check RAY_ADDRESS, set RAY_AUTH_MODE=token "
            "where Ray asks for its token, or unset RAY_ADDRESS to start a Ray here"
        ) from error
    return True


def _not_joined(where: str, error: Exception) -> ConfigurationError:
    there = "on this machine" if where == "auto" else f"at {where}"
    return ConfigurationError(
        f"cannot join a Ray {there}: {error}; start one with `ray start --head`, or name a "
        "running one (--ray-address, RAY_ADDRESS), with RAY_AUTH_MODE=token where it asks for "
        "its token"
    )


def _probe(where: str) -> None:
    """Find out at once whether anything listens at HOST:PORT; Ray itself tries for minutes.

    Raises:
        OSError: Nothing does.
    """
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()


def _init(address: str | None, **options: object) -> None:
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    # What actors log, runners above all, is asked for with --debug.
    ray.init(address=address, log_to_driver=is_verbose(), logging_level=logging.ERROR, **options)
    # Ray has put its own there, which ends the process without a word of ours.
    signal.signal(signal.SIGTERM, handler)
