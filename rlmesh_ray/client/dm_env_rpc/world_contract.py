"""What a world promises: its contract, exact from our own servers, else read from its specs."""

import time
from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.dm_env_rpc import frames
from rlmesh_ray.client.dm_env_rpc.frames import Kind
from rlmesh_ray.client.dm_env_rpc.settings import DmEnvRpcSettings
from rlmesh_ray.client.dm_env_rpc.tensor_space import (
    Reading,
    TensorSpace,
    exact_space,
    read_space,
)
from rlmesh_ray.client.dm_env_rpc.tries import Tries, is_away
from rlmesh_ray.client.dm_env_rpc.world_stream import WorldStream
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
from rlmesh_ray.wire.dm_env_rpc_v1.contract_property import CONTRACT, contract_from_text
from rlmesh_ray.wire.dm_env_rpc_v1.spaces import ACTION, OBSERVATION
from rlmesh_ray.wire.dm_env_rpc_v1.tensor_specs import AgentSpecs
from rlmesh_ray.wire.dm_env_rpc_v1.tensors import unpack_tensor

_RENDERING = "rendering"
_ASKING_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class World:
    """The contract of a session, and the tensors that its values travel in."""

    contract: EnvContract
    actions: TensorSpace
    observations: TensorSpace


def ask_contract(dial: Dial, settings: DmEnvRpcSettings, tries: Tries) -> EnvContract | None:
    """Return the contract that one of this package's servers publishes; None: it is another one.

    The question goes on a stream of its own: other servers must refuse it, and some break.

    Args:
        dial: The server.
        settings: Say whether to ask.
        tries: For how long to try, where nobody answers yet.

    Raises:
        ConfigurationError: A batched join is wanted, and only our own servers offer it.
        EndpointError: Nobody is there, or wants another token.
    """
    contract = None
    while settings.asks_contract:
        try:
            contract = _ask(dial)
            break
        except EndpointError as error:
            if not is_away(error):
                raise
            tries.wait(error)
    if contract is None and settings.batched:
        raise ConfigurationError(
            f"{dial.address} publishes no {CONTRACT}, as servers of this package do, and no others "
            "carry a batch of lanes on one stream; give num_envs=... instead of batched=True"
        )
    return contract


def _ask(dial: Dial) -> EnvContract | None:
    """Ask once.

    Raises:
        EndpointError: Nobody is there, or wants another token.
    """
    stream = WorldStream(dial)
    end_s = time.monotonic() + min(dial.timeout_s, _ASKING_TIMEOUT_S)
    try:
        stream.send(frames.read_request(CONTRACT))
        text = unpack_tensor(frames.read_value(stream.receive(Kind.EXTENSION, end_s)), CONTRACT)
        return contract_from_text(str(text[()]))
    except (CodecError, RemoteEnvError, RemoteProtocolError, EndpointTimeoutError):
        return None
    except EndpointLostError as error:
        if is_away(error):
            raise
        return None  # it breaks
    finally:
        stream.close()


def world_of(
    specs: AgentSpecs, published: EnvContract | None, settings: DmEnvRpcSettings, address: str
) -> World:
    """Return what a session's lanes promise.

    Args:
        specs: Of an agent; not of a batch.
        published: What ``ask_contract`` returned.
        settings: How to read specs.
        address: For messages.

    Raises:
        UnsupportedSpaceError: The specs have no form as spaces.
    """
    exact = None if published is None or settings.reshapes else _exact(specs, published)
    if exact is not None:
        return replace(exact, contract=replace(exact.contract, num_envs=settings.num_envs))
    actions = read_space(
        tuple(specs.actions.values()),
        Reading(
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
        Reading(
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
    return World(contract, actions, observations)


def _exact(specs: AgentSpecs, published: EnvContract) -> World | None:
    actions = exact_space(published.action_space, tuple(specs.actions.values()), ACTION)
    observations = exact_space(
        published.observation_space, tuple(specs.observations.values()), OBSERVATION
    )
    if actions is None or observations is None:
        return None
    # Pictures do not travel, and the sequences of dm_env_rpc are NEXT_STEP, whatever is behind.
    contract = replace(published, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode="")
    return World(contract, actions, observations)
