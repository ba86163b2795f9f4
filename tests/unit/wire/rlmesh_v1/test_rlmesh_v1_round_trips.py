"""Any message of either service, and any handshake, comes back equal from the wire."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.testing.strategies import damaged, plain_infos, specs
from rlmesh_ray.wire.rlmesh_v1 import env, model

TEXT = st.text(max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False)
MASK = st.lists(st.sampled_from([0, 1]), max_size=3).map(bytes)
BYTES = st.binary(max_size=8)
INFOS = plain_infos()


def tuples(parts: Any) -> Any:
    return st.lists(parts, max_size=3).map(tuple)


RECORDS = st.builds(
    m.EpisodeRecord,
    episode_id=TEXT,
    env_index=INT32,
    step_count=INT64,
    cumulative_reward=NUMBERS,
    terminated=st.booleans(),
    truncated=st.booleans(),
    # Times since the epoch: their difference has to fit, too.
    start_timestamp_ns=st.integers(0, 2**63 - 1),
    end_timestamp_ns=st.integers(0, 2**63 - 1),
    seed=st.none() | INT64,
    final_info=INFOS,
)
ENV_REQUESTS = st.one_of(
    st.builds(
        m.Reset,
        TEXT,
        seeds=tuples(INT64),
        options=INFOS,
        timeout_ms=INT64,
        env_indices=tuples(INT32),
    ),
    st.builds(m.Step, TEXT, BYTES, timeout_ms=INT64, env_indices=tuples(INT32)),
    st.builds(m.Render, TEXT, mask=BYTES, timeout_ms=INT64),
    st.builds(m.Close, TEXT, TEXT),
)
ENV_RESPONSES = st.one_of(
    st.builds(m.ResetDone, TEXT, BYTES, INFOS, tuples(TEXT)),
    st.builds(
        m.StepDone,
        TEXT,
        BYTES,
        st.lists(NUMBERS, max_size=3).map(lambda numbers: array("d", numbers)),
        MASK,
        MASK,
        INFOS,
        tuples(RECORDS),
        tuples(TEXT),
    ),
    st.builds(m.Rendered, TEXT, st.none() | BYTES),
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
CONTEXTS = st.builds(
    m.PredictContext,
    TEXT,
    TEXT,
    TEXT,
    tuples(st.builds(m.PredictSlot, INT32, TEXT, INT64, st.booleans())),
)
MODEL_REQUESTS = st.one_of(
    st.builds(m.ConfigureRoute, TEXT, CONTEXTS, st.none() | CONTRACTS),
    st.builds(m.Predict, TEXT, CONTEXTS, BYTES),
    st.builds(m.CloseRoute, TEXT, CONTEXTS, TEXT),
    st.builds(m.CloseModel, TEXT, TEXT),
)
MODEL_RESPONSES = st.one_of(
    st.builds(m.RouteConfigured, TEXT),
    st.builds(m.Predicted, TEXT, CONTEXTS, BYTES),
    st.builds(m.RouteClosed, TEXT),
    st.builds(m.ModelClosed, TEXT),
    st.builds(m.ModelFailed, TEXT, st.sampled_from(m.ModelErrorCode), TEXT, st.booleans(), TEXT),
)
CAPABILITIES = st.dictionaries(TEXT, TEXT, max_size=3)
OFFERS = st.builds(HandshakeRequest, TEXT, TEXT, TEXT, tuples(TEXT), CAPABILITIES, TEXT, TEXT)


def answers(contracts: st.SearchStrategy[Any]) -> st.SearchStrategy[HandshakeResponse]:
    """Draw answers; only those that say yes have a contract."""
    fields = [TEXT, TEXT, TEXT, tuples(TEXT), CAPABILITIES, TEXT, TEXT, TEXT, TEXT]
    return st.one_of(
        st.builds(HandshakeResponse, st.just(True), *fields, contracts),
        st.builds(HandshakeResponse, st.just(False), *fields, st.none()),
    )


ROUND_TRIPS: dict[str, tuple[Any, Any, Any]] = {
    "env request": (ENV_REQUESTS, env.pack_request, env.parse_request),
    "env response": (
        ENV_RESPONSES,
        lambda response: env.pack_response(response, tag_arrays=True),
        env.parse_response,
    ),
    "env response without tagged arrays": (
        ENV_RESPONSES,
        lambda response: env.pack_response(response, tag_arrays=False),
        env.parse_response,
    ),
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
def test_every_message_is_equal_after_a_round_trip(name: str, data: st.DataObject) -> None:
    messages, pack, parse = ROUND_TRIPS[name]
    message = data.draw(messages)

    assert parse(pack(message)) == message


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(data=st.data())
def test_damage_to_any_frame_is_refused_or_read(name: str, data: st.DataObject) -> None:
    messages, pack, parse = ROUND_TRIPS[name]
    frame = data.draw(damaged(pack(data.draw(messages))))

    try:
        read = parse(frame)
    except CodecError:
        assert "request" not in name, "parsing a request never raises"
        return

    if not isinstance(read, m.MalformedRequest):
        pack(read)
