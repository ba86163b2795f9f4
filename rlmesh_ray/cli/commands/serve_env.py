"""``rlmesh-ray serve-env``: serves an environment as an endpoint."""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import LogFormatOption
from rlmesh_ray.cli.options.common import (
    ENVIRONMENT,
    LIMITS,
    SECURITY,
    DebugFlag,
    EnvArgument,
    EnvKwargs,
    JsonFlag,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    TokenFile,
    ValidationChoice,
    client_tls,
    non_negative_s,
    parse_env_kwargs,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.options.metrics import MetricsAddress
from rlmesh_ray.cli.options.recording import (
    RecordMaxOption,
    RecordOption,
    RecordVideoOption,
    record_options,
)
from rlmesh_ray.cli.options.serving import (
    AcceptedTexts,
    AddressToListen,
    AllowShutdown,
    Autoreset,
    DataAddress,
    DataAdvertise,
    IdleTimeout,
    NoSpin,
    NoTokenFlag,
    OnBadValue,
    TlsClientAuthority,
    Transport,
    TransportOption,
    client_options,
    client_scheme,
    dialect_option,
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
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import looks_like_address, parse_address
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id
from rlmesh_ray.server.log_format import LogFormat

if TYPE_CHECKING:
    from rlmesh_ray.server.env_server import EnvServer


LanesOption = Annotated[
    int,
    typer.Option(
        "--num-envs",
        min=1,
        rich_help_panel=ENVIRONMENT,
        help="Lanes of each session.",
    ),
]
AutoresetOption = Annotated[
    Autoreset,
    typer.Option(
        "--autoreset",
        rich_help_panel=ENVIRONMENT,
        help="Autoreset mode of several lanes.",
    ),
]
SessionsOption = Annotated[
    int | None,
    typer.Option(
        "--max-sessions",
        min=1,
        rich_help_panel=LIMITS,
        help="Most sessions at a time.",
        show_default="16",
    ),
]
SharedWorkerOption = Annotated[
    int,
    typer.Option(
        "--sessions-per-worker",
        min=1,
        metavar="N",
        rich_help_panel=LIMITS,
        help="Sessions that share a worker's process.",
    ),
]
ValidationOption = Annotated[
    ValidationChoice,
    typer.Option(
        "--validation",
        rich_help_panel=ENVIRONMENT,
        help="How to treat values out of range.",
    ),
]
OnBadValueOption = Annotated[
    OnBadValue,
    typer.Option(
        "--on-bad-value",
        rich_help_panel=ENVIRONMENT,
        help="On NaN: fail (the default), or end the episode.",
        show_default=False,
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(
        "--step-grace",
        metavar="SECONDS",
        rich_help_panel=LIMITS,
        callback=non_negative_s,
        help="Kill a worker so long after a deadline.",
    ),
]

ThreadsOption = Annotated[
    int,
    typer.Option(
        "--reset-threads",
        min=1,
        metavar="N",
        rich_help_panel=ENVIRONMENT,
        help="Lanes that reset at the same time.",
    ),
]
CallsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-call",
        metavar="NAME",
        rich_help_panel=ENVIRONMENT,
        help="Method or attribute that clients may use; repeatable.",
    ),
]
ObserversOption = Annotated[
    bool,
    typer.Option(
        "--no-observers",
        rich_help_panel=SECURITY,
        help="Refuse observers of sessions (see inspect --sessions).",
    ),
]
DialectOption = Annotated[
    list[str] | None,
    dialect_option(registry.env_dialects(), "all that are installed"),
]


def serve_env(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    env: EnvArgument,
    num_envs: LanesOption = 1,
    address: AddressToListen = "127.0.0.1:0",
    env_kwargs: EnvKwargs = None,
    autoreset: AutoresetOption = Autoreset.NEXT_STEP,
    max_sessions: SessionsOption = None,
    sessions_per_worker: SharedWorkerOption = 1,
    validation: ValidationOption = ValidationChoice.WARN,
    on_bad_value: OnBadValueOption = OnBadValue.ERROR,
    reset_threads: ThreadsOption = 1,
    step_grace: GraceOption = 5.0,
    allow_call: CallsOption = None,
    no_observers: ObserversOption = False,
    allow_shutdown: AllowShutdown = False,
    accept_edition_text: AcceptedTexts = None,
    dialect: DialectOption = None,
    token_file: TokenFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientAuthority = None,
    tls_from_ray: TlsFromRay = False,
    no_token: NoTokenFlag = False,
    idle_timeout: IdleTimeout = None,
    transport: TransportOption = Transport.AUTO,
    data_address: DataAddress = None,
    data_advertise: DataAdvertise = None,
    no_spin: NoSpin = False,
    register: RegisterOption = None,
    pool_token_file: PoolTokenOption = None,
    endpoint_id: EndpointIdOption = None,
    advertise: AdvertiseOption = None,
    pool_tls_ca: PoolAuthorityOption = None,
    leave_time: LeaveTimeOption = None,
    metrics_address: MetricsAddress = None,
    record: RecordOption = None,
    record_max_gb: RecordMaxOption = 10.0,
    record_video: RecordVideoOption = "auto",
    log_format: LogFormatOption = LogFormat.TEXT,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Serve an environment until stopped: each session has a vector of lanes of its own."""
    if looks_like_address(env):
        raise ConfigurationError(
            f"{env} is an address; give serve-env a Gymnasium id or module:factory to serve, and "
            f"the address as --address {parse_address(env)}"
        )
    kwargs = parse_env_kwargs(env_kwargs)
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
                register, pool_token_file, endpoint_id, tls, (address, advertise)
            )
            entry = replace(entry, leave_time_s=leave_time or 0.0)
            token, endpoint_id = entry.token(token), entry.endpoint_id
        server = EnvServer(
            env,
            num_envs=num_envs,
            address=address,
            env_kwargs=kwargs,
            autoreset=autoreset.value,
            max_sessions=max_sessions,
            sessions_per_worker=sessions_per_worker,
            token=token,
            tls=server_tls(tls_cert, tls_key, tls_client_ca, from_ray=tls_from_ray),
            no_token=no_token,
            validation=validation.value,
            on_bad_value=on_bad_value.value,
            reset_threads=reset_threads,
            step_grace_s=step_grace,
            allow_calls=allow_call or (),
            observers=not no_observers,
            allow_shutdown=allow_shutdown,
            accept_edition_texts=accept_edition_text or (),
            dialects=dialect,
            idle_timeout_s=idle_timeout,
            transport=transport.value,
            data_address=data_address,
            data_advertise=data_advertise,
            endpoint_id=endpoint_id,
            spin=False if no_spin else None,
            record=record_options(record, record_max_gb, record_video),
        )
        protection = token_fact(token, token_file) if entry is None else {"token": "required"}
        options = client_options(token_file, tls_cert, tls_client_ca, from_ray=tls_from_ray)
        scheme = client_scheme(dialect)
        labels = (endpoint_id, "") if endpoint_id else None
        if entry is not None:
            labels = full_id(entry.pool, entry.endpoint_id), fleet_name_of_pool(entry.pool)
        run = functools.partial(
            serve, log_format=log_format, metrics_address=metrics_address, labels=labels
        )
        _serve(context.obj, server, allow_call or [], entry, protection, options, scheme, run)


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
