"""Server dialect of ``rlmesh-wire-v1`` for sessions with an environment."""

from collections.abc import Sequence

from rlmesh_ray.dialects.released.protocol import ENV_RULES, WIRE_V1, answer_released_offer
from rlmesh_ray.dialects.released.wire import env as frames
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.dialects.released.wire.handshake import (
    is_handshake,
    is_request,
    is_shutdown,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import Infos
from rlmesh_ray.server.endpoint.handshake_service import GenerationHandshake
from rlmesh_ray.server.env.lane_session import EnvServerDialect
from rlmesh_ray.spaces.validation import warnings_as_maps
from rlmesh_ray.spaces.vector_infos import lane_info, lanes_infos

HANDSHAKE = GenerationHandshake(is_handshake, is_shutdown, is_request, answer_released_offer)
"""For sessions with a policy, too: how a first frame is known, and how its offer is answered."""


def _infos(infos: Infos, lanes: Sequence[int], num_lanes: int) -> Infos:
    """Return the infos of one lane as they are, and those of several as gymnasium's vectors do."""
    if len(lanes) == 1:
        return warnings_as_maps(lane_info(infos, lanes[0]))
    return warnings_as_maps(infos if len(lanes) == num_lanes else lanes_infos(infos, lanes))


DIALECT = EnvServerDialect(
    WIRE_V1,
    frames,
    values.codec,
    ENV_RULES,
    _infos,
    frames.with_timings,
    HANDSHAKE,
    subset_capabilities={capabilities.SUBSET_STEP: capabilities.YES},
)
