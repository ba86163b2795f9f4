"""Contract of a world: as this package's servers publish it, else made from its specs."""

import time
from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.frames import RequestKind
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import (
    TensorSpace,
    TensorSpaceOptions,
    exact_space,
    read_space,
)
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import ConnectRetry, is_unreachable
from rlmesh_ray.dialects.dm_env_rpc.client.world_stream import WorldStream
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import (
    ACTION,
    CONTRACT,
    OBSERVATION,
    AgentSpecs,
    contract_from_text,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import unpack_tensor
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

_RENDERING = "rendering"
_ASKING_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class WorldContract:
    """The contract of a session, and the tensors of its spaces."""

    contract: EnvContract
    actions: TensorSpace
    observations: TensorSpace


def fetch_contract(
    connect_options: ConnectOptions, settings: DmEnvRpcSettings, retry: ConnectRetry
) -> EnvContract | None:
    """Return the contract that a server of this package publishes; None: it is another server.

    The request has a stream of its own, since other servers must refuse it, and some break.

    Args:
        connect_options: The server.
        settings: Whether to ask, and to join batched.
        retry: The time limit, while the server cannot be reached.

    Raises:
        ConfigurationError: A batched join is requested of another server, which has none.
        EndpointError: The server cannot be reached, or wants another token.
    """
    contract = None
    while settings.asks_contract:
        try:
            contract = _ask(connect_options)
            break
        except EndpointError as error:
            if not is_unreachable(error):
                raise
            retry.wait(error)
    if contract is None and settings.batched:
        raise ConfigurationError(
            f"{connect_options.address} publishes no {CONTRACT}, as servers of this package do, "
            "and other servers have no batched joins; give num_envs=... instead of batched=True"
        )
    return contract


def _ask(connect_options: ConnectOptions) -> EnvContract | None:
    """Ask once.

    Raises:
        EndpointError: The server cannot be reached, or wants another token.
    """
    stream = WorldStream(connect_options)
    end_s = time.monotonic() + min(connect_options.timeout_s, _ASKING_TIMEOUT_S)
    try:
        stream.send(frames.read_request(CONTRACT))
        text = unpack_tensor(
            frames.read_value(stream.receive(RequestKind.EXTENSION, end_s)), CONTRACT
        )
        return contract_from_text(str(text[()]))
    except (CodecError, RemoteEnvError, RemoteProtocolError, EndpointTimeoutError):
        return None
    except EndpointLostError as error:
        if is_unreachable(error):
            raise
        return None  # the request breaks it
    finally:
        stream.close()


def contract_of_world(
    specs: AgentSpecs, published: EnvContract | None, settings: DmEnvRpcSettings, address: str
) -> WorldContract:
    """Return the contract of a session whose lanes are agents.

    Args:
        specs: An agent's.
        published: From ``fetch_contract``.
        settings: How to convert specs.
        address: The server's, for messages.

    Raises:
        UnsupportedSpaceError: The specs cannot be converted to spaces.
    """
    exact = None if published is None or settings.reshapes else _exact(specs, published)
    if exact is not None:
        return replace(exact, contract=replace(exact.contract, num_envs=settings.num_envs))
    actions = read_space(
        tuple(specs.actions.values()),
        TensorSpaceOptions(
            ACTION,
            settings.actions,
            is_bare=settings.is_bare,
            max_text_length=settings.max_text_length,
            are_choices=True,
            counts_from_zero=settings.choices_from_zero,
        ),
        f"{address}, actions",
    )
    observations = read_space(
        tuple(specs.observations.values()),
        TensorSpaceOptions(
            OBSERVATION,
            settings.observations,
            (settings.reward, settings.discount, _RENDERING),
            is_bare=settings.is_bare,
            max_text_length=settings.max_text_length,
        ),
        f"{address}, observations",
    )
    contract = EnvContract(
        id="dm_env_rpc" if published is None else published.id,
        observation_space=observations.space,
        action_space=actions.space,
        num_envs=settings.num_envs,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    return WorldContract(contract, actions, observations)


def _exact(specs: AgentSpecs, published: EnvContract) -> WorldContract | None:
    actions = exact_space(published.action_space, tuple(specs.actions.values()), ACTION)
    observations = exact_space(
        published.observation_space, tuple(specs.observations.values()), OBSERVATION
    )
    if actions is None or observations is None:
        return None
    # The dialect has no pictures, and its sequences are NEXT_STEP with any environment.
    contract = replace(published, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode="")
    return WorldContract(contract, actions, observations)
