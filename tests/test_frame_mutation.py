import random

from rlmesh_ray.protocol.messages import Reset
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as model_pb
from rlmesh_ray.wire.rlmesh_v1 import env
from tests.frame_mutation import damaged, mutate_frame

FRAME = env.pack_request(Reset("r", (1, 2), {"level": [1, {"b": 2.5}]}, 500, (0, 1)))


def test_a_mutated_frame_is_another_valid_one_of_any_kind() -> None:
    frames = [mutate_frame(pb.JoinRequest, FRAME, random.Random(seed)) for seed in range(300)]
    kinds = {pb.JoinRequest.FromString(frame).WhichOneof("kind") for frame in frames}

    assert sum(frame == FRAME for frame in frames) < 60
    assert kinds == {"reset", "step", "render", "close", None}


def test_the_same_chance_gives_the_same_frame() -> None:
    for seed in range(20):
        first, second = random.Random(seed), random.Random(seed)
        assert mutate_frame(pb.JoinRequest, FRAME, first) == mutate_frame(
            pb.JoinRequest, FRAME, second
        )
        assert damaged(FRAME, first) == damaged(FRAME, second)


def test_a_message_without_fields_and_one_that_does_not_decode_are_changed_too() -> None:
    empty = model_pb.JoinResponse(close=model_pb.CloseResponse()).SerializeToString()

    for seed in range(50):
        model_pb.JoinResponse.FromString(
            mutate_frame(model_pb.JoinResponse, empty, random.Random(seed))
        )
    assert any(
        mutate_frame(pb.JoinRequest, b"\xff", random.Random(seed)) != b"\xff" for seed in range(9)
    )


def test_damage_changes_a_frame_and_works_on_an_empty_one() -> None:
    assert sum(damaged(FRAME, random.Random(seed)) != FRAME for seed in range(50)) > 45
    assert any(damaged(b"", random.Random(seed)) for seed in range(9))
