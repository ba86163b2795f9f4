"""What a session with an environment's endpoint is spoken in: one value a generation.

What differs in meaning stands in the rules, which the session keeps. Nothing asks which generation
it is, but for the choice of the dialect when a stream begins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlmesh_ray.dialects.released.wire import env as released_frames
from rlmesh_ray.dialects.released.wire import values as released_values
from rlmesh_ray.protocol.env_rules import EDITION_2026_06_RULES, RELEASED_2026_06_RULES, EnvRules
from rlmesh_ray.protocol.messages import (
    EnvRequest,
    EnvResponse,
    EnvTimings,
    Infos,
    MalformedRequest,
)
from rlmesh_ray.protocol.versions import PROTOCOL_V1, WIRE_V1
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.conformance_warnings import warnings_as_maps, warnings_as_texts
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.vector_infos import lane_info, lanes_infos
from rlmesh_ray.wire.rlmesh_v1 import env as edition_frames
from rlmesh_ray.wire.rlmesh_v1 import values as edition_values


class EnvServerFrames(Protocol):
    """The part of a wire module that a session needs."""

    def parse_request(self, data: bytes) -> EnvRequest | MalformedRequest:
        """Return the request in a frame; never raises."""

    def pack_response(self, response: EnvResponse, *, tag_arrays: bool) -> bytes:
        """Return the frame of a response; arrays in infos keep their dtype if they are tagged."""


class BatchFrames(Protocol):
    """How batches of values are written and read."""

    def encode_batch(self, spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch. Raises CodecError when a column is not what it must be."""

    def decode_batch(self, spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a batch. Raises CodecError when ``data`` is none."""


@dataclass(frozen=True, slots=True)
class EnvServerDialect:
    """How to speak with the client of a session."""

    name: str
    """Of the generation."""
    frames: EnvServerFrames
    values: BatchFrames
    rules: EnvRules
    infos: Callable[[Infos, Sequence[int], int], Infos]
    """Makes of the infos of a vector what the client is told: given the lanes that its answer is
    about, and the width of the vector."""
    with_timings: Callable[[bytes, EnvTimings], bytes] | None = None
    """Adds to a response what it took; None: clients are not told."""


def _edition_infos(infos: Infos, _lanes: Sequence[int], _num_lanes: int) -> Infos:
    return warnings_as_texts(infos)


def _released_infos(infos: Infos, lanes: Sequence[int], num_lanes: int) -> Infos:
    """Return a lane's own infos as they are, and those of several as gymnasium's vectors do."""
    if len(lanes) == 1:
        return warnings_as_maps(lane_info(infos, lanes[0]))
    return warnings_as_maps(infos if len(lanes) == num_lanes else lanes_infos(infos, lanes))


ENV_DIALECTS: Mapping[str, EnvServerDialect] = {
    PROTOCOL_V1: EnvServerDialect(
        PROTOCOL_V1, edition_frames, edition_values, EDITION_2026_06_RULES, _edition_infos
    ),
    WIRE_V1: EnvServerDialect(
        WIRE_V1,
        released_frames,
        released_values,
        RELEASED_2026_06_RULES,
        _released_infos,
        released_frames.with_timings,
    ),
}
"""By generation."""
