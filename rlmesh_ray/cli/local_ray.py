"""Connection of a command to Ray: to a running cluster, or to one that the command starts."""

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
from rlmesh_ray.errors import MissingPackageError, RlmeshError, install_command

_PROBE_TIMEOUT_S = 5.0


def missing_packages(packages: Sequence[str] = ("ray", "torch")) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def require_rllib(
    command: str, packages: Sequence[str] = ("ray", "torch"), *, instead: str = ""
) -> None:
    """Raise an error in an installation without Ray or torch.

    Args:
        command: Name of what needs the packages, for the message.
        packages: The packages that it needs.
        instead: An alternative without them, appended to the message.

    Raises:
        MissingPackageError: One of them is not installed.
    """
    if missing := missing_packages(packages):
        raise MissingPackageError(
            f"{command} needs {' and '.join(missing)}, which the base install does not have: "
            f"{install_command('rllib')}{instead}"
        )


@contextlib.contextmanager
def connected_ray(console: Console, num_cpus: int, *, address: str | None = None) -> Iterator[None]:
    """Connect to Ray, and disconnect in the end.

    Args:
        console: Reports the connection.
        num_cpus: Logical CPUs of a Ray that this starts. Ray reserves one for each actor, and most
            actors mostly wait: it may be more than the machine has.
        address: Address for ``ray.init``; ``"local"`` always starts a new Ray. None: the one of
            ``RAY_ADDRESS``, else the one that ``ray start`` has started, else a new one.

    Raises:
        RlmeshError: There is no Ray at the address.
    """
    with console.waiting("starting Ray" if address == "local" else "starting or joining Ray"):
        import ray

        is_new = _start_or_join(address, max(num_cpus, os.cpu_count() or 1))
        cpus = ray.cluster_resources().get("CPU", 0.0)
        nodes = sum(node["Alive"] for node in ray.nodes())
    console.event("ray", started=is_new, nodes=nodes, cpus=cpus, version=ray.__version__)
    console.say(
        f"Ray {ray.__version__} {'started' if is_new else 'joined'}: {nodes} node(s), "
        f"{cpus:g} logical CPUs"
    )
    # Ray prints messages about lost workers, also without log_to_driver.
    aside = contextlib.redirect_stdout(sys.stderr) if console.is_json else contextlib.nullcontext()
    with aside:
        try:
            yield
        finally:
            ray.shutdown()  # it prints its remaining messages


@contextlib.contextmanager
def joined_ray(console: Console, address: str | None) -> Iterator[str]:
    """Connect to a running Ray, yield its address, and disconnect in the end; never starts one.

    Args:
        console: Reports a connection that takes long.
        address: Address for ``ray.init``. None: the one of ``RAY_ADDRESS``, else the one that
            ``ray start`` has started on this machine.

    Raises:
        RlmeshError: There is no Ray at the address.
    """
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    with console.waiting("joining Ray"):
        import ray

        try:
            _probe(where)
            _init(where)
        except (OSError, RuntimeError, ValueError) as error:
            raise _not_joined(where, error) from error
    try:
        yield ray.get_runtime_context().gcs_address if where == "auto" else where
    finally:
        ray.shutdown()


def _start_or_join(address: str | None, num_cpus: int) -> bool:
    where = address or os.environ.get("RAY_ADDRESS") or "this machine"
    try:
        _probe(where)
        try:
            _init(address, num_cpus=num_cpus, include_dashboard=False)
        except ValueError:
            # Ray's error about num_cpus where one runs already.
            _init(address)
            return False
    except (OSError, RuntimeError, ValueError) as error:
        if address not in {None, "local"}:
            raise _not_joined(where, error) from error
        raise RlmeshError(
            f"cannot use the Ray at {where}: {error}; check RAY_ADDRESS, set RAY_AUTH_MODE=token "
            "where Ray asks for its token, or unset RAY_ADDRESS to start a Ray here"
        ) from error
    return True


def _not_joined(where: str, error: Exception) -> RlmeshError:
    there = "on this machine" if where == "auto" else f"at {where}"
    return RlmeshError(
        f"cannot join a Ray {there}: {error}; start one with `ray start --head`, or name a "
        "running one (--ray-address, RAY_ADDRESS), with RAY_AUTH_MODE=token where it asks for "
        "its token"
    )


def _probe(where: str) -> None:
    """Check that a program listens at HOST:PORT; Ray itself would retry for minutes.

    Raises:
        OSError: No program does.
    """
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()


def _init(address: str | None, **options: object) -> None:
    import ray

    level = logging.ERROR
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # The logs of actors, above all of runners, are shown with --debug.
        ray.init(address=address, log_to_driver=is_verbose(), logging_level=level, **options)
    finally:
        # Ray first installs its own handler, which would end the process immediately.
        signal.signal(signal.SIGTERM, handler)
