"""Name and rules of ``rlmesh-wire-v1``, the generation of the released rlmesh 0.1.0."""

from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.env_session import (
    EDITION_2026_06_RULES,
    EDITION_REQUESTS,
    EnvRules,
    SessionState,
)
from rlmesh_ray.protocol.failure_effects import Consequence, Effect, FailureKind
from rlmesh_ray.protocol.messages import (
    CloseRoute,
    Configure,
    ConfigureRoute,
    EnvErrorCode,
    Predict,
)
from rlmesh_ray.protocol.model_session import ForgetEpisodes, ModelRules, RouteState

WIRE_V1 = "rlmesh-wire-v1"

# What servers of rlmesh 0.1.0 do, but for one thing: they end the session when the environment
# raises. They accept an edition without a name and those of its release candidates, too.
ENV_RULES = EnvRules(
    requests={
        **EDITION_REQUESTS,
        SessionState.AWAIT_RESET: {
            **EDITION_REQUESTS[SessionState.AWAIT_RESET],
            Configure: SessionState.AWAIT_RESET,
        },
        SessionState.READY: {**EDITION_REQUESTS[SessionState.READY], Configure: SessionState.READY},
    },
    failures={
        **EDITION_2026_06_RULES.failures,
        FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT_OWN),
        FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
    },
    editions=frozenset({EDITION_NAME}),
    subsets_are_advertised=True,
    narrows_replies=True,
    client_mints_ids=True,
    spreads_one_seed=True,
    tracks_autoresets=True,
    reports_superseded=True,
    truncates_interrupted=True,
    ends_when_abandoned=True,
)

# A route is an adapter in this dialect.
MODEL_RULES = ModelRules(
    requests={
        RouteState.ABSENT: {
            ConfigureRoute: RouteState.CONFIGURED,
            # The end of an adapter or episode that the endpoint does not have is no error.
            ForgetEpisodes: RouteState.ABSENT,
            CloseRoute: RouteState.ABSENT,
        },
        RouteState.CONFIGURED: {
            ConfigureRoute: RouteState.CONFIGURED,
            Predict: RouteState.CONFIGURED,
            ForgetEpisodes: RouteState.CONFIGURED,
            CloseRoute: RouteState.ABSENT,
        },
    },
    remedy="send resolve_adapter first",
    keeps_same_route=True,
)
