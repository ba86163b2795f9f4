"""The decoders of the released generation; see ``targets``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlmesh_ray.dialects.released.client.env_dialect import as_vector_infos
from rlmesh_ray.dialects.released.protocol import (
    GroupedPredict,
    GroupedPredicted,
    accept_released_answer,
    answer_released_offer,
    make_released_offer,
)
from rlmesh_ray.dialects.released.wire import env, handshake, model
from rlmesh_ray.dialects.released.wire.specs import spec_from_proto, spec_to_proto
from rlmesh_ray.dialects.released.wire.values import decode_batch, encode_batch
from rlmesh_ray.errors import CodecError, HandshakeRefusedError
from rlmesh_ray.evaluation.result import success_of
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ModelClosed,
    PredictContext,
    RouteClosed,
)
from rlmesh_ray.protocol.model_session import EpisodesForgotten, ForgetEpisodes
from rlmesh_ray.spaces.batch import leaves, stack
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as env_pb
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2 as env_service_pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as model_pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1 import spaces_pb2, value_pb2
from rlmesh_ray.wire.protobuf import parse
from rlmesh_ray.wire.rlmesh_v1.meta import decode_meta, encode_meta
from tests.fuzz.samples import EPISODE, NUM_LANES, SAMPLES, Target, contracts, specs

OFFER = make_released_offer("tests", "1.2", {})
CONTEXT = PredictContext("session", "env", "r")
VALUE = value_pb2.SpaceValue(leaves=[bytes(8), b""]).SerializeToString()
SLOTS = tuple(m.PredictSlot(model.NO_LANE, episode, 2, False) for episode in "ef")
PREDICT = m.Predict("r", replace(CONTEXT, slots=SLOTS), VALUE)
TIMINGS = {"endpoint_total_ns": 9, "user_ns": 3, "queue_ns": 4, "in_flight": 5}
FAILED = m.ModelFailed("", m.ModelErrorCode.NOT_CONFIGURED, "why", True, "trace")


def env_request(data: bytes) -> None:
    """Read what an EnvService receives; never raises."""
    handshake.is_request(data)
    request = env.parse_request(data)
    if not isinstance(request, m.MalformedRequest):
        env.parse_request(env.pack_request(request))


def env_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind."""
    yield env.pack_request(m.Configure("r", "2026.06"))
    yield env.pack_request(m.Reset("r", (1, -2), {"level": [1]}, 500, (0, 1), ("e", "f")))
    yield env.pack_request(m.Step("r", VALUE, 250, (1,), ("e",)))
    yield env.pack_request(m.Render("r", b"", 9, (0,)))
    yield env.pack_request(m.Close("r", "done"))


def env_response(data: bytes) -> None:
    """Read what a client of an EnvService receives."""
    try:
        response = env.parse_response(data)
    except CodecError:
        return
    env.parse_response(env.with_timings(env.pack_response(response), m.EnvTimings()))


def env_response_seeds() -> Iterator[bytes]:
    """Yield responses of every kind."""
    for response in (
        m.Configured("r"),
        m.ResetDone("r", VALUE, SAMPLES.infos, ()),
        m.StepDone("r", VALUE, [0.5], b"\1", b"\0", SAMPLES.infos, (EPISODE,), (), (1,)),
        m.Rendered("r", b"png"),
        m.Closed("r", (EPISODE,)),
        m.EnvFailed("r", m.EnvErrorCode.UNSUPPORTED, "why", True, "trace", (EPISODE,)),
    ):
        yield env.with_timings(env.pack_response(response), m.EnvTimings(1, 2, 3, 4, 5))


def model_request(data: bytes) -> None:
    """Read what a ModelService receives; never raises."""
    handshake.is_request(data)
    request = model.parse_request(data)
    if not isinstance(request, m.MalformedRequest):
        model.parse_request(model.pack_request(request))


def model_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind, ResolveAdapter with every space."""
    for contract in contracts():
        yield model.pack_request(m.ConfigureRoute("r", CONTEXT, contract, 2))
    yield model.pack_request(PREDICT)
    yield model.pack_request(GroupedPredict("r", (PREDICT, PREDICT)))
    yield model.pack_request(ForgetEpisodes("r", CONTEXT, ("e",)))
    yield model.pack_request(CloseRoute("r", CONTEXT, "done"))
    yield model.pack_request(CloseModel("r", "done"))


def model_response(data: bytes) -> None:
    """Read what a client of a ModelService receives."""
    try:
        response = model.parse_response(data)
    except CodecError:
        return
    model.parse_response(model.with_timings(model.pack_response(response), TIMINGS))


def model_response_seeds() -> Iterator[bytes]:
    """Yield responses of every kind."""
    predicted = m.Predicted("r", CONTEXT, VALUE, later=(VALUE,))
    for response in (
        m.RouteConfigured("r", 4),
        predicted,
        GroupedPredicted("r", (predicted, FAILED)),
        EpisodesForgotten("r"),
        RouteClosed("r"),
        ModelClosed("r"),
        FAILED,
    ):
        yield model.with_timings(model.pack_response(response), TIMINGS)


def offer(data: bytes) -> None:
    """Read what a client says first, and answer it."""
    handshake.is_handshake(data)
    handshake.is_shutdown(data)
    try:
        own = env.HANDSHAKE.parse_request(data)
    except CodecError:
        return
    answer = answer_released_offer(own, server_version="1", capabilities={"x": "true"})
    env.HANDSHAKE.parse_response(env.HANDSHAKE.pack_response(answer))
    env.HANDSHAKE.parse_request(env.HANDSHAKE.pack_request(own))


def offer_seeds() -> Iterator[bytes]:
    """Yield an offer; both services have the same fields."""
    yield env.HANDSHAKE.pack_request(make_released_offer("tests", "1.2", {"a": "b"}))


def answer(data: bytes) -> None:
    """Read what a server replies, and judge it."""
    try:
        own = env.HANDSHAKE.parse_response(data)
    except CodecError:
        return
    env.HANDSHAKE.parse_response(env.HANDSHAKE.pack_response(own))
    try:
        accept_released_answer(OFFER, own)
    except HandshakeRefusedError as error:
        str(error)


def answer_seeds() -> Iterator[bytes]:
    """Yield answers with contracts of every space."""
    for contract in contracts():
        yield env.HANDSHAKE.pack_response(
            answer_released_offer(OFFER, server_version="1", capabilities={}, contract=contract)
        )


def spec(data: bytes) -> None:
    """Read a description of a space; what passes makes a gymnasium space."""
    try:
        own = spec_from_proto(parse(spaces_pb2.SpaceSpec, data))
    except CodecError:
        return
    assert spec_from_proto(spec_to_proto(own)) == own
    if sum(leaf.lane_bytes for leaf in leaves(own)) < 2**16:
        to_gymnasium(own)


def spec_seeds() -> Iterator[bytes]:
    """Yield the sample spaces."""
    for own in specs():
        yield spec_to_proto(own).SerializeToString()


def values(data: bytes) -> None:
    """Read a batch of one of the sample spaces, which the first byte picks."""
    own = _SPECS[data[0] % len(_SPECS)] if data else _SPECS[0]
    try:
        columns = decode_batch(own, data[1:], NUM_LANES)
    except CodecError:
        return
    again = decode_batch(own, encode_batch(own, columns, NUM_LANES), NUM_LANES)
    for left, right in zip(columns, again, strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right), equal_nan=_is_float(left))


def _is_float(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind == "f"


_SPECS = specs()


def values_seeds() -> Iterator[bytes]:
    """Yield a batch of each sample space."""
    for number, (space, own) in enumerate(zip(SAMPLES.gymnasium_spaces, _SPECS, strict=True)):
        space.seed(number)
        batch = stack(own, [space.sample() for _ in range(NUM_LANES)])
        yield bytes([number]) + encode_batch(own, batch, NUM_LANES)


def infos(data: bytes) -> None:
    """Read infos as a client does: of all lanes, of some and of one; each lane can be asked."""
    try:
        own = decode_meta(parse(meta_pb2.MetaMap, data))
    except CodecError:
        return
    for lanes in ((0, 1), (1, 0), (0,), (1,)):
        _read_infos(own, lanes, NUM_LANES)
    _read_infos(own, (0,), 1)


def _read_infos(reported: dict[str, Any], lanes: tuple[int, ...], num_lanes: int) -> None:
    found = as_vector_infos(reported, lanes, num_lanes)
    for lane in range(num_lanes):
        lane_info(found, lane)
        success_of(found, lane)


def infos_seeds() -> Iterator[bytes]:
    """Yield infos in every form that released endpoints tell."""
    warning = {"path": "$", "kind": "observation", "detail": "$: out of bounds"}
    each = [{"steps": 1, "deep": {"x": 0.5}}, {"steps": 2, "is_success": True}]
    mask = [True, False]
    for own in (
        {"steps": 1, "is_success": True, "rlmesh.conformance.warning": [warning]},
        {"final_info": each, "_final_info": mask, "rlmesh.conformance.warning": [warning]},
        {"q": [1, 2], "_q": mask, "d": {"x": [[1.0], [2.0]], "_x": mask}, "_d": mask},
        {"final_info": {"steps": [1, 0], "_steps": mask}, "_final_info": mask, "o": ["a", None]},
    ):
        yield encode_meta(own, tag_arrays=False).SerializeToString()


RELEASED_TARGETS = {
    "released_env_request": Target(env_request, env_request_seeds, env_pb.JoinRequest),
    "released_env_response": Target(env_response, env_response_seeds, env_pb.JoinResponse),
    "released_model_request": Target(model_request, model_request_seeds, model_pb.JoinRequest),
    "released_model_response": Target(model_response, model_response_seeds, model_pb.JoinResponse),
    "released_offer": Target(offer, offer_seeds, env_service_pb.HandshakeRequest),
    "released_answer": Target(answer, answer_seeds, env_service_pb.HandshakeResponse),
    "released_spec": Target(spec, spec_seeds, spaces_pb2.SpaceSpec),
    "released_infos": Target(infos, infos_seeds, meta_pb2.MetaMap),
    "released_values": Target(values, values_seeds, value_pb2.SpaceValue, prefix_bytes=1),
}
