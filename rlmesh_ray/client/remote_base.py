"""What RemoteEnv and RemoteVectorEnv share: their session, pictures, and errors about actions."""

import io
import math
from collections.abc import Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlmesh_ray.client.env_session_client import EnvSessionClient
from rlmesh_ray.client.fork_guard import NotPicklable
from rlmesh_ray.errors import ConfigurationError, ConformanceError, LocalProtocolError
from rlmesh_ray.protocol.capabilities import MULTI_AGENT, NDARRAY
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import agents_from_metadata
from rlmesh_ray.transport.direct_connection import Pictures

_MOST_NAMES = 8
_REMEDY = (
    "use RLlib's multi-agent runner: rlmesh_ray.rllib.configure(config, ADDRESS), with policies "
    "and their mapping in config.multi_agent(...); docs/how_to/several_agents.md says what takes "
    "several agents"
)


def _refuse_generator(_env: object, _value: object = None) -> NoReturn:
    """Raise AttributeError: the generator is at the endpoint, and ``reset`` seeds it there."""
    raise AttributeError(
        "np_random is the random generator of an environment, and that runs at its endpoint: "
        "reset(seed=...) seeds it there, and a wrapper that draws from it wraps the environment "
        "that is served"
    )


class RemoteSession(NotPicklable):
    """The open session of a RemoteEnv or a RemoteVectorEnv."""

    _client: EnvSessionClient

    @property
    def contract(self) -> EnvContract:
        """What the endpoint promised."""
        return self._client.contract

    @property
    def address(self) -> str:
        """Where the endpoint is."""
        return self._client.address

    np_random = property(_refuse_generator, _refuse_generator)
    """Raises AttributeError with the reason, also where it is set."""


def agents_notice(contract: EnvContract) -> str:
    """Return that a lane holds several agents, and which, as a sentence; empty: it holds one."""
    agents = agents_from_metadata(contract.metadata.get(MULTI_AGENT))
    if not agents:
        return ""
    return f"each lane of {contract.id} holds several agents ({_listed(agents)}); {_REMEDY}"


def _listed(values: Iterable[object]) -> str:
    names = [repr(one) for one in values]
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def action_error(error: ConformanceError, contract: EnvContract) -> ConformanceError:
    """Return the error as one about an action, which names the agents that act, if there are any.

    Args:
        error: About an action of a whole lane.
        contract: Of the endpoint.
    """
    agents = agents_notice(contract)
    if not agents:
        return error.about("action")
    keys = _listed(agents_from_metadata(contract.metadata.get(MULTI_AGENT)).values())
    reason = (
        f"{error.reason}; the action of a lane is a dict with an entry for each agent, under the "
        f"keys {keys}: {agents}"
    )
    return ConformanceError(error.kind, error.path, reason, error.lane, "action")


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))


def render_lanes(client: EnvSessionClient) -> Pictures | None:
    """Render all lanes of a session.

    Returns:
        One picture per lane, (height, width, 3) uint8; None for a render mode that returns nothing
        in gymnasium either.

    Raises:
        LocalProtocolError: The lanes have no picture yet.
        ConfigurationError: The render mode returns something other than pictures.
    """
    rendered, contract = client.render(), client.contract
    if isinstance(rendered, bytes):
        picture = decode_png(rendered)
        if NDARRAY in client.answer.capabilities:
            return tiles(picture, contract.num_envs)
        return (picture,) * contract.num_envs
    if rendered is not None:
        return rendered
    if contract.render_mode == "rgb_array":
        raise LocalProtocolError(
            f"{client.address} has no picture: reset() before render(); if it was reset, the "
            "render() of its environment returned None"
        )
    if contract.render_mode not in ("", "human"):
        raise ConfigurationError(
            f"{client.address} has render mode {contract.render_mode!r}, and only pictures travel; "
            "serve the environment with render_mode='rgb_array'"
        )
    return None


def tiles(picture: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], ...]:
    """Return the frames of ``count`` lanes, which an endpoint has tiled: see ``envs.vector_host``.

    Args:
        picture: All frames, row by row in a grid as square as possible.
        count: Number of frames.
    """
    num_columns = math.ceil(math.sqrt(count))
    height = picture.shape[0] // math.ceil(count / num_columns)
    width = picture.shape[1] // num_columns
    corners = (divmod(lane, num_columns) for lane in range(count))
    return tuple(
        picture[row * height : (row + 1) * height, column * width : (column + 1) * width].copy()
        for row, column in corners
    )
