"""Whoever speaks first is known by it: the generations share their paths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import model_messages as a
from rlmesh_ray.dialects.released.protocol.handshake import make_released_offer
from rlmesh_ray.dialects.released.wire import env, model
from rlmesh_ray.protocol import messages as m
from rlmesh_ray.protocol.handshake import make_handshake_request
from rlmesh_ray.protocol.versions import PROTOCOL_V1, WIRE_V1
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1 import env as edition_env
from rlmesh_ray.wire.rlmesh_v1 import model as edition_model
from rlmesh_ray.wire.version_detection import (
    generation_of_handshake,
    generation_of_request,
    generation_of_shutdown,
)

CONTEXT = m.PredictContext("s", "r", "1", ())
ADAPTER = a.AdapterContext("s", "e", "1")


def test_handshakes_are_told_apart() -> None:
    old, new = (
        make_handshake_request("tests", "1", {"a": "b"}),
        make_released_offer("tests", "1", {"a": "b"}),
    )

    assert generation_of_handshake(edition_env.pack_handshake_request(old)) == PROTOCOL_V1
    assert generation_of_handshake(edition_model.pack_handshake_request(old)) == PROTOCOL_V1
    assert generation_of_handshake(env.pack_handshake_request(new)) == WIRE_V1
    assert generation_of_handshake(model.pack_handshake_request(new)) == WIRE_V1


def test_a_handshake_with_an_empty_base_is_known() -> None:
    message = service_pb2.HandshakeRequest()
    message.base.SetInParent()

    assert generation_of_handshake(message.SerializeToString()) == WIRE_V1


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
def test_requests_to_environments_are_told_apart(request_: m.EnvRequest) -> None:
    assert generation_of_request(edition_env.pack_request(request_)) == PROTOCOL_V1
    if request_.request_id:
        assert generation_of_request(env.pack_request(request_)) == WIRE_V1


def test_configure_is_known_without_an_id() -> None:
    assert generation_of_request(env.pack_request(m.Configure("", "2026.06"))) == WIRE_V1


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
def test_requests_to_policies_are_known_in_the_editions_generation(
    request_: m.ModelRequest,
) -> None:
    assert generation_of_request(edition_model.pack_request(request_)) == PROTOCOL_V1


@pytest.mark.parametrize(
    "request_",
    [
        a.ResolveAdapter("1", ADAPTER, None),
        a.AdapterPredict("1", ADAPTER, b"", ()),
        a.GroupedPredict("", ()),
        a.ResetAdapter("", ADAPTER, ("e",)),
        a.CloseParticipant("1"),
    ],
    ids=repr,
)
def test_requests_to_policies_are_known_in_the_released_generation(
    request_: a.AnyAdapterRequest,
) -> None:
    assert generation_of_request(model.pack_request(request_)) == WIRE_V1


def test_shutdowns_are_told_apart() -> None:
    for reason in ("", "done"):
        assert generation_of_shutdown(edition_env.pack_shutdown_request(reason)) == PROTOCOL_V1
        assert generation_of_shutdown(env.pack_shutdown_request(reason)) == WIRE_V1


@given(data=st.binary(max_size=40))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_whatever_comes_is_one_of_the_two(data: bytes) -> None:
    for generation_of in (generation_of_handshake, generation_of_request, generation_of_shutdown):
        assert generation_of(data) in (PROTOCOL_V1, WIRE_V1)


def test_a_frame_of_a_great_many_fields_is_not_read_to_its_end() -> None:
    many = b"\x08\x00" * 1000

    assert generation_of_request(many + b"\x2a\x01x") == PROTOCOL_V1
