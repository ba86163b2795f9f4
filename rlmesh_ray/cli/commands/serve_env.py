"""``rlmesh-ray serve-env``: serves an environment as an endpoint."""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import LogFormatOption
from rlmesh_ray.cli.options.common import (
    DebugFlag,
    EnvArgument,
    EnvKwargs,
    JsonFlag,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    TokenFile,
    client_tls,
    parse_env_kwargs,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.options.flags import takes_flags
from rlmesh_ray.cli.options.metrics import MetricsAddress
from rlmesh_ray.cli.options.recording import (
    RecordMaxOption,
    RecordOption,
    RecordVideoOption,
    record_options,
)
from rlmesh_ray.cli.options.serving import (
    TlsClientAuthority,
    client_options,
    client_scheme,
    server_tls,
    token_fact,
)
from rlmesh_ray.cli.register_with_pool import (
    AdvertiseOption,
    EndpointIdOption,
    LeaveTimeOption,
    PoolAuthorityOption,
    PoolTokenOption,
    RegisteredServer,
    RegisterOption,
    RegistrationConfig,
    registration_config,
    require_unused,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import looks_like_address, parse_address
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id
from rlmesh_ray.server.env_options import EnvServerOptions
from rlmesh_ray.server.log_format import LogFormat

if TYPE_CHECKING:
    from rlmesh_ray.server.env_server import EnvServer


@takes_flags(EnvServerOptions)
def serve_env(  # noqa: PLR0913  # the flags that are not made from the server's options
    context: typer.Context,
    env: EnvArgument,
    json_kwargs: EnvKwargs = None,
    token_file: TokenFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientAuthority = None,
    tls_from_ray: TlsFromRay = False,
    register: RegisterOption = None,
    pool_token_file: PoolTokenOption = None,
    pool_id: EndpointIdOption = None,
    advertise: AdvertiseOption = None,
    pool_tls_ca: PoolAuthorityOption = None,
    leave_time: LeaveTimeOption = None,
    metrics_address: MetricsAddress = None,
    record_folder: RecordOption = None,
    record_max_gb: RecordMaxOption = 10.0,
    record_video: RecordVideoOption = "auto",
    log_format: LogFormatOption = LogFormat.TEXT,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
    **options: Unpack[EnvServerOptions],
) -> None:
    """Serve an environment until stopped: each session has a vector of lanes of its own."""
    if looks_like_address(env):
        raise ConfigurationError(
            f"{env} is an address; give serve-env a Gymnasium id or module:factory to serve, and "
            f"the address as --address {parse_address(env)}"
        )
    options["env_kwargs"] = parse_env_kwargs(json_kwargs)
    search_current_folder(env)
    # Ctrl-C while the environment starts ends the command as it does later.
    with contextlib.suppress(KeyboardInterrupt):
        from rlmesh_ray.cli.serve_loop import serve
        from rlmesh_ray.server.env_server import EnvServer

        token, entry = read_token(token_file), None
        if register is None:
            require_unused(pool_token_file, advertise, pool_tls_ca, leave_time)
        else:
            tls = client_tls(pool_tls_ca, tls_cert, tls_key) if pool_tls_ca else None
            entry = registration_config(
                register, pool_token_file, pool_id, tls, (options["address"], advertise)
            )
            entry = replace(entry, leave_time_s=leave_time or 0.0)
            token, pool_id = entry.token(token), entry.endpoint_id
        options["token"], options["endpoint_id"] = token, pool_id
        options["tls"] = server_tls(tls_cert, tls_key, tls_client_ca, from_ray=tls_from_ray)
        options["record"] = record_options(record_folder, record_max_gb, record_video)
        server = EnvServer(env, **options)
        protection = token_fact(token, token_file) if entry is None else {"token": "required"}
        shown = client_options(token_file, tls_cert, tls_client_ca, from_ray=tls_from_ray)
        scheme = client_scheme(options["dialects"])
        allow_calls = list(options["allow_calls"])
        labels = (pool_id, "") if pool_id else None
        if entry is not None:
            labels = full_id(entry.pool, entry.endpoint_id), fleet_name_of_pool(entry.pool)
        run = functools.partial(
            serve, log_format=log_format, metrics_address=metrics_address, labels=labels
        )
        _serve(context.obj, server, allow_calls, entry, protection, shown, scheme, run)


def _serve(
    console: Console,
    server: "EnvServer",
    allow_calls: list[str],
    entry: RegistrationConfig | None,
    protection: dict[str, str],
    options: str,
    scheme: str,
    run: Callable[..., None],
) -> None:
    from rlmesh_ray.cli.views.contract_format import (
        contract_facts,
        contract_json,
        next_commands,
        training_fact,
    )

    def announce() -> None:
        contract = server.contract
        assert contract is not None, "a server that has started has a contract"
        console.event(
            "serving",
            address=server.address,
            service="env",
            **contract_json(contract),
            allow_calls=allow_calls,
            pid=os.getpid(),
            version=__version__,
        )
        calls = {"clients may call": ", ".join(allow_calls)} if allow_calls else {}
        pool = {} if entry is None else entry.facts
        dialed = f"{scheme}{server.address}"
        training = training_fact(contract, dialed, options) if entry is None else {}
        console.facts(
            f"serving on {server.address}",
            {
                **contract_facts(contract),
                **calls,
                **protection,
                **pool,
                **training,
                "stop with": "Ctrl-C",
            },
            next_commands(contract, dialed, options) if entry is None else [],
        )
        if attending is not None:
            attending.register()

    attending = None if entry is None else RegisteredServer(server, entry, console)
    run(console, attending or server, announce)
