"""``rlmesh-ray inspect``: shows an endpoint's contract, dialects, capabilities and health."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rlmesh_ray
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import OUTPUT, ConnectionFlags, flag
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import EndpointUnreachableError
from rlmesh_ray.options import SHARED_MEMORY, TCP
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeResponse

if TYPE_CHECKING:
    from rlmesh_ray.client.env.observer import ObservedSession
    from rlmesh_ray.client.health import EndpointHealth

_NOT_SERVING = 1
_ANY_SPACE = "not known before the policy acts"


@dataclass(frozen=True)
class InspectFlags:
    """What is shown."""

    health: bool = flag(OUTPUT, "Only check whether it serves: exit code 0 if so, else 1.", False)
    sessions: bool = flag(
        OUTPUT,
        "Show the open sessions of an environment, and the state of their lanes.",
        False,
    )


def inspect(
    console: Console,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="HOST:PORT, unix:PATH, rlmesh://HOST:PORT, dm_env_rpc://HOST:PORT for a "
            "dm_env_rpc server, which this joins for a moment, or openpi://HOST:PORT.",
        ),
    ],
    connection: ConnectionFlags,
    flags: InspectFlags,
) -> int:
    """Show what an endpoint serves: environment or policy, spaces, capabilities, health.

    With --health the command is a probe for containers: the exit code is 0 if the endpoint would
    serve a new session now, and 1 if not, or if its health is not known.
    """
    if flags.health and flags.sessions:
        raise typer.BadParameter("--health and --sessions exclude each other; give one of them")
    from rlmesh_ray.client.health import check_health

    connect_options = connection.to(address)
    if flags.health:
        with console.waiting(f"asking {address}"):
            answer = check_health(connect_options)
        return _probe(console, connect_options.address, answer)
    if flags.sessions:
        with rlmesh_ray.EndpointObserver(
            address, token=connect_options.token, tls=connect_options.tls
        ) as observer:
            with console.waiting(f"asking {address}"):
                seen = observer.sessions()
            _show_sessions(console, address, seen)
        return 0
    with console.waiting(f"asking {address}"):
        services = list(_services(connect_options))
    for service in services:
        _show(console, connect_options.address, service, check_health(connect_options))
    return 0


_Service = tuple[str, "HandshakeResponse", tuple[str, ...]]
"""A service that has answered the handshake: ``env`` or ``model``, its answer, its dialects."""


def _probe(console: Console, address: str, health: "EndpointHealth") -> int:
    console.event("health", address=address, status=health.status.value, reason=health.reason)
    console.say(f"{address}: {_health_text(health)}")
    return 0 if health.is_serving else _NOT_SERVING


def _health_text(health: "EndpointHealth") -> str:
    text = health.status.value.lower().replace("_", " ")
    return f"{text} ({health.reason})" if health.reason else text


def _show_sessions(console: Console, address: str, sessions: "Sequence[ObservedSession]") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"sessions on {address}", title_justify="left", box=SIMPLE_HEAD)
    for column in ("session", "client", "since", "transport"):
        table.add_column(column, overflow="fold")
    for column in ("lanes", "steps", "episodes", "at step", "reward"):
        table.add_column(column, justify="right", overflow="fold")
    console.event("sessions", address=address, count=len(sessions))
    for session in sessions:
        console.event("session", address=address, **asdict(session))
        table.add_row(
            session.name,
            session.peer,
            time.strftime("%b %d %H:%M:%S", time.localtime(session.since_ns / 1e9)),
            session.transport,
            str(len(session.step_counts)),
            str(session.num_steps),
            str(session.num_episodes),
            _range(session.step_counts, session.episode_ids),
            _range(session.cumulative_rewards, session.episode_ids),
        )
    if sessions:
        console.show(table)
    else:
        console.say(f"{address}: no session is open")


def _range(values: Sequence[float], episode_ids: Sequence[str]) -> str:
    tracked = [value for value, is_tracked in zip(values, episode_ids, strict=True) if is_tracked]
    ends = (min(tracked), max(tracked)) if tracked else ()
    return " to ".join(dict.fromkeys(f"{end:.6g}" for end in ends)) or "-"


def dialects_of_env(connect_options: "rlmesh_ray.ConnectOptions") -> tuple[str, ...]:
    """Return the dialects that the endpoint of an environment serves.

    Those with a service of their own are found only where the endpoint's health lists its services,
    as that of rlmesh-ray does: to call such a service could be to join a world.

    Raises:
        EndpointError: The endpoint cannot be reached.
    """
    from rlmesh_ray.client.env.env_client import generations_of
    from rlmesh_ray.client.health import HealthStatus, check_health

    known = (HealthStatus.SERVING, HealthStatus.NOT_SERVING)
    added = [
        each.name
        for each in registry.DIALECTS
        if each.service and check_health(connect_options, each.service).status in known
    ]
    return (*generations_of(connect_options), *added)


def _services(connect_options: "rlmesh_ray.ConnectOptions") -> list[_Service]:
    """Return the services of an endpoint that answer a handshake.

    Raises:
        EndpointError: None of them answers.
    """
    from rlmesh_ray.client.env.env_session_client import probe_endpoint as ask_env
    from rlmesh_ray.client.model.remote_model import generations_of
    from rlmesh_ray.client.model.remote_model import shake_hands as ask_model

    dialect = registry.client_dialect(connect_options.address)
    if dialect is not None:
        ask = ask_model if dialect.serves_models else ask_env
        answer = ask(connect_options)
        name = "model" if dialect.serves_models else "env"
        return [(name, answer, (answer.generation,))]
    found: list[_Service] = []
    failure: EndpointUnreachableError | None = None
    for name, ask, dialects_of in (
        ("env", ask_env, dialects_of_env),
        ("model", ask_model, generations_of),
    ):
        try:
            found.append((name, ask(connect_options), dialects_of(connect_options)))
        except EndpointUnreachableError as error:
            failure = failure or error
    if not found and failure is not None:
        raise failure
    return found


def _service_name(service: str, address: str) -> str:
    if registry.client_dialect(address) is not None:
        return "environment" if service == "env" else "policy"
    return "EnvService" if service == "env" else "ModelService"


def _show(console: Console, address: str, service: _Service, health: "EndpointHealth") -> None:
    from rlmesh_ray.cli.contract_format import contract_facts, contract_json
    from rlmesh_ray.client.model.remote_model import policy_of

    name, answer, generations = service
    contract = answer.contract if isinstance(answer.contract, rlmesh_ray.EnvContract) else None
    policy = policy_of(answer) if name == "model" else None
    console.event(
        "endpoint",
        address=address,
        service=name,
        health=health.status.value,
        health_reason=health.reason,
        server_version=answer.server_version,
        generation=answer.generation,
        generations=generations,
        edition=answer.selected_edition,
        edition_status=answer.status,
        editions=answer.editions,
        capabilities=sorted(answer.capabilities),
        transports=_transports(answer),
        **(contract_json(contract) if contract else {}),
        **({"policy": asdict(policy)} if policy else {}),
    )
    edition = f"{answer.selected_edition} ({answer.status})" if answer.status else ""
    console.facts(
        f"{_service_name(name, address)} on {address}",
        {
            **(contract_facts(contract) if contract else {}),
            **(_policy_facts(policy) if policy else {}),
            **({"transports": ", ".join(_transports(answer))} if contract else {}),
            "health": _health_text(health),
            "server version": answer.server_version or "not reported",
            "dialects": ", ".join(generations),
            # Dialects may have none.
            **(
                {
                    "edition": edition or answer.selected_edition,
                    "editions": ", ".join(answer.editions),
                }
                if answer.selected_edition
                else {}
            ),
            "capabilities": "\n".join(sorted(answer.capabilities)) or "none",
        },
        [],
    )


def _transports(answer: "HandshakeResponse") -> list[str]:

    names = {SHARED_MEMORY: capabilities.SHARED_MEMORY, TCP: capabilities.DIRECT_TCP}
    return [*(name for name, each in names.items() if each in answer.capabilities), "grpc"]


def _policy_facts(policy: Any) -> dict[str, object]:
    if not policy.kind:
        return {"policy": "unknown"}
    return {
        "policy": policy.kind,
        **({"algorithm": policy.algorithm} if policy.algorithm else {}),
        "policy version": policy.version or "0 (its original weights)",
        "observation": "\n".join(policy.observation_space) or _ANY_SPACE,
        "action": "\n".join(policy.action_space) or _ANY_SPACE,
        # One line a key; the shapes are those of the environment that was accepted last.
        **(
            {"observation map": "\n".join(policy.observation_map)} if policy.observation_map else {}
        ),
        **({"horizon": f"{policy.horizon} actions at once"} if policy.horizon > 1 else {}),
        **({"chunk replay": policy.chunk_replay} if policy.chunk_replay else {}),
    }
