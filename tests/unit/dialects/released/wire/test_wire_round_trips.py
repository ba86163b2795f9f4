"""Any message of the released generation comes back equal from its wire."""

import re
from array import array
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import WIRE_V1, GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.wire import env, model, values
from rlmesh_ray.dialects.released.wire.specs import spec_from_proto, spec_to_proto
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import (
    MAX_ID_CHARACTERS,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.protocol.model_session import EpisodesForgotten, ForgetEpisodes
from rlmesh_ray.spaces.batch import leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.spec import MAX_LANE_BYTES, DiscreteSpec, MultiBinarySpec, TextSpec
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.testing.strategies import batches, damaged, gymnasium_spaces, plain_infos, specs
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as env_pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as model_pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1 import spaces_pb2, value_pb2
from rlmesh_ray.wire.protobuf import parse

TEXT = st.text(max_size=8)
UINT32 = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TIMEOUT_MS = st.integers(0, 2**63 - 1)
NUMBERS = st.floats(allow_nan=False)
MASK = st.lists(st.sampled_from([0, 1]), max_size=3).map(bytes)
INFOS = plain_infos()
# What stands where a value belongs must be one.
VALUES = st.lists(st.binary(max_size=8), max_size=3).map(
    lambda parts: value_pb2.SpaceValue(leaves=parts).SerializeToString()
)
MODEL_CODES = st.sampled_from(m.ModelErrorCode)


def tuples(parts: Any) -> Any:
    return st.lists(parts, max_size=3).map(tuple)


def as_the_wire_has_it(message: Any) -> Any:
    """The wire has a shape only: MultiBinary(2) and MultiBinary((2,)) look alike."""
    if isinstance(message, MultiBinarySpec):
        return MultiBinarySpec(message.shape[0]) if len(message.shape) == 1 else message
    if isinstance(message, tuple) and not hasattr(message, "_fields"):
        return tuple(map(as_the_wire_has_it, message))
    if is_dataclass(message) and not isinstance(message, type):
        parts = {each.name: getattr(message, each.name) for each in fields(message) if each.init}
        return replace(message, **{name: as_the_wire_has_it(part) for name, part in parts.items()})
    return message


RECORDS = st.builds(
    m.EpisodeRecord,
    episode_id=TEXT,
    env_index=UINT32,
    step_count=INT64,
    cumulative_reward=NUMBERS,
    terminated=st.booleans(),
    truncated=st.booleans(),
    start_timestamp_ns=INT64,
    end_timestamp_ns=INT64,
    seed=st.none() | INT64,
    final_info=INFOS,
)
ENV_REQUESTS = st.one_of(
    st.builds(m.Configure, TEXT, TEXT),
    st.builds(m.Reset, TEXT, tuples(INT64), INFOS, TIMEOUT_MS, tuples(UINT32), tuples(TEXT)),
    st.builds(m.Step, TEXT, VALUES, TIMEOUT_MS, tuples(UINT32), tuples(TEXT)),
    st.builds(m.Render, TEXT, timeout_ms=TIMEOUT_MS, env_indices=tuples(UINT32)),
    st.builds(m.Close, TEXT, TEXT),
)
ENV_RESPONSES = st.one_of(
    st.builds(m.Configured, TEXT),
    st.builds(m.ResetDone, TEXT, VALUES, INFOS, st.just(())),
    st.builds(
        m.StepDone,
        TEXT,
        VALUES,
        st.lists(NUMBERS, max_size=3).map(lambda numbers: array("d", numbers)),
        MASK,
        MASK,
        INFOS,
        tuples(RECORDS),
        st.just(()),
        tuples(UINT32),
    ),
    st.builds(m.Rendered, TEXT, st.none() | st.binary(max_size=8)),
    st.builds(m.Closed, TEXT, tuples(RECORDS)),
    st.builds(
        m.EnvFailed,
        TEXT,
        st.sampled_from(m.EnvErrorCode),
        TEXT,
        st.booleans(),
        TEXT,
        tuples(RECORDS),
    ),
)
CONTRACTS = st.builds(
    EnvContract,
    id=TEXT,
    observation_space=specs(4),
    action_space=specs(4),
    num_envs=st.integers(0, 1000),
    autoreset_mode=st.sampled_from(AutoresetMode),
    render_mode=TEXT,
    metadata=INFOS,
)
ENV_SPECS = st.builds(
    EnvContract,
    id=TEXT,
    observation_space=specs(4),
    action_space=specs(4),
    num_envs=st.just(1),
    autoreset_mode=st.just(AutoresetMode.DISABLED),
    metadata=INFOS,
)
IDS = st.text(min_size=1, max_size=8)
CONTEXTS = st.builds(PredictContext, TEXT, IDS, TEXT)


@st.composite
def predicts(draw: st.DrawFn, request_id: str | None = None) -> Predict:
    step = draw(INT64)
    slots = [PredictSlot(model.NO_LANE, each, step, False) for each in draw(tuples(TEXT))]
    # Without a row there is no step.
    context = replace(draw(CONTEXTS), slots=tuple(slots))
    own_id = context.request_id if request_id is None else request_id
    return Predict(own_id, context, draw(VALUES))


PREDICTED = st.builds(
    lambda context, action, later: Predicted(context.request_id, context, action, later=later),
    CONTEXTS,
    VALUES,
    tuples(VALUES),
)
FAILED = st.builds(m.ModelFailed, st.just(""), MODEL_CODES, TEXT, st.booleans(), TEXT)
MODEL_REQUESTS = st.one_of(
    st.builds(ConfigureRoute, TEXT, CONTEXTS, ENV_SPECS, st.integers(1, 2**32 - 1)),
    TEXT.flatmap(predicts),
    st.builds(GroupedPredict, TEXT, st.lists(predicts(), min_size=1, max_size=3).map(tuple)),
    st.builds(ForgetEpisodes, TEXT, CONTEXTS, tuples(TEXT)),
    st.builds(CloseRoute, TEXT, CONTEXTS, TEXT),
    st.builds(CloseModel, TEXT, TEXT),
)
MODEL_RESPONSES = st.one_of(
    # No length of a chunk, or more than one action.
    st.builds(RouteConfigured, TEXT, st.just(0) | st.integers(2, 2**32 - 1)),
    st.builds(replace, PREDICTED, request_id=TEXT),
    st.builds(GroupedPredicted, TEXT, tuples(PREDICTED | FAILED)),
    st.builds(EpisodesForgotten, TEXT),
    st.builds(RouteClosed, TEXT),
    st.builds(ModelClosed, TEXT),
    st.builds(m.ModelFailed, TEXT, MODEL_CODES, TEXT, st.booleans(), TEXT),
)
CAPABILITIES = st.dictionaries(TEXT, TEXT, max_size=3)
OFFERS = st.builds(HandshakeRequest, TEXT, TEXT, TEXT, tuples(TEXT), CAPABILITIES)


def answers(contracts: st.SearchStrategy[Any]) -> st.SearchStrategy[HandshakeResponse]:
    """Draw answers; only those that say yes have a contract."""

    def answer(compatible: bool, contract: Any) -> st.SearchStrategy[HandshakeResponse]:
        return st.builds(
            HandshakeResponse,
            compatible=st.just(compatible),
            generation=st.just(WIRE_V1),
            min_generation=st.just(WIRE_V1),
            server_version=TEXT,
            editions=tuples(TEXT),
            capabilities=CAPABILITIES,
            selected_edition=TEXT,
            error_message=TEXT,
            contract=contract,
        )

    return answer(True, contracts) | answer(False, st.none())


ROUND_TRIPS: dict[str, tuple[Any, Any, Any]] = {
    "env request": (ENV_REQUESTS, env.pack_request, env.parse_request),
    "env response": (ENV_RESPONSES, env.pack_response, env.parse_response),
    "model request": (MODEL_REQUESTS, model.pack_request, model.parse_request),
    "model response": (MODEL_RESPONSES, model.pack_response, model.parse_response),
    "env offer": (OFFERS, env.HANDSHAKE.pack_request, env.HANDSHAKE.parse_request),
    "model offer": (OFFERS, model.HANDSHAKE.pack_request, model.HANDSHAKE.parse_request),
    "env answer": (
        answers(st.none() | CONTRACTS),
        env.HANDSHAKE.pack_response,
        env.HANDSHAKE.parse_response,
    ),
    "model answer": (
        answers(st.none()),
        model.HANDSHAKE.pack_response,
        model.HANDSHAKE.parse_response,
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(data=st.data())
def test_every_message_comes_back_equal(name: str, data: st.DataObject) -> None:
    messages, pack, parse_ = ROUND_TRIPS[name]
    message = data.draw(messages)

    assert parse_(pack(message)) == as_the_wire_has_it(message)


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(data=st.data())
def test_damage_to_any_frame_is_refused_or_read(name: str, data: st.DataObject) -> None:
    messages, pack, parse_ = ROUND_TRIPS[name]
    frame = data.draw(damaged(pack(data.draw(messages))))

    try:
        read = parse_(frame)
    except CodecError:
        assert "request" not in name, "every request is answered"
        return

    if not isinstance(read, m.MalformedRequest):
        pack(read)


@pytest.mark.parametrize("num_lanes", [1, 3])
@given(data=st.data())
def test_a_batch_comes_back_to_the_bit_and_is_a_message_of_the_schema(
    data: st.DataObject, num_lanes: int
) -> None:
    spec = data.draw(specs())
    columns = data.draw(batches(spec, num_lanes))

    frame = values.encode_batch(spec, columns, num_lanes)

    assert_identical(values.decode_batch(spec, frame, num_lanes), columns)
    message = value_pb2.SpaceValue.FromString(frame)
    assert message.SerializeToString() == frame
    assert len(message.leaves) == len(leaves(spec))


@given(data=st.data())
def test_a_damaged_batch_is_refused_or_has_the_declared_form(data: st.DataObject) -> None:
    spec = data.draw(specs())
    frame = values.encode_batch(spec, data.draw(batches(spec, 2)), 2)

    try:
        columns = values.decode_batch(spec, data.draw(damaged(frame)), 2)
    except CodecError:
        return

    # Encoding refuses columns of any other form.
    values.encode_batch(spec, columns, 2)


@given(data=st.data())
def test_batches_that_are_joined_can_be_split_again(data: st.DataObject) -> None:
    spec = data.draw(specs())
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    frames = [values.encode_batch(spec, data.draw(batches(spec, n)), n) for n in counts]

    codec = values.codec(spec)
    columns = codec.join(frames, counts)

    assert codec.split(columns, counts) == frames


@given(space=gymnasium_spaces())
def test_a_space_comes_back_equal_from_the_wire(space: Space) -> None:
    spec = from_gymnasium(space)

    data = spec_to_proto(spec).SerializeToString()
    back = spec_from_proto(spaces_pb2.SpaceSpec.FromString(data))

    # The wire has a shape only: MultiBinary(2) and MultiBinary((2,)) look alike.
    assert repr(back) == re.sub(r"n=\((\d+),\)", r"n=\1", repr(spec))
    to_gymnasium(back)


@given(data=st.data())
def test_a_damaged_description_is_refused_or_gives_a_possible_space(data: st.DataObject) -> None:
    frame = spec_to_proto(from_gymnasium(data.draw(gymnasium_spaces()))).SerializeToString()

    try:
        spec = spec_from_proto(parse(spaces_pb2.SpaceSpec, data.draw(damaged(frame))))
    except CodecError:
        return

    to_gymnasium(spec)
    assert sum(leaf.lane_bytes for leaf in leaves(spec)) <= MAX_LANE_BYTES


def test_texts_travel_as_a_count_their_lengths_and_their_bytes() -> None:
    frame = values.encode_batch(TextSpec(0, 9, ""), [("hé",)], 1)

    # As the released package was seen to write it.
    assert frame[2:].hex() == "0100000000000000030000000000000068c3a9"


def test_the_duration_of_a_request_is_sent_behind_its_answer() -> None:
    frame = env.pack_response(m.Configured("r"))

    message = env_pb.JoinResponse.FromString(
        env.with_timings(frame, m.EnvTimings(9, 1, 300, 2**40, 0))
    )

    assert env.parse_response(message.SerializeToString()) == m.Configured("r")
    reported = (message.endpoint_total_ns, message.decode_ns, message.user_ns, message.encode_ns)
    assert reported == (9, 1, 300, 2**40)
    assert message.HasField("queue_ns")
    assert not message.HasField("lane_skew_ns")


@given(
    timings=st.dictionaries(
        st.sampled_from(["endpoint_total_ns", "user_ns", "queue_ns", "in_flight"]), UINT32
    )
)
def test_the_duration_of_a_request_is_sent_behind_what_a_model_answers(
    timings: dict[str, int],
) -> None:
    frame = model.with_timings(model.pack_response(RouteClosed("r")), timings)

    message = model_pb.JoinResponse.FromString(frame)
    assert {name: getattr(message, name) for name in timings} == timings
    assert model.parse_response(frame) == RouteClosed("r")


@pytest.mark.parametrize("is_grouped", [False, True])
@given(user_ns=st.none() | UINT32, queue_ns=st.none() | UINT32)
def test_the_duration_of_a_prediction_is_read(
    is_grouped: bool, user_ns: int | None, queue_ns: int | None
) -> None:
    predicted = Predicted("r", PredictContext("s", "e", "r"), b"")
    response = GroupedPredicted("r", (predicted,)) if is_grouped else predicted
    told = {"user_ns": user_ns, "queue_ns": queue_ns}
    timings = {name: number for name, number in told.items() if number is not None}

    read = model.parse_response(model.with_timings(model.pack_response(response), timings))

    one = read.results[0] if isinstance(read, GroupedPredicted) else read
    assert isinstance(one, Predicted)
    if len(timings) < 2:
        assert one.run is None
    else:
        assert one.run == m.BatchRun(-1, 0, user_ns or 0)
        assert one.queue_ns == queue_ns


def test_every_error_code_has_the_number_of_the_schema() -> None:
    for code in m.EnvErrorCode:
        assert env_pb.EnvErrorCode.Value(f"ENV_ERROR_CODE_{code.name}") == code.value
    assert len(m.EnvErrorCode) == len(env_pb.EnvErrorCode.keys())
    assert {f"MODEL_ERROR_CODE_{code.name}" for code in m.ModelErrorCode} == set(
        model_pb.ModelErrorCode.keys()
    )


def test_former_observations_that_the_model_has_not_requested_change_nothing() -> None:
    asked = Predict("1", PredictContext("s", "r", "1"), b"")
    message = model_pb.JoinRequest.FromString(model.pack_request(asked))
    message.predict.history.add()

    assert model.parse_request(message.SerializeToString()) == asked


def test_shutdown_comes_back_and_always_has_its_base() -> None:
    assert (
        env.HANDSHAKE.parse_shutdown_request(env.HANDSHAKE.pack_shutdown_request("done")).reason
        == "done"
    )
    answer = env.HANDSHAKE.parse_shutdown_response(
        env.HANDSHAKE.pack_shutdown_response(accepted=True, message="soon")
    )
    assert (answer.accepted, answer.message) == (True, "soon")
    assert env.HANDSHAKE.pack_shutdown_request() == b"\x0a\x00"


def test_a_very_long_deadline_does_not_overflow() -> None:
    frame = env_pb.JoinRequest(request_id="r", step=env_pb.StepRequest(timeout_ms=2**64 - 1))

    request = env.parse_request(frame.SerializeToString())

    assert isinstance(request, m.Step)
    assert request.timeout_ms == 2**63 - 1


def test_a_handshake_without_its_base_is_none() -> None:
    for read in (
        env.HANDSHAKE.parse_request,
        env.HANDSHAKE.parse_response,
        model.HANDSHAKE.parse_request,
        model.HANDSHAKE.parse_response,
    ):
        with pytest.raises(CodecError, match="has no base"):
            read(b"")


def predict(num_rows: int) -> Predict:
    slots = tuple(PredictSlot(model.NO_LANE, str(row), 0, False) for row in range(num_rows))
    return Predict("r", PredictContext("s", "e", "r", slots), b"")


@pytest.mark.parametrize(
    "request_",
    [
        predict(model.MAX_ROWS + 1),
        GroupedPredict("r", (predict(model.MAX_ROWS), predict(1))),
        GroupedPredict("r", (predict(1),) * (model.MAX_GROUPS + 1)),
        ForgetEpisodes("r", PredictContext("s", "e", "r"), ("e",) * (model.MAX_ROWS + 1)),
    ],
    ids=["rows", "rows of groups", "groups", "episodes that end"],
)
def test_a_request_that_would_hold_everybody_up_is_refused_under_its_id(
    request_: Any,
) -> None:
    refused = model.parse_request(model.pack_request(request_))

    assert isinstance(refused, m.MalformedRequest)
    assert refused.request_id == "r"
    assert "are the limit" in refused.reason


def test_what_is_within_the_limits_is_read() -> None:
    request = GroupedPredict("r", (predict(model.MAX_ROWS),))

    read = model.parse_request(model.pack_request(request))

    assert isinstance(read, GroupedPredict)
    assert isinstance(read.groups[0], Predict)
    assert len(read.groups[0].context.slots) == model.MAX_ROWS


@pytest.mark.parametrize("kind", [m.Reset, m.Step])
def test_an_id_that_would_be_kept_is_refused_when_it_is_long(kind: Any) -> None:
    action = {"action": b""} if kind is m.Step else {}
    longest, longer = ("x" * length for length in (MAX_ID_CHARACTERS, MAX_ID_CHARACTERS + 1))

    read = env.parse_request(env.pack_request(kind("r", episode_ids=("", longest), **action)))
    refused = env.parse_request(env.pack_request(kind("r", episode_ids=("", longer), **action)))

    assert isinstance(read, kind)
    assert isinstance(refused, m.MalformedRequest)
    assert refused.request_id == "r"


def test_a_value_is_not_read_to_its_end_when_it_has_more_leaves_than_its_space() -> None:
    # What comes after the leaf that is one too many is no leaf at all.
    data = b"\x0a\x08" + bytes(8) + b"\x0a\x00" + b"\xff"

    with pytest.raises(CodecError, match="more leaves than the 1 expected"):
        values.decode_batch(DiscreteSpec(2, 0, "int64"), data, 1)
    with pytest.raises(CodecError, match="0 leaves, expected 1"):
        values.decode_batch(DiscreteSpec(2, 0, "int64"), b"", 1)
