"""Rules of model streams, by generation: the legal requests of each route state."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import (
    CloseRoute,
    ConfigureRoute,
    ModelRequest,
    ModelResponse,
    Predict,
    Predicted,
    Request,
    Response,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
    message,
)


@message
class ForgetEpisodes(RouteRequest):
    """Make a route forget episodes that have ended (``rlmesh-wire-v1`` only)."""

    episode_ids: tuple[str, ...]


@message
class EpisodesForgotten(Response):
    """Answers ForgetEpisodes."""


SessionRequest = ModelRequest | ForgetEpisodes
"""The requests of a model session, in either generation."""
SessionResponse = ModelResponse | EpisodesForgotten
"""The responses of a model session."""


class RouteState(enum.Enum):
    """State of one route."""

    ABSENT = enum.auto()
    CONFIGURED = enum.auto()


RequestTable = Mapping[RouteState, Mapping[type[Request], RouteState]]
"""The legal kinds of request in each state, with the state after success."""


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The rules of one generation."""

    requests: RequestTable
    remedy: str
    """The client's remedy for NOT_CONFIGURED, as part of a sentence."""
    keeps_same_route: bool = False
    """Whether configuring an open route again for the same contract leaves it unchanged; else the
    route starts anew."""


EDITION_2026_06_RULES = ModelRules(
    requests={
        RouteState.ABSENT: {
            ConfigureRoute: RouteState.CONFIGURED,
        },
        RouteState.CONFIGURED: {
            ConfigureRoute: RouteState.CONFIGURED,
            Predict: RouteState.CONFIGURED,
            CloseRoute: RouteState.ABSENT,
        },
    },
    remedy="send ConfigureRoute first",
)
"""The rules of ``rlmesh.protocol.v1``."""

RESPONSE_TYPES: Mapping[type[Request], type[Response]] = {
    ConfigureRoute: RouteConfigured,
    Predict: Predicted,
    ForgetEpisodes: EpisodesForgotten,
    CloseRoute: RouteClosed,
}
