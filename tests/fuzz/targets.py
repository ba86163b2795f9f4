"""What the network reaches, as functions of bytes: one target a decoder.

Each takes any bytes and raises only what the decoder declares, which is caught here; whatever
else comes out is a finding. What a decoder lets through must be usable: it is encoded again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf import any_pb2
from gymnasium import spaces

from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import SpaceReader
from rlmesh_ray.dialects.dm_env_rpc.protocol import WorldError
from rlmesh_ray.dialects.dm_env_rpc.server.properties import Properties
from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    create_settings,
    join_settings,
    plain_setting,
    reset_settings,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import AgentSlot, lane_agent
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    data_type,
    encode_tensor,
    pack_tensor,
    specs_from_proto,
    unpack_tensor,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import pb as dm_env_rpc
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import properties as dm_env_rpc_properties
from rlmesh_ray.dialects.openpi.wire import codec as openpi_codec
from rlmesh_ray.dialects.openpi.wire import decode_actions, encode_observations, pack, unpack
from rlmesh_ray.dialects.rllink import wire as encodings
from rlmesh_ray.dialects.rllink import wire as rllink
from rlmesh_ray.errors import (
    CodecError,
    ConformanceError,
    HandshakeRefusedError,
    UnsupportedSpaceError,
)
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.handshake import (
    answer_handshake,
    check_handshake_response,
    make_handshake_request,
)
from rlmesh_ray.spaces.batch import flatten, leaves, stack
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.images import ImageCodec
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, DiscreteSpec, TextSpec
from rlmesh_ray.spaces.validation import Checker, ValidationMode
from rlmesh_ray.wire import lane_calls_v1, observe_v1
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as env_pb
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as env_service_pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as model_pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import service_pb2 as model_service_pb
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2, spaces_pb2, value_pb2
from rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1 import service_pb2 as lanes_pb
from rlmesh_ray.wire._pb.rlmesh_ray.observe.v1 import service_pb2 as observe_pb
from rlmesh_ray.wire.image_codec_v1 import ImageBatchCodec
from rlmesh_ray.wire.protobuf import parse, varint
from rlmesh_ray.wire.rlmesh_v1 import env, model
from rlmesh_ray.wire.rlmesh_v1.meta import decode_meta, encode_meta
from rlmesh_ray.wire.rlmesh_v1.specs import (
    contract_from_proto,
    contract_to_proto,
    spec_from_proto,
    spec_to_proto,
)
from rlmesh_ray.wire.rlmesh_v1.values import decode_batch, encode_batch
from tests.fuzz.registry_targets import REGISTRY_TARGETS
from tests.fuzz.released_targets import RELEASED_TARGETS
from tests.fuzz.samples import EPISODE, NUM_LANES, SAMPLES, Target, contracts, specs
from tests.peers.openpi.record import MESSAGES as OPENPI_MESSAGES

SLOTS = (m.PredictSlot(0, "e", 3, False), m.PredictSlot(1, "", 0, True))
CONTEXT = m.PredictContext("session", "route", "r", SLOTS)


def env_request(data: bytes) -> None:
    """Read what an EnvService receives; never raises."""
    request = env.parse_request(data)
    if not isinstance(request, m.MalformedRequest):
        env.parse_request(env.pack_request(request))


def env_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind."""
    yield env.pack_request(m.Reset("r", (1, -2), {"level": [1, {"b": b"x"}]}, 500, (0, 1)))
    yield env.pack_request(m.Step("r", bytes(8), 250, (1,)))
    yield env.pack_request(m.Render("r", b"\1", 9))
    yield env.pack_request(m.Close("r", "done"))


def env_response(data: bytes) -> None:
    """Read what a client of an EnvService receives; by hand as by the generated code."""
    response = _read(env.parse_response, data)
    other = _read(env.read_response, data)
    assert len(data) > 2**12 or repr(response) == repr(other)  # a text of many times the bytes
    if isinstance(response, str):
        return
    for tag_arrays in (False, True):
        env.parse_response(env.pack_response(response, tag_arrays=tag_arrays))


def _read(read: Callable[[bytes], m.EnvResponse], data: bytes) -> m.EnvResponse | str:
    try:
        return read(data)
    except CodecError as error:
        return str(error)


def env_response_seeds() -> Iterator[bytes]:
    """Yield responses of every kind."""
    failed = m.EnvFailed("r", m.EnvErrorCode.TIMEOUT, "why", True, "trace", (EPISODE,))
    step = m.StepDone("r", b"o", [0.5], b"\1", b"\0", SAMPLES.infos, (EPISODE,), ("", "e"))
    for response in (
        m.ResetDone("r", b"o", SAMPLES.infos, ("e", "f")),
        step,
        m.StepDone("r", b"o", [0.5, 1.5], b"\1\0", b"\0\0", {}, (), ("e", "")),
        m.Rendered("r", b"png"),
        m.Rendered("r", None),
        m.Closed("r", (EPISODE,)),
        failed,
    ):
        yield env.pack_response(response, tag_arrays=True)


def model_request(data: bytes) -> None:
    """Read what a ModelService receives; never raises."""
    request = model.parse_request(data)
    if not isinstance(request, m.MalformedRequest):
        model.parse_request(model.pack_request(request))


def model_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind, ConfigureRoute with contracts of every space."""
    for contract in contracts():
        yield model.pack_request(m.ConfigureRoute("r", CONTEXT, contract))
    yield model.pack_request(m.Predict("r", CONTEXT, bytes(8)))
    yield model.pack_request(m.CloseRoute("r", CONTEXT, "done"))
    yield model.pack_request(m.CloseModel("r", "done"))


def model_response(data: bytes) -> None:
    """Read what a client of a ModelService receives."""
    try:
        response = model.parse_response(data)
    except CodecError:
        return
    model.parse_response(model.pack_response(response))


def model_response_seeds() -> Iterator[bytes]:
    """Yield responses of every kind."""
    yield model.pack_response(m.RouteConfigured("r"))
    yield model.pack_response(m.Predicted("r", CONTEXT, bytes(8)))
    yield model.pack_response(m.RouteClosed("r"))
    yield model.pack_response(m.ModelClosed("r"))
    yield model.pack_response(
        m.ModelFailed("r", m.ModelErrorCode.NOT_CONFIGURED, "why", True, "trace")
    )


def _offer(service: Any) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        """Read what a client says first, and answer it."""
        try:
            offer = service.HANDSHAKE.parse_request(data)
        except CodecError:
            return
        service.HANDSHAKE.parse_response(
            service.HANDSHAKE.pack_response(answer_handshake(offer, **_SERVER))
        )
        service.HANDSHAKE.parse_request(service.HANDSHAKE.pack_request(offer))

    return run


def _answer(service: Any) -> Callable[[bytes], None]:
    offer = make_handshake_request("tests", "1", {})

    def run(data: bytes) -> None:
        """Read what a server replies, and judge it."""
        try:
            answer = service.HANDSHAKE.parse_response(data)
        except CodecError:
            return
        service.HANDSHAKE.parse_response(service.HANDSHAKE.pack_response(answer))
        try:
            check_handshake_response(offer, answer)
        except HandshakeRefusedError as error:
            str(error)

    return run


_SERVER: dict[str, Any] = {"server_version": "1", "capabilities": {"x": "y"}}


def offer_seeds() -> Iterator[bytes]:
    """Yield offers; both services have the same fields here."""
    yield env.HANDSHAKE.pack_request(make_handshake_request("tests", "1.2", {"a": "b"}))


def env_answer_seeds() -> Iterator[bytes]:
    """Yield answers with contracts of every space."""
    offer = make_handshake_request("tests", "1.2", {})
    for contract in contracts():
        yield env.HANDSHAKE.pack_response(answer_handshake(offer, contract=contract, **_SERVER))


def model_answer_seeds() -> Iterator[bytes]:
    """Yield an answer without a contract."""
    yield model.HANDSHAKE.pack_response(
        answer_handshake(make_handshake_request("tests", "1.2", {}), **_SERVER)
    )


def shutdown(data: bytes) -> None:
    """Read both frames of Shutdown."""
    for read in (env.HANDSHAKE.parse_shutdown_request, env.HANDSHAKE.parse_shutdown_response):
        try:
            read(data)
        except CodecError:
            continue


def shutdown_seeds() -> Iterator[bytes]:
    """Yield both frames of Shutdown."""
    yield env.HANDSHAKE.pack_shutdown_request("done")
    yield env.HANDSHAKE.pack_shutdown_response(accepted=False, message="no")


def spec(data: bytes) -> None:
    """Read a description of a space; what passes makes a gymnasium space."""
    try:
        own = spec_from_proto(parse(spaces_pb2.SpaceSpec, data))
    except CodecError:
        return
    assert spec_from_proto(spec_to_proto(own)) == own
    [leaf.name for leaf in leaves(own)]
    if sum(leaf.lane_bytes for leaf in leaves(own)) < 2**16:
        to_gymnasium(own)


def spec_seeds() -> Iterator[bytes]:
    """Yield the sample spaces."""
    for own in specs():
        yield spec_to_proto(own).SerializeToString()


def contract(data: bytes) -> None:
    """Read a contract."""
    try:
        own = contract_from_proto(parse(contract_pb2.EnvContract, data))
    except CodecError:
        return
    contract_from_proto(contract_to_proto(own))


def contract_seeds() -> Iterator[bytes]:
    """Yield contracts of every sample space."""
    for own in contracts():
        yield contract_to_proto(own).SerializeToString()


def values(data: bytes) -> None:
    """Read a batch of one of the sample spaces, which the first byte picks, and check it."""
    own = _SPECS[data[0] % len(_SPECS)] if data else _SPECS[0]
    try:
        columns = decode_batch(own, data[1:], NUM_LANES)
    except CodecError:
        return
    again = decode_batch(own, encode_batch(own, columns, NUM_LANES), NUM_LANES)
    for left, right in zip(columns, again, strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right), equal_nan=_is_float(left))
    for policy in ValidationMode:
        try:
            Checker(leaves(own), policy).check(columns)
        except ConformanceError as error:
            str(error)


def _is_float(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind == "f"


_SPECS = specs()


def values_seeds() -> Iterator[bytes]:
    """Yield a batch of each sample space."""
    for number, (space, own) in enumerate(zip(SAMPLES.gymnasium_spaces, _SPECS, strict=True)):
        space.seed(number)
        batch = stack(own, [space.sample() for _ in range(NUM_LANES)])
        yield bytes([number]) + encode_batch(own, batch, NUM_LANES)


_IMAGES = from_gymnasium(
    spaces.Dict(
        {
            "stack": spaces.Box(0, 255, (2, 9, 8, 3), np.uint8),
            "joints": spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    )
)
_IMAGE_CODECS = [
    ImageBatchCodec(_IMAGES, ImageCodec.from_option(each)) for each in ("jpeg", "png", "webp")
]


def images(data: bytes) -> None:
    """Read a batch of compressed images, in the format that the first byte picks."""
    codec = _IMAGE_CODECS[data[0] % len(_IMAGE_CODECS) if data else 0]
    try:
        columns = codec.decode(data[1:], NUM_LANES)
    except CodecError:
        return
    codec.decode(codec.encode(columns, NUM_LANES), NUM_LANES)


def images_seeds() -> Iterator[bytes]:
    """Yield a batch in each format."""
    space = to_gymnasium(_IMAGES)
    space.seed(1)
    batch = stack(_IMAGES, [space.sample() for _ in range(NUM_LANES)])
    for number, codec in enumerate(_IMAGE_CODECS):
        yield bytes([number]) + codec.encode(batch, NUM_LANES)


def meta(data: bytes) -> None:
    """Read infos."""
    try:
        infos = decode_meta(parse(meta_pb2.MetaMap, data))
    except CodecError:
        return
    for tag_arrays in (False, True):
        decode_meta(encode_meta(infos, tag_arrays=tag_arrays))


def meta_seeds() -> Iterator[bytes]:
    """Yield infos with arrays in both forms."""
    for tag_arrays in (False, True):
        yield encode_meta(SAMPLES.infos, tag_arrays=tag_arrays).SerializeToString()


def rllink_request(data: bytes) -> None:
    """Read what a simulator sends, in the dialect that it begins with."""
    try:
        encoding = encodings.encoding_of(data)
        request = encoding.parse_request(data)
    except CodecError:
        return
    if isinstance(request, rllink.Episodes):
        for chunk in request.chunks:
            assert len(chunk.obs) == len(chunk.actions) + 1 == len(chunk.rewards) + 1
            assert np.isfinite(chunk.rewards).all()
            assert all(rllink.is_plain(array) for array in (chunk.obs, chunk.actions))
    encoding.parse_request(encoding.pack_request(request))


def rllink_reply(data: bytes) -> None:
    """Read what a trainer answers a simulator."""
    try:
        encoding = encodings.encoding_of(data)
        reply = encoding.parse_reply(data)
    except CodecError:
        return
    if encoding is encodings.JSON:
        encoding.parse_reply(encoding.pack_reply(reply))


def rllink_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind, in both dialects."""
    outputs = {"action_dist_inputs": np.zeros((1, 2), "f4"), "action_logp": np.zeros(1)}
    chunks = (
        rllink.Chunk(np.eye(2), np.array([1]), np.array([0.5]), True, False, "e", outputs),
        rllink.Chunk(np.zeros((2, 1)), np.array([[0.5]]), np.array([1.0]), False, False),
    )
    both: list[rllink.Request] = [
        rllink.Ping("t"),
        rllink.GetConfig(),
        rllink.Episodes(chunks, True, 3),
    ]
    single: list[rllink.Request] = [
        rllink.StartEpisode("e"),
        rllink.GetAction("e", np.ones(2), 0.5),
        rllink.LogReturns("e", -1.0),
        rllink.EndEpisode("e", np.ones(2), 1.0, True),
    ]
    for request in both:
        yield encodings.RAY.pack_request(request)
    for request in (*both, *single):
        yield encodings.JSON.pack_request(request)


def rllink_reply_seeds() -> Iterator[bytes]:
    """Yield replies of every kind, in both dialects."""
    weights = {"a": np.ones(2, "f4")}
    both: list[rllink.Reply] = [
        rllink.Pong(),
        rllink.SetConfig(5, True),
        rllink.SetState(3, b"model", weights),
    ]
    for reply in both:
        yield encodings.RAY.pack_reply(reply)
        yield encodings.JSON.pack_reply(reply)
    yield encodings.JSON.pack_reply(rllink.Action("e", np.array(1), 2))
    yield encodings.JSON.pack_reply(rllink.EpisodeStarted("e"))
    yield encodings.JSON.pack_reply(rllink.Failed("why"))


_PROPERTIES = Properties(
    EnvContract("x", DiscreteSpec(2), DiscreteSpec(2), 1, AutoresetMode.NEXT_STEP)
)


def dm_env_rpc_request(data: bytes) -> None:
    """Read what a dm_env_rpc stream asks for, and its settings."""
    try:
        request = parse(dm_env_rpc.EnvironmentRequest, data)
    except CodecError:
        return
    settings: Any
    match request.WhichOneof("payload"):
        case "create_world":
            settings = request.create_world.settings
        case "join_world":
            settings = request.join_world.settings
        case "reset":
            settings = request.reset.settings
        case "reset_world":
            settings = request.reset_world.settings
        case "extension":
            with contextlib.suppress(CodecError, WorldError):
                _PROPERTIES.answer_extension(request.extension, None)
            return
        case None:
            with contextlib.suppress(CodecError, WorldError):
                _PROPERTIES.answer_core(request, None)
            return
        case _:
            return
    for read in (create_settings, join_settings, reset_settings):
        try:
            read(settings)
        except CodecError as error:
            str(error)


def dm_env_rpc_request_seeds() -> Iterator[bytes]:
    """Yield requests of every kind."""
    settings = {
        "seed": pack_tensor(np.array([1, 300])),
        "options.a.b": pack_tensor("x"),
        "options.c": pack_tensor(np.eye(2, dtype="f4")),
        "args": pack_tensor('{"timeout_s": 1, "options": {"deep": [1]}}'),
        "batched": pack_tensor(True),
        "lanes": pack_tensor(np.array([0], np.int32)),
    }
    requests: list[dict[str, Any]] = [
        {"create_world": {"settings": settings}},
        {"join_world": {"world_name": "w", "settings": settings}},
        {"reset": {"settings": settings}},
        {"reset_world": {"world_name": "w", "settings": settings}},
        {"leave_world": {}},
        {"destroy_world": {"world_name": "w"}},
    ]
    for request in requests:
        yield dm_env_rpc.EnvironmentRequest(**request).SerializeToString()
    core = dm_env_rpc.CreateWorldRequest(settings=settings).SerializeToString()
    for number in (8, 9, 10):
        yield bytes([number << 3 | 2]) + varint(len(core)) + core
    keys = dm_env_rpc_properties.PropertyRequest(read_property={"key": "rlmesh.contract"})
    extension = any_pb2.Any()
    extension.Pack(keys)
    yield dm_env_rpc.EnvironmentRequest(extension=extension).SerializeToString()


def dm_env_rpc_actions(data: bytes) -> None:
    """Read the actions of an agent whose action space the first byte picks."""
    agent = _AGENTS[data[0] % len(_AGENTS)] if data else _AGENTS[0]
    try:
        step = parse(dm_env_rpc.EnvironmentRequest, data[1:]).step
        actions = agent.read_actions(step.actions)
        agent.check_requested(step.requested_observations)
    except CodecError:
        return
    for value in actions.values():
        np.asarray(value)


def _agents() -> list[AgentSlot]:
    return [
        lane_agent(EnvContract("x", spec, spec, 1, AutoresetMode.NEXT_STEP), 0) for spec in _SPECS
    ]


_AGENTS = _agents()


def dm_env_rpc_actions_seeds() -> Iterator[bytes]:
    """Yield a step for each sample space."""
    for number, (space, own) in enumerate(zip(SAMPLES.gymnasium_spaces, _SPECS, strict=True)):
        space.seed(number)
        tensors = {
            uid: encode_tensor(np.asarray(value, kind.numpy))
            for uid, (leaf, value) in enumerate(
                zip(leaves(own), flatten(own, space.sample()), strict=True), 1
            )
            for kind in [data_type(leaf)]
        }
        step = dm_env_rpc.StepRequest(
            actions={uid: dm_env_rpc.Tensor.FromString(data) for uid, data in tensors.items()},
            requested_observations=[1, 2],
        )
        yield bytes([number]) + dm_env_rpc.EnvironmentRequest(step=step).SerializeToString()


def dm_env_rpc_specs(data: bytes) -> None:
    """Read the specs of a server's tensors, and make spaces of them."""
    try:
        specs = specs_from_proto(parse(dm_env_rpc.ActionObservationSpecs, data))
        for own, name in ((specs.actions, "action"), (specs.observations, "observation")):
            SpaceReader(DmEnvRpcSettings(), name, "a server").read(own.values())
    except (CodecError, UnsupportedSpaceError) as error:
        str(error)


def dm_env_rpc_specs_seeds() -> Iterator[bytes]:
    """Yield the specs of each sample space."""
    for agent in _AGENTS:
        yield agent.specs.SerializeToString()


def dm_env_rpc_tensor(data: bytes) -> None:
    """Read a tensor, which may stand for any number of equal elements."""
    try:
        array = unpack_tensor(parse(dm_env_rpc.Tensor, data))
        plain_setting("x", parse(dm_env_rpc.Tensor, data))
    except CodecError:
        return
    array.size  # noqa: B018


def dm_env_rpc_tensor_seeds() -> Iterator[bytes]:
    """Yield tensors of several types, of which one is one element of many axes."""
    for value in (np.eye(2, dtype="f4"), np.array([1, 300]), ["a", "b"], True):
        yield pack_tensor(value).SerializeToString()
    for one in (np.float32(1.5), np.int64(300), "text"):
        for shape in ([10**5, 10**5], [2**20], [2**16]):
            tensor = pack_tensor(one)
            tensor.shape.extend(shape)
            yield tensor.SerializeToString()


def lane_call(data: bytes) -> None:
    """Read a call into the lanes of a session."""
    try:
        call = lane_calls_v1.parse_call(data)
    except CodecError:
        return
    with contextlib.suppress(CodecError):  # a client sends less
        lane_calls_v1.pack_call(call)


def lane_call_seeds() -> Iterator[bytes]:
    """Yield calls with arguments of every kind."""
    yield lane_calls_v1.pack_call(
        lane_calls_v1.LaneCall("f", ([1, {"a": np.zeros(2)}], "x", b"y"), (0, 1))
    )


def lane_call_response(data: bytes) -> None:
    """Read the results of a call."""
    try:
        lane_calls_v1.parse_response(data)
    except CodecError:
        return


def lane_call_response_seeds() -> Iterator[bytes]:
    """Yield results and an error."""
    yield lane_calls_v1.pack_response([{"a": [np.zeros(2)]}, None])
    yield lane_calls_v1.pack_response(lane_calls_v1.CallFailed(m.EnvErrorCode.TIMEOUT, "why"))


def observed(data: bytes) -> None:
    """Read what an observer receives."""
    for read in (observe_v1.parse_sessions, observe_v1.parse_statistics):
        with contextlib.suppress(CodecError):
            read(data)


def observed_seeds() -> Iterator[bytes]:
    """Yield statistics, and no session."""
    yield observe_v1.pack_statistics([observe_v1.EndpointStatistics("env", {"steps": 3})])
    yield observe_v1.pack_sessions([])


def openpi_observation(data: bytes) -> None:
    """Read what an openpi client sends to a policy with an image, a state and a prompt."""
    try:
        columns = openpi_codec(_OPENPI_SPACE).decode(data, 1)
    except CodecError:
        return
    (again,) = encode_observations(_OPENPI_SPACE, columns, 1)
    openpi_codec(_OPENPI_SPACE).decode(again, 1)


def openpi_result(data: bytes) -> None:
    """Read what an openpi server answers."""
    try:
        decode_actions(_OPENPI_ACTIONS, unpack(data))
    except CodecError:
        return


def openpi_seeds() -> Iterator[bytes]:
    """Yield messages of the published client, and of ours."""
    for message in OPENPI_MESSAGES.values():
        yield pack(message)
    image = np.zeros((2, 2, 3), np.uint8)
    yield pack({"image": image, "observation": {"state": [0.5, 1]}, "mode": 2, "prompt": "go"})


_OPENPI_SPACE = DictSpec(
    (
        ("image", BoxSpec((2, 2, 3), "uint8", bytes(1), bytes([255]))),
        ("observation/state", BoxSpec((2,), "float32", bytes(4), np.float32(1).tobytes())),
        ("mode", DiscreteSpec(3)),
        ("prompt", TextSpec(0, 10, "")),
    )
)
_OPENPI_ACTIONS = BoxSpec((2,), "float32", bytes(4), np.float32(9).tobytes())


TARGETS = (
    RELEASED_TARGETS
    | REGISTRY_TARGETS
    | {
        "env_request": Target(env_request, env_request_seeds, env_pb.JoinRequest),
        "env_response": Target(env_response, env_response_seeds, env_pb.JoinResponse),
        "model_request": Target(model_request, model_request_seeds, model_pb.JoinRequest),
        "model_response": Target(model_response, model_response_seeds, model_pb.JoinResponse),
        "env_offer": Target(_offer(env), offer_seeds, env_service_pb.HandshakeRequest),
        "env_answer": Target(_answer(env), env_answer_seeds, env_service_pb.HandshakeResponse),
        "model_offer": Target(_offer(model), offer_seeds, model_service_pb.HandshakeRequest),
        "model_answer": Target(
            _answer(model), model_answer_seeds, model_service_pb.HandshakeResponse
        ),
        "shutdown": Target(shutdown, shutdown_seeds, env_service_pb.ShutdownResponse),
        "spec": Target(spec, spec_seeds, spaces_pb2.SpaceSpec),
        "contract": Target(contract, contract_seeds, contract_pb2.EnvContract),
        "values": Target(values, values_seeds, value_pb2.ValueList, prefix_bytes=1),
        "images": Target(images, images_seeds, value_pb2.ValueList, prefix_bytes=1),
        "meta": Target(meta, meta_seeds, meta_pb2.MetaMap),
        "lane_call": Target(lane_call, lane_call_seeds, lanes_pb.CallRequest),
        "lane_call_response": Target(
            lane_call_response, lane_call_response_seeds, lanes_pb.CallResponse
        ),
        "observed": Target(observed, observed_seeds, observe_pb.StatisticsResponse),
        "dm_env_rpc_specs": Target(
            dm_env_rpc_specs, dm_env_rpc_specs_seeds, dm_env_rpc.ActionObservationSpecs
        ),
        "dm_env_rpc_tensor": Target(dm_env_rpc_tensor, dm_env_rpc_tensor_seeds, dm_env_rpc.Tensor),
        "rllink_request": Target(rllink_request, rllink_request_seeds, None),
        "rllink_reply": Target(rllink_reply, rllink_reply_seeds, None),
        "openpi_observation": Target(openpi_observation, openpi_seeds, None),
        "openpi_result": Target(openpi_result, openpi_seeds, None),
        "dm_env_rpc_request": Target(
            dm_env_rpc_request, dm_env_rpc_request_seeds, dm_env_rpc.EnvironmentRequest
        ),
        "dm_env_rpc_actions": Target(
            dm_env_rpc_actions,
            dm_env_rpc_actions_seeds,
            dm_env_rpc.EnvironmentRequest,
            prefix_bytes=1,
        ),
    }
)
