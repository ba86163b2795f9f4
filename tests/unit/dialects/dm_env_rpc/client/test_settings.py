"""What users may ask of dm_env_rpc servers, and how it is written."""

import pickle
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils
from dm_env_rpc.v1.extensions import properties_pb2
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.lane_steps import require_unchanged
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import encode_tensor
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    ContractMismatchError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol.address import Address, looks_like_address, parse_address


def unpacked(settings: Any) -> dict[str, Any]:
    return {name: tensor_utils.unpack_tensor(value) for name, value in settings.items()}


def test_settings_travel_as_tensors_of_their_own_dtype() -> None:
    given: dict[str, Any] = {
        "seed": 7,
        "speed": 0.5,
        "is_dark": True,
        "level": "cave",
        "size": np.array([2, 3], np.int32),
        "options": {"wind": {"x": 1.0}},
    }

    settings = frames.as_tensors(given)

    found = unpacked(settings)
    assert settings["seed"].WhichOneof("payload") == "int64s"
    assert settings["speed"].WhichOneof("payload") == "doubles"
    assert settings["size"].WhichOneof("payload") == "int32s"
    assert found["options.wind.x"] == 1.0
    assert (found["seed"], found["is_dark"], found["level"]) == (7, True, "cave")
    assert found["size"].tolist() == [2, 3]


def test_a_setting_that_no_tensor_holds_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'half'.*float16"):
        frames.as_tensors({"half": np.float16(1)})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"a": [1, True]}, "'a' = .*a list of bool.* and int64"),
        ({"a": [2**53 + 1, 2.5]}, "a list of float64 and int64"),
        ({"a": [1, "x"]}, "a list of int64 and text"),
        ({"a": [np.float32(1), np.float64(1)]}, "a list of float32 and float64"),
        ({"a": [[1], []]}, "inhomogeneous"),
        ({"a": []}, "a list of nothing"),
        ({"a": [2**63, -1]}, "a list of int64 and uint64"),
        ({"a": [2**64]}, "it does not fit into 64 bits"),
        ({"a": 2**64}, "'a' = 18446744073709551616 cannot travel .it does not fit into 64"),
        ({"a": bytearray(b"x")}, "a bytearray"),
        ({"a": range(3)}, "a range"),
        ({"a": np.ma.masked_array([1, 2], [False, True])}, "a MaskedArray"),
        ({"a": {"b": {}}}, "'a.b' = {} cannot travel; leave it out"),
        ({"a": {1: 2}}, "1 of setting 'a' cannot travel as a name; write text"),
        ({"a": {"b.c": 1}}, "'b.c' of setting 'a' cannot travel as a name"),
        ({"a": {"b": 1}, "a.b": 2}, "'a.b' = 2 cannot travel .it is given twice"),
    ],
)
def test_a_setting_that_would_arrive_changed_is_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        frames.reset_request(settings)


def test_lists_that_are_nested_too_deep_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    for value in (loop, deep):
        with pytest.raises(ConfigurationError, match="cannot travel"):
            frames.reset_request({"a": value})


def test_lists_of_one_kind_travel_as_the_array_that_they_stand_for() -> None:
    given: dict[str, Any] = {"a": [[1, 2]], "b": (0.5,), "c": ["x", "y"], "d": [2**63], "e": {}}

    reset = pb.EnvironmentRequest.FromString(frames.reset_request(given)).reset

    found = unpacked(reset.settings)
    assert {key: value.tolist() for key, value in found.items()} == {
        "a": [[1, 2]],
        "b": [0.5],
        "c": ["x", "y"],
        "d": [2**63],
    }


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, 2.5], "doubles"),
        ([np.float64(1), 0.5, 2**53], "doubles"),
        ([np.int64(1), 2], "int64s"),
        ([np.bool_(True), True], "bools"),
    ],
)
def test_numbers_of_python_and_numpy_travel_in_one_list(value: Any, kind: str) -> None:
    reset = pb.EnvironmentRequest.FromString(frames.reset_request({"a": value})).reset

    assert reset.settings["a"].WhichOneof("payload") == kind
    assert unpacked(reset.settings)["a"].tolist() == value


def test_a_mapped_file_travels_as_an_array(tmp_path: Any) -> None:
    numbers = np.memmap(tmp_path / "numbers", np.float32, "w+", shape=(2, 3))

    reset = pb.EnvironmentRequest.FromString(frames.reset_request({"a": numbers})).reset

    assert unpacked(reset.settings)["a"].shape == (2, 3)


def test_the_largest_setting_is_named_where_all_are_too_large() -> None:
    long = "x" * 2**19

    frames.require_size({"options": {"a": long}})
    with pytest.raises(ConfigurationError, match=r"takes 1048576; give less in 'options\.b'"):
        frames.require_size({"options": {"a": long, "b": long + "x"}})


@pytest.mark.parametrize("uid", [0, 1, 127, 128, 2**63, 2**64 - 1])
def test_a_step_reads_as_the_generated_code_reads_it(uid: int) -> None:
    image = np.arange(300, dtype=np.float32).reshape(3, 100)
    actions = [(uid, encode_tensor(image)), (5, encode_tensor(np.int64(-3)))]

    frame = frames.step_request(actions, frames.observed([uid, 2, 300]))

    step = pb.EnvironmentRequest.FromString(frame).step
    assert sorted(step.actions) == sorted({uid, 5})
    np.testing.assert_array_equal(tensor_utils.unpack_tensor(step.actions[uid]), image)
    assert tensor_utils.unpack_tensor(step.actions[5]) == -3
    assert list(step.requested_observations) == [uid, 2, 300]


def test_a_blind_step_has_no_actions() -> None:
    request = pb.EnvironmentRequest.FromString(frames.step_request((), frames.observed([])))

    assert request.WhichOneof("payload") == "step"
    assert not request.step.actions


def test_a_refusal_is_an_error_with_its_code_and_its_traceback() -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.DebugInfo(detail="Traceback: here"))
    status = status_pb2.Status(code=3, message="no such action", details=[detail])

    with pytest.raises(RemoteEnvError, match="INVALID_ARGUMENT: no such action") as caught:
        frames.parse_answer(pb.EnvironmentResponse(error=status).SerializeToString())

    assert caught.value.is_recoverable
    assert caught.value.debug_info == "Traceback: here"


def test_details_that_do_not_decode_hide_no_refusal() -> None:
    detail = any_pb2.Any(type_url="x/google.rpc.DebugInfo", value=b"\xff\xff")
    status = status_pb2.Status(code=3, message="no such action", details=[detail])

    with pytest.raises(RemoteEnvError, match="INVALID_ARGUMENT: no such action"):
        frames.parse_answer(pb.EnvironmentResponse(error=status).SerializeToString())


def test_codes_that_grpc_does_not_have_are_reported_by_number() -> None:
    status = status_pb2.Status(code=99, message="?")

    with pytest.raises(RemoteEnvError, match="CODE_99"):
        frames.parse_answer(pb.EnvironmentResponse(error=status).SerializeToString())


@pytest.mark.parametrize(
    "frame", [b"", b"\xff", pb.EnvironmentResponse(reset_world={}).SerializeToString()]
)
def test_what_is_no_answer_breaks_the_protocol(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.parse_answer(frame)


def test_only_a_property_reads_as_a_property() -> None:
    asked = pb.EnvironmentRequest.FromString(frames.read_request("rlmesh.contract"))
    request = properties_pb2.PropertyRequest()
    assert asked.extension.Unpack(request)
    assert request.read_property.key == "rlmesh.contract"

    response = properties_pb2.PropertyResponse()
    response.read_property.value.CopyFrom(tensor_utils.pack_tensor("{}"))
    answer = pb.EnvironmentResponse()
    answer.extension.Pack(response)
    value = frames.read_value(frames.parse_answer(answer.SerializeToString()))
    assert tensor_utils.unpack_tensor(value) == "{}"

    answer.extension.Pack(properties_pb2.PropertyResponse(write_property={}))
    with pytest.raises(RemoteProtocolError, match="no value"):
        frames.read_value(frames.parse_answer(answer.SerializeToString()))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"max_text_length": 0}, "max_text_length=0"),
        ({"world_name": "w"}, "create=None"),
        ({"batched": True, "num_envs": 2}, "leave out num_envs"),
        ({"batched": True, "one_world": True}, "one_world"),
        ({"batched": True, "observations": ("a",)}, "observations"),
        ({"time_limit_steps": 0}, "time_limit_steps=0"),
        ({"num_envs": 2, "join": [{}]}, "join=.* 2 of them"),
        ({"num_envs": 2, "create": "maze"}, "create='maze'"),
        ({"num_envs": 2, "join": [{}, 3]}, r"join=\[{}, 3\]"),
        ({"create": 5}, "create=5"),
        ({"validation": "maybe"}, "validation='maybe' is not one of warn, strict, off"),
        ({"reset": 5}, "reset=5 must be a mapping"),
        ({"observations": "place"}, r"such as \('place',\)"),
        ({"actions": "move"}, r"such as \('move',\)"),
        ({"batched": True, "truncate_on_terminated": True}, "truncate_on_terminated"),
        ({"batched": True, "time_limit_steps": 9}, "time_limit_steps"),
        ({"batched": True, "asks_contract": False}, "asks_contract"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        DmEnvRpcSettings(**settings)


def test_lanes_may_have_settings_of_their_own() -> None:
    settings = DmEnvRpcSettings(num_envs=2, create={"level": "cave"}, join=[{"who": 0}, {"who": 1}])

    assert [settings.create_of(lane) for lane in (0, 1)] == [{"level": "cave"}] * 2
    assert [settings.join_of(lane) for lane in (0, 1)] == [{"who": 0}, {"who": 1}]
    assert settings.of_one_lane().join_of(0) == {"who": 0}


def test_a_batched_join_says_so() -> None:
    assert DmEnvRpcSettings(batched=True, join={"lane": 0}).join_of(0) == {
        "lane": 0,
        "batched": True,
    }


def test_settings_travel_to_runners() -> None:
    settings = DmEnvRpcSettings(num_envs=2, create={"seed": 1}, time_limit_steps=9)

    assert pickle.loads(pickle.dumps(settings)) == settings


def agent(**changes: Any) -> Any:
    specs = pb.ActionObservationSpecs()
    specs.actions[1].CopyFrom(pb.TensorSpec(name="move", dtype=pb.INT8))
    specs.observations[2].CopyFrom(pb.TensorSpec(name="view", dtype=pb.FLOAT, **changes))
    return specs


def test_bounds_that_are_no_numbers_stay_as_well() -> None:
    odd = {"min": {"floats": {"array": [np.nan]}}}

    require_unchanged(agent(**odd), agent(**odd), "here", 0)


@pytest.mark.parametrize("now", [agent(), pb.ActionObservationSpecs()])
def test_specs_that_stay_pass(now: Any) -> None:
    require_unchanged(agent(), now, "here", 0)


def test_specs_that_change_are_noticed() -> None:
    other, more, less = agent(shape=[3]), agent(), agent()
    more.actions[9].name = "jump"
    del less.observations[2]
    for now, complaint in (
        (other, "'view' is another one among its observations"),
        (more, "'jump' is new among its actions"),
        (less, "'view' is gone from its observations"),
    ):
        with pytest.raises(ContractMismatchError, match=f"here .* lane 4 .*{complaint}"):
            require_unchanged(agent(), now, "here", 4)


def test_an_address_says_which_protocol_is_spoken() -> None:
    address = "dm_env_rpc://node-7:10000"

    assert looks_like_address(address)
    assert parse_address(address) == Address("node-7", 10000)
    assert client_dialect(address) is not None
    assert [client_dialect(text) for text in ("rlmesh://node-7:1", "node-7:1")] == [None, None]
    with pytest.raises(AddressError, match="dm_env_rpc://HOST:PORT"):
        parse_address("dm_env_rpc://node-7")
