"""What may be asked of a model session, and what generations disagree about there."""

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
    """Have a route forget episodes, which have ended."""

    episode_ids: tuple[str, ...]


@message
class EpisodesForgotten(Response):
    """Answers ForgetEpisodes."""


SessionRequest = ModelRequest | ForgetEpisodes
"""What a session is asked, in whatever generation."""
SessionResponse = ModelResponse | EpisodesForgotten
"""What it answers."""


class RouteState(enum.Enum):
    """Where one route stands."""

    ABSENT = enum.auto()
    CONFIGURED = enum.auto()


RequestTable = Mapping[RouteState, Mapping[type[Request], RouteState]]
"""The state after a request has succeeded. A kind that is missing is refused."""


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What generations disagree about."""

    requests: RequestTable
    remedy: str
    """What a client has to do about a route that is not configured, as part of a sentence."""
    keeps_same_route: bool = False
    """Whether a route goes on as it is when it is configured once more for the environment that it
    is for; else it begins anew."""


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
"""Those of ``rlmesh.protocol.v1``."""

RESPONSE_TYPES: Mapping[type[Request], type[Response]] = {
    ConfigureRoute: RouteConfigured,
    Predict: Predicted,
    ForgetEpisodes: EpisodesForgotten,
    CloseRoute: RouteClosed,
}
