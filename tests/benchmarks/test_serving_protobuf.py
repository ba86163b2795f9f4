import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.protobuf import field, fields
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb

CONTENTS = st.lists(st.tuples(st.integers(1, 2**20), st.binary(max_size=300)), max_size=5)


@given(CONTENTS)
def test_what_is_written_is_read(contents: list[tuple[int, bytes]]) -> None:
    assert list(fields(b"".join(field(*each) for each in contents))) == contents


def test_generated_code_reads_what_is_written() -> None:
    data = field(1, 7) + field(2, "e" * 200) + field(3, 2**40) + field(4, 1)

    slot = pb.PredictSlot.FromString(data)

    assert slot == pb.PredictSlot(env_index=7, episode_id="e" * 200, step=2**40, reset=True)


def test_numbers_are_passed_over() -> None:
    data = pb.PredictSlot(env_index=300, episode_id="e", step=9).SerializeToString()

    assert list(fields(data)) == [(2, b"e")]


@pytest.mark.parametrize("data", [field(1, b"abc")[:-1], b"\x80", b"\x0b", b"\x09\x00"])
def test_a_message_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        list(fields(data))
