import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import MAX_ID_CHARACTERS, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes


def test_a_contract_has_its_lanes_from_the_start() -> None:
    lanes = ContractLanes(3)
    slots = [PredictSlot(2, "", 0, False), PredictSlot(0, "e", 5, True)]

    assert (lanes.num_reserved, lanes.assign_lanes(slots)) == (3, slots)
    lanes.note_failed(slots)
    lanes.free(["e"])
    lanes.clear()
    assert (lanes.lanes_of(["e"]), lanes.num_reserved) == ([], 3)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_contract_s_lanes_keep_no_long_ids_either(num_rows: int) -> None:
    lanes = ContractLanes(2)
    longest = [PredictSlot(lane, "x" * MAX_ID_CHARACTERS, 0, False) for lane in range(num_rows)]
    longer = [*longest[1:], PredictSlot(0, "x" * (MAX_ID_CHARACTERS + 1), 0, False)]

    assert lanes.assign_lanes(longest) == longest
    with pytest.raises(CodecError, match="more than 1024 characters"):
        lanes.assign_lanes(longer)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [((3,), "3 to 3"), ((0, 3), "0 to 3"), ((-1, 1), "-1 to 1"), ((0, 0), "twice")],
)
def test_rows_name_lanes_of_the_contract_and_each_once(rows: tuple[int, ...], reason: str) -> None:
    with pytest.raises(CodecError, match=f"env_index {reason}"):
        ContractLanes(3).assign_lanes([PredictSlot(lane, "", 0, False) for lane in rows])


def test_a_contract_without_lanes_makes_no_route() -> None:
    with pytest.raises(CodecError, match="num_envs = 0; set it to the number"):
        ContractLanes(0)
