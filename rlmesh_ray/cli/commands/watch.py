"""``rlmesh-ray watch``: a live page of endpoints, sessions, trainings and recordings."""

import contextlib
import importlib.util
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rlmesh_ray
from rlmesh_ray.auth.token_file import TokenFile
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import joined_ray, require_rllib
from rlmesh_ray.cli.options.common import (
    OUTPUT,
    SECURITY,
    SERVING,
    ClientSecurity,
    file_flag,
    flag,
    folder_flag,
    ray_address_flag,
)
from rlmesh_ray.cli.register_with_pool import pool_secret, pool_token_flag
from rlmesh_ray.cli.signals import require_no_interrupt
from rlmesh_ray.errors import (
    AddressError,
    ListenError,
    MissingPackageError,
    RlmeshError,
    install_command,
)
from rlmesh_ray.protocol.address import Address, looks_like_address, parse_address

if TYPE_CHECKING:
    from rlmesh_ray.watch.live import EndpointSource


@dataclass(frozen=True)
class PageFlags:
    """The page, and what it shows besides endpoints."""

    address: str = flag(
        SERVING,
        "Where the page listens (port 0: a free one).",
        "127.0.0.1:7080",
        metavar="HOST:PORT",
    )
    folder: Path = folder_flag(
        OUTPUT, "Folder with trainings and recordings to show.", Path("runs")
    )
    page_token_file: Path | None = file_flag(
        SECURITY,
        "Tokens of the page, one a line; required unless it listens on loopback; mode 0600.",
    )
    pool_token_file: Path | None = pool_token_flag()
    ray_address: str | None = ray_address_flag()


def watch(
    console: Console,
    *,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help="Endpoints (HOST:PORT), pools (NAME@HOST:PORT of its registrar), or on Ray: "
            "names of fleets and pools, or ray for all. Default: ray, where one runs.",
            show_default=False,
        ),
    ] = None,
    flags: PageFlags,
    security: ClientSecurity,
) -> None:
    """Show endpoints, sessions, live pictures, trainings and recorded episodes in a browser.

    The page changes nothing, and asks endpoints only while a browser shows it.
    """
    if not (importlib.util.find_spec("starlette") and importlib.util.find_spec("uvicorn")):
        raise MissingPackageError(f"watch needs starlette and uvicorn: {install_command('watch')}")
    from rlmesh_ray.watch.live import AddressSource, LiveView, WatchedAddress
    from rlmesh_ray.watch.page import make_server, page
    from rlmesh_ray.watch.runs import RunFolder

    where = parse_address(flags.address)
    page_token = None if flags.page_token_file is None else TokenFile(flags.page_token_file)
    if page_token is None and not where.is_local:
        raise typer.BadParameter(
            f"{where} can be reached from other machines: give the page a token "
            "(--page-token-file), or listen on 127.0.0.1 and forward the port with ssh -L",
            param_hint="--address",
        )
    names = targets or []
    for name in names:
        if not name.strip() or name.startswith("@"):
            raise typer.BadParameter(
                f"{name!r} names nothing: give HOST:PORT of an endpoint, NAME@HOST:PORT of a pool, "
                "or a name on Ray",
                param_hint="TARGET",
            )
    are_addresses = {looks_like_address(name.rpartition("@")[2]) for name in names}
    if len(are_addresses) > 1:
        raise typer.BadParameter(
            "addresses and names of Ray's fleets are not watched together; start two pages",
            param_hint="TARGET",
        )
    to = security.to("")
    with contextlib.ExitStack() as stack:
        source: EndpointSource | None = None
        if True not in are_addresses:
            source = _on_ray(stack, console, names, flags.ray_address, to)
        if source is None:
            secret = pool_secret(flags.pool_token_file)
            source = AddressSource(
                [
                    WatchedAddress(replace(to, address=own), pool, secret if pool else None)
                    for pool, _, own in (name.rpartition("@") for name in names)
                ]
            )
        server = make_server(
            page(LiveView(source), RunFolder(flags.folder), page_token, where.host)
        )
        listener = stack.enter_context(_listener(where))
        url = f"http://{Address(*listener.getsockname()[:2])}"
        facts = {"endpoints": source.title or "none", "folder": flags.folder, "stop with": "Ctrl-C"}
        with contextlib.suppress(KeyboardInterrupt):
            console.event("watching", url=url, source=source.title, folder=flags.folder)
            console.facts(f"watch at {url}", facts, [])
            require_no_interrupt()
            server.run(sockets=[listener])


def _on_ray(
    stack: contextlib.ExitStack,
    console: Console,
    names: list[str],
    ray_address: str | None,
    options: "rlmesh_ray.ConnectOptions",
) -> "EndpointSource | None":
    """Return the endpoints of a running Ray; None: there is none, and none was asked for."""
    try:
        require_rllib("watch without addresses", ["ray"])
        joined = stack.enter_context(joined_ray(console, ray_address))
    except RlmeshError as error:
        if names or ray_address is not None:
            raise
        console.say(f"no endpoints are watched: {error}", style="yellow")
        return None
    from rlmesh_ray.actors.registry.endpoint_resolver import ClusterEndpoints

    fleets = [name for name in names if name != "ray"]
    return ClusterEndpoints(f"Ray at {joined}", fleets, options.token, options.tls)


def _listener(where: Address) -> socket.socket:
    """Return the socket that the page listens on.

    Raises:
        AddressError: It is in use, not this machine's, or a unix socket.
    """
    if where.path:
        raise AddressError(f"the page cannot listen on {where}: browsers dial HOST:PORT")
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        return socket.create_server((where.host, where.port), family=family)
    except OSError as error:
        raise ListenError(
            f"the page cannot listen on {where} ({error.strerror}); name another --address"
        ) from error
