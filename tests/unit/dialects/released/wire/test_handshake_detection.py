"""Detection of rlmesh-wire-v1 in first frames; rlmesh.protocol.v1 has the same gRPC paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import GroupedPredict, make_released_offer
from rlmesh_ray.dialects.released.wire import env, model
from rlmesh_ray.dialects.released.wire.handshake import (
    is_handshake,
    is_request,
    is_shutdown,
)
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.handshake import make_handshake_request
from rlmesh_ray.protocol.messages import CloseModel, PredictContext
from rlmesh_ray.protocol.model_session import ForgetEpisodes, SessionRequest
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1 import env as edition_env
from rlmesh_ray.wire.rlmesh_v1 import model as edition_model

CONTEXT = m.PredictContext("s", "r", "1", ())
ADAPTER = PredictContext("s", "e", "1")


def test_handshakes_are_distinguished() -> None:
    old, new = (
        make_handshake_request("tests", "1", {"a": "b"}),
        make_released_offer("tests", "1", {"a": "b"}),
    )

    assert not is_handshake(edition_env.HANDSHAKE.pack_request(old))
    assert not is_handshake(edition_model.HANDSHAKE.pack_request(old))
    assert is_handshake(env.HANDSHAKE.pack_request(new))
    assert is_handshake(model.HANDSHAKE.pack_request(new))


def test_a_handshake_with_an_empty_base_is_detected() -> None:
    message = service_pb2.HandshakeRequest()
    message.base.SetInParent()

    assert is_handshake(message.SerializeToString())


@pytest.mark.parametrize(
    "request_",
    [
        m.Reset("1", (3,)),
        m.Step("1", b""),
        m.Step("", b""),
        m.Render("1"),
        m.Close("1", "done"),
    ],
    ids=repr,
)
def test_requests_to_environments_are_distinguished(request_: m.EnvRequest) -> None:
    assert not is_request(edition_env.pack_request(request_))
    if request_.request_id:
        assert is_request(env.pack_request(request_))


def test_configure_is_detected_without_an_id() -> None:
    assert is_request(env.pack_request(m.Configure("", "2026.06")))


@pytest.mark.parametrize(
    "request_",
    [
        m.ConfigureRoute("1", CONTEXT, None),
        m.Predict("1", CONTEXT, b"x"),
        m.CloseRoute("1", CONTEXT),
        m.CloseModel("1"),
    ],
    ids=repr,
)
def test_requests_to_policies_of_the_edition_s_generation_are_not_detected(
    request_: m.ModelRequest,
) -> None:
    assert not is_request(edition_model.pack_request(request_))


@pytest.mark.parametrize(
    "request_",
    [
        m.ConfigureRoute("1", ADAPTER, None),
        m.Predict("1", ADAPTER, b""),
        GroupedPredict("", ()),
        ForgetEpisodes("", ADAPTER, ("e",)),
        CloseModel("1"),
    ],
    ids=repr,
)
def test_requests_to_policies_are_detected(request_: SessionRequest | GroupedPredict) -> None:
    assert is_request(model.pack_request(request_))


def test_shutdowns_are_distinguished() -> None:
    for reason in ("", "done"):
        assert not is_shutdown(edition_env.HANDSHAKE.pack_shutdown_request(reason))
        assert is_shutdown(env.HANDSHAKE.pack_shutdown_request(reason))


@given(data=st.binary(max_size=40))
def test_detection_never_raises(data: bytes) -> None:
    for predicate in (is_handshake, is_request, is_shutdown):
        assert predicate(data) in (True, False)


def test_a_frame_of_very_many_fields_is_not_read_to_its_end() -> None:
    many = b"\x08\x00" * 1000

    assert not is_request(many + b"\x2a\x01x")
