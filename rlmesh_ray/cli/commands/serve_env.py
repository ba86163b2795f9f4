"""``rlmesh-ray serve-env``: serves an environment as an endpoint."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Annotated, Unpack

import rlmesh_ray
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import (
    EndpointSecurity,
    EnvArgument,
    MadeEnvFlags,
    MonitoringFlags,
    RecordingFlags,
    client_scheme,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.register_with_pool import PoolFlags, RegistrationConfig, registered
from rlmesh_ray.cli.serve_loop import serve
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import looks_like_address, parse_address
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions, listening
from rlmesh_ray.server.env.env_options import EnvServerOptions


def serve_env(
    console: Console,
    env: EnvArgument,
    made: MadeEnvFlags,
    listen: Annotated[ListenOptions, "openpi"],
    security: EndpointSecurity,
    pool: PoolFlags,
    monitoring: MonitoringFlags,
    recording: RecordingFlags,
    **options: Unpack[EnvServerOptions],
) -> None:
    """Serve an environment until stopped: each session has a vector of lanes of its own."""
    if looks_like_address(env):
        raise ConfigurationError(
            f"{env} is an address; give serve-env a Gymnasium id or module:factory to serve, and "
            f"the address as --address {parse_address(env)}"
        )
    options["env_kwargs"] = made.kwargs()
    search_current_folder(env)
    # Ctrl-C while the environment starts ends the command as it does later.
    with contextlib.suppress(KeyboardInterrupt):
        token, endpoint_id = read_token(security.token_file), pool.endpoint_id
        address, _ = listening("serve-env", listen)
        entry = pool.entry(address, (security.tls_cert, security.tls_key))
        protection, labels = security.token_fact(token), (endpoint_id, "") if endpoint_id else None
        if entry is not None:
            token, endpoint_id = entry.token(token), entry.to.endpoint_id
            protection = {"token": "required"}
            labels = full_id(entry.to.pool, endpoint_id), fleet_name_of_pool(entry.to.pool)
        options["address"] = listen
        options["token"] = security.required(token)
        options["tls"] = security.tls()
        options["record"] = recording.options()
        server = rlmesh_ray.EnvServer(env, _endpoint_id=endpoint_id, **options)
        run = functools.partial(serve, monitoring=monitoring, labels=labels)
        scheme = client_scheme(options["dialects"])
        allow_calls = list(options["allow_calls"])
        _serve(console, server, allow_calls, entry, protection, security.of_clients(), scheme, run)


def _serve(
    console: Console,
    server: "rlmesh_ray.EnvServer",
    allow_calls: list[str],
    entry: RegistrationConfig | None,
    protection: dict[str, str],
    options: str,
    scheme: str,
    run: Callable[..., None],
) -> None:
    from rlmesh_ray.cli.contract_format import (
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
            version=rlmesh_ray.__version__,
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

    if entry is not None:
        run = functools.partial(run, member=registered(server, entry, console))
    run(console, server, announce)
