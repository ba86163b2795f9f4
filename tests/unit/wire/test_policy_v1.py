import pytest

from rlmesh_ray.wire.policy_v1 import PolicyFacts, pack, parse


def test_what_is_packed_is_read() -> None:
    facts = PolicyFacts(
        "RLlib checkpoint",
        "PPO",
        7,
        ("a: Discrete 0…1", "b"),
        ("Discrete 0…1",),
        ("a = b: ? -> ?",),
        image_sizes={"camera": (224, 224), "": (84, 64)},
    )

    assert parse(pack(facts)) == facts


def test_a_policy_of_several_actions_at_once_says_so() -> None:
    facts = PolicyFacts("function", horizon=8, chunk_replay="kept")

    assert parse(pack(facts)) == facts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "[" * 100_000,
        '{"kind": 7, "version": true, "observation_space": "a"}',
        '{"horizon": "far", "chunk_replay": 7}',
        '{"image_sizes": [4, 4]}',
        '{"image_sizes": {"a": 4, "b": [4], "c": [true, 4], "d": ["4", 4]}}',
    ],
)
def test_what_makes_no_sense_is_left_out(text: str) -> None:
    assert parse(text) == PolicyFacts()


def test_a_space_of_many_leaves_is_cut() -> None:
    facts = parse(pack(PolicyFacts("function", observation_space=("x" * 1000,) * 1000)))

    assert len(facts.observation_space) == 65
    assert facts.observation_space[-1] == "and 936 more"
    assert len(facts.observation_space[0]) == 200
