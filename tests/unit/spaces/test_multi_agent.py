"""Ids of agents, and the keys that stand for them in a lane."""

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.spaces.multi_agent import (
    agent_keys,
    agents_from_metadata,
    describe_agents,
    is_agent_id,
)
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta

PLAIN_IDS = st.text(max_size=3) | st.integers(-(2**63), 2**63 - 1) | st.booleans()
AGENT_IDS = st.recursive(PLAIN_IDS, lambda parts: st.lists(parts, max_size=3).map(tuple))


class Color(str, enum.Enum):  # noqa: UP042  # what people have
    RED = "red"


class Side(enum.IntEnum):
    LEFT = 3


def over_the_wire(described: dict[str, Any]) -> Any:
    return decode_peer_meta(encode_meta(described, tag_arrays=False))


def test_strings_are_their_own_keys_and_need_no_more_than_before() -> None:
    keys = agent_keys(["car_1", "tram", ""])

    assert keys == {"car_1": "car_1", "tram": "tram", "": ""}
    assert describe_agents(keys) == {"agents": ["car_1", "tram", ""]}


def test_other_ids_have_their_text_as_key() -> None:
    assert agent_keys([0, -1, ("car", 1), (0, ("x", True))]) == {
        0: "0",
        -1: "-1",
        ("car", 1): "car_1",
        (0, ("x", True)): "0_x_True",
    }


def test_no_two_agents_share_a_key() -> None:
    assert agent_keys([0, "0", "0_", ("0",), (0,), "__all__ly", ("", "all", "")]) == {
        0: "0__",
        "0": "0",
        "0_": "0_",
        ("0",): "0___",
        (0,): "0____",
        "__all__ly": "__all__ly",
        ("", "all", ""): "_all_",
    }
    assert agent_keys([("", "_all_", "")]) == {("", "_all_", ""): "__all___"}


@given(st.lists(AGENT_IDS.filter(is_agent_id), min_size=1, max_size=8, unique=True))
def test_a_client_has_all_ids_back_in_their_order(agent_ids: list[Any]) -> None:
    keys = agent_keys(agent_ids)

    found = agents_from_metadata(over_the_wire(describe_agents(keys)))

    assert list(found.items()) == list(keys.items())
    assert len(set(found.values())) == len(agent_ids)


@pytest.mark.parametrize(
    ("agent_id", "key"),
    [(np.int64(4), "4"), (Color.RED, "red"), (Side.LEFT, "3"), (np.str_("a"), "a")],
)
def test_ids_of_other_classes_come_back_as_the_plain_ids_that_they_equal(
    agent_id: Any, key: str
) -> None:
    assert is_agent_id(agent_id)
    keys = agent_keys([agent_id])

    found = agents_from_metadata(over_the_wire(describe_agents(keys)))

    assert found == {agent_id: key}
    assert {type(one) for one in found} <= {int, str}


@pytest.mark.parametrize(
    "value",
    [0.5, None, b"a", 2**63, frozenset({1}), ("a", 0.5), "__all__", ("__all__",), object(), [1]],
)
def test_what_metadata_cannot_carry_is_no_id(value: Any) -> None:
    assert not is_agent_id(value)


def test_ids_that_are_nested_without_end_are_none() -> None:
    nested: Any = ()
    for _ in range(1000):
        nested = (nested,)

    assert not is_agent_id(nested)


@pytest.mark.parametrize(
    "described",
    [
        None,
        [],
        {},
        {"agents": "ab"},
        {"agents": ["0", "1"], "ids": 2},
        {"agents": ["0", "1"], "ids": [0]},
        {"agents": ["0", "1"], "ids": [0, 0]},
        {"agents": ["0", "1"], "ids": [1, True]},
        {"agents": ["0", "1"], "ids": [0, 0.5]},
        {"agents": ["0", "1"], "ids": [0, {"a": 1}]},
        {"agents": ["0", "1"], "ids": [0, "__all__"]},
        {"agents": ["a", "a"]},
        {"agents": [0.5]},
        {"agents": ["a", "a"], "ids": [0, 1]},
        {"agents": [0, 1], "ids": [0, 1]},
    ],
)
def test_metadata_that_make_no_sense_name_no_agents(described: Any) -> None:
    assert agents_from_metadata(described) == {}
