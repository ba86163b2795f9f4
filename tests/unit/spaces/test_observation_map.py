import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from rlmesh_ray.errors import ConfigurationError, ConformanceError, ContractMismatchError
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map
from rlmesh_ray.spaces.spec import BoxSpec, leaves
from rlmesh_ray.spaces.validation import Checker, ValidationMode, coerce_batch
from tests.odd_files import IRREGULAR, put

CLIENT_SPACE = spaces.Dict(
    {
        "pixels": spaces.Box(0, 255, (12, 10, 3), np.uint8),
        "stack": spaces.Box(3, 250, (2, 6, 6, 4), np.uint8),
        "chw": spaces.Box(0, 255, (3, 6, 8), np.uint8),
        "agent_pos": spaces.Box(-2, np.array([1, 3], np.float32), (2,), np.float32),
        "gripper": spaces.Box(0, 1, (), np.float32),
        "wide": spaces.Box(-1e300, 1e300, (2,), np.float64),
        "count": spaces.Box(0, 200, (2,), np.int64),
        "mode": spaces.Discrete(3, start=-1),
        "flags": spaces.MultiBinary(3),
        "levels": spaces.MultiDiscrete([2, 300]),
        "task": spaces.Text(8),
        "arm": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)]),
        "a/b": spaces.Box(-1, 1, (1,), np.float32),
        "odd key": spaces.Box(-1, 1, (1,), np.float32),
    }
)
CLIENT = from_gymnasium(CLIENT_SPACE)
NUM_LANES = 3


@pytest.fixture
def statistics(tmp_path: Path) -> str:
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps({"mean": [0.5, -1], "scale": [2, 0.3]}))
    return str(file)


def batch(seed: int) -> dict[str, Any]:
    space = batch_space(CLIENT_SPACE, NUM_LANES)
    space.seed(seed)
    sample: dict[str, Any] = space.sample()
    return sample


def box(entries: Sequence[str] | Mapping[str, str], key: str = "x") -> BoxSpec:
    """The Box that the map makes of a key."""
    by_name = {leaf.name: leaf.spec for leaf in leaves(ObservationMap(entries).space(CLIENT))}
    spec = by_name[key]
    assert isinstance(spec, BoxSpec)
    return spec


def bounds(spec: BoxSpec) -> tuple[list[Any], list[Any]]:
    low, high = spec.bounds()
    return low.tolist(), high.tolist()


# --- what the verbs mean ---------------------------------------------------------------

SOURCES = [
    "pixels",
    "task",
    "mode",
    "arm/1",
    "a/b",
    '"odd key"',
    "concat(agent_pos,gripper,a/b)",
    "concat(mode,mode)",
    "concat(stack,stack)",
    "concat(cast(agent_pos,float64), wide)",
    "cast(wide,float32)",
    "cast(wide,float16)",
    "cast(count,uint8)",
    "cast(flags,bool)",
    "cast(levels,int16)",
    "cast(mode,float32)",
    "resize(pixels,5,7)",
    "resize(stack,24,3)",
    "channels(pixels,first)",
    "channels(stack,first)",
    "channels(chw,last)",
    "channels(resize(channels(chw,last),4,4),first)",
    "normalise(agent_pos,FILE)",
    "normalise(count,FILE)",
    "normalise(wide,FILE)",
    "cast(normalise(concat(mode,arm/1),FILE),float16)",
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", range(4))
def test_a_mapped_batch_lies_in_the_mapped_space(source: str, seed: int, statistics: str) -> None:
    mapping = ObservationMap({"x": source.replace("FILE", statistics), "other": "flags"})

    mapped, space = mapping.apply(batch(seed)), mapping.space(CLIENT)

    columns = coerce_batch(space, mapped, NUM_LANES)
    for own, leaf in zip(columns, leaves(space), strict=True):
        assert own is mapped[leaf.name] or leaf.dtype is None  # has the dtype and shape already
    assert Checker(leaves(space), ValidationMode.STRICT).check(columns) == []


def test_the_first_lane_is_contained_in_gymnasiums_space() -> None:
    mapping = ObservationMap(["a/x=channels(pixels,first)", "a/y=concat(agent_pos,gripper)"])

    space, values = to_gymnasium(mapping.space(CLIENT)), mapping.apply(batch(0))

    lanes = list(iterate(batch_space(space, NUM_LANES), values))
    assert len(lanes) == NUM_LANES
    assert all(lane in space for lane in lanes)


def test_a_name_renames_and_changes_nothing() -> None:
    observations = batch(1)

    mapped = ObservationMap(["observation/image=pixels", "prompt=task"]).apply(observations)

    assert mapped["observation"]["image"] is observations["pixels"]
    assert mapped["prompt"] is observations["task"]


def test_concat_joins_values_and_bounds_along_the_last_axis() -> None:
    observations = batch(2)

    spec = box({"x": "concat(agent_pos,gripper)"})
    mapped = ObservationMap({"x": "concat(agent_pos,gripper)"}).apply(observations)["x"]

    assert bounds(spec) == ([-2, -2, 0], [1, 3, 1])
    np.testing.assert_array_equal(mapped[:, :2], observations["agent_pos"])
    np.testing.assert_array_equal(mapped[:, 2], observations["gripper"])


def test_cast_keeps_bounds_and_values() -> None:
    spec = box({"x": "cast(count,uint8)"})

    assert (spec.dtype, *bounds(spec)) == ("uint8", [0, 0], [200, 200])


def test_cast_refuses_a_value_out_of_bounds_that_it_cannot_hold() -> None:
    observations = batch(0) | {"count": np.array([[1, 2], [3, 300], [5, 6]])}

    with pytest.raises(ConformanceError, match="300 cannot be held by uint8"):
        ObservationMap({"x": "cast(count,uint8)"}).apply(observations)


def test_channels_moves_an_axis_and_back() -> None:
    observations = batch(3)

    mapped = ObservationMap(
        {"first": "channels(pixels,first)", "same": "channels(channels(pixels,first),last)"}
    ).apply(observations)

    np.testing.assert_array_equal(mapped["first"][1, 2], observations["pixels"][1, :, :, 2])
    np.testing.assert_array_equal(mapped["same"], observations["pixels"])


def test_normalise_is_computed_of_values_and_bounds(statistics: str) -> None:
    source = f"normalise(agent_pos,{statistics})"
    observations = batch(4)

    mapped = ObservationMap({"x": source}).apply(observations)["x"]

    expected = (observations["agent_pos"] - [0.5, -1]) / [2, 0.3]
    np.testing.assert_allclose(mapped, expected, rtol=1e-6)
    np.testing.assert_allclose(bounds(box({"x": source})), [[-1.25, -1 / 0.3], [0.25, 4 / 0.3]])


def test_a_space_of_one_leaf_is_called_observation() -> None:
    own = from_gymnasium(spaces.Box(0, 255, (8, 8, 3), np.uint8))
    images = np.zeros((2, 8, 8, 3), np.uint8)

    to_dict = ObservationMap(["image=observation"])
    to_bare = ObservationMap(["observation=channels(observation,first)"])
    quoted = ObservationMap(['"observation"=observation'])

    assert to_dict.apply(images)["image"] is images
    assert to_bare.apply(images).shape == (2, 3, 8, 8)
    assert isinstance(to_bare.space(own), BoxSpec)
    assert list(quoted.apply(images)) == ["observation"]


def test_a_key_in_quotes_does_not_nest() -> None:
    mapped = ObservationMap(['"observation/image"=pixels', "p/q=task"]).apply(batch(0))

    assert list(mapped) == ["observation/image", "p"]


def test_a_map_and_its_texts_say_the_same_and_it_pickles() -> None:
    mapping = ObservationMap({"x": "resize(pixels,5,7)"})

    copy = pickle.loads(pickle.dumps(mapping))

    assert repr(copy) == "ObservationMap(['x=resize(pixels,5,7)'])"
    assert copy.space(CLIENT) == ObservationMap(["x=resize(pixels,5,7)"]).space(CLIENT)


# --- texts that are refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ("x", "write KEY=SOURCE"),
        ("=pixels", "a name is expected where it has ="),
        ("x=", "a name is expected where it has its end"),
        ("x=pixels y", "y comes after its end"),
        ("x=cast(a,float32))", r"\) comes after its end"),
        ('x="pixels', '" is not a path'),
        ("x=a//b", "a//b is not a path"),
        (f"x{'/x' * 40}=a", "is not a path"),
        ('x=""', '"" is not a path'),
        ("x=(a)", r"a name is expected where it has \("),
        ("x=concat()", r"a name is expected where it has \)"),
        ("x=concat(a,)", r"a name is expected where it has \)"),
        ("x=concat(a", r"write concat\(a,b,...\)"),
        ("x=concat(a b)", r"write concat\(a,b,...\)"),
        ("x=cast(a)", r"write cast\(x,DTYPE\)"),
        ("x=cast(a,float32,int8)", r"write cast\(x,DTYPE\)"),
        ("x=cast(a,V8)", "V8 is not a dtype; take one of bool, uint8"),
        ("x=cast(a,object)", "object is not a dtype"),
        ("x=resize(a,5)", r"write resize\(x,HEIGHT,WIDTH\)"),
        ("x=resize(a,5,0)", "whole numbers from 1 to 99999"),
        ("x=resize(a,5,-3)", "whole numbers"),
        ("x=channels(a,middle)", "middle is neither first nor last"),
        ("x=normalize(a,b)", r"there is no verb normalize .*; did you mean normalise\?"),
        ("x=__import__(os)", "there is no verb __import__"),
        ("x=rename(a)", "KEY=NAME renames"),
        (f"x={'cast(' * 40}a", "cast is nested more than 32 verbs deep"),
        ("x=normalise(a,/no/such/file.json)", r"cannot be read \(FileNotFoundError"),
    ],
)
def test_an_entry_of_another_form_is_refused(entry: str, cause: str) -> None:
    with pytest.raises(ConfigurationError, match=cause):
        ObservationMap([entry])


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("nope", "JSONDecodeError"),
        ('{"mean": [1]}', "KeyError: 'scale'"),
        ("[1]", "TypeError"),
        ('{"mean": [1, [2]], "scale": 1}', "ValueError"),
        (f'{{"mean": 1{"0" * 400}, "scale": 1}}', "OverflowError"),
        ('{"mean": ["0.5"], "scale": 1}', "'0.5' is not a number that float64 can hold"),
        ('{"mean": [0.5, true], "scale": 1}', "True is not a number that float64 can hold"),
        ('{"mean": 9007199254740993, "scale": 1}', "9007199254740993 is not a number that float64"),
        ('{"mean": 0, "scale": 0}', "each scale above 0"),
        ('{"mean": 0, "scale": [1, -1]}', "each scale above 0"),
        ('{"mean": NaN, "scale": 1}', "finite"),
        ('{"mean": 0, "scale": 1e-60}', "each scale above 0"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "statistics.json"
    file.write_text(text)

    with pytest.raises(ConfigurationError, match=cause):
        ObservationMap([f'x=normalise(a,"{file}")'])


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_anything_in_place_of_its_file_is_refused_at_once(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    file = put(make, tmp_path / "statistics.json")

    with pytest.raises(ConfigurationError, match=r"statistics\.json cannot be read"):
        ObservationMap([f'x=normalise(a,"{file}")'])


@pytest.mark.parametrize("entries", ["x=a", [], {}, [1], {"x": 1}, {1: "a"}, 7, None])
def test_only_texts_and_dicts_make_a_map(entries: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes texts KEY=SOURCE or a dict"):
        ObservationMap(entries)


@pytest.mark.parametrize("entries", [["x=a", "x=b"], ["x=a", "x/y=b"], ["x/y=a", "x=b"]])
def test_a_key_has_one_entry(entries: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="two entries for x"):
        ObservationMap(entries)


def test_an_option_takes_a_map_or_its_entries() -> None:
    mapping = ObservationMap(["x=a"])

    assert as_observation_map(mapping) is mapping
    assert as_observation_map(None) is None
    assert repr(as_observation_map({"x": "a"})) == repr(mapping)


# --- spaces that are refused -----------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("pixel", r"has no such leaf \(it has .*\); did you mean pixels\?"),
        ("observation", "has no such leaf"),
        ("arm", "has no such leaf .*arm/0"),
        ("arm/2", "did you mean arm/"),
        ("pixels/0", "has no such leaf"),
        ("concat(agent_pos,wide)", "one dtype, not float32 .2,., float64 .2,.; cast them first"),
        ("concat(pixels,chw)", "other axes of .* differ"),
        ("concat(pixels,cast(mode,uint8))", "uint8 does not hold the client's bounds, -1 to 1"),
        ("cast(wide,int64)", "does not round float64 to int64"),
        ("cast(levels,uint8)", "does not hold the client's bounds, 0 to 299"),
        ("cast(count,bool)", "does not hold"),
        ("resize(agent_pos,4,4)", "takes uint8 images .*, not float32 .2,.; leave resize out"),
        ("resize(chw,4,4)", r"put channels\(x,last\) inside"),
        ("resize(cast(pixels,float32),4,4)", "takes uint8 images"),
        ("resize(pixels,99999,99999)", "has more than 134217728 bytes"),
        ("channels(agent_pos,first)", "takes images .*, not .2,.; leave it out"),
        ("cast(task,float32)", "its source is a Text"),
        ("normalise(pixels,FILE)", "not broadcast to .12, 10, 3."),
        ("normalise(gripper,FILE)", r"not broadcast to \(\)"),
    ],
)
def test_a_space_that_the_map_does_not_fit_is_refused(
    source: str, cause: str, statistics: str
) -> None:
    mapping = ObservationMap({"x": source.replace("FILE", statistics)})

    with pytest.raises(ContractMismatchError, match=cause):
        mapping.space(CLIENT)


def test_a_batch_without_a_leaf_is_refused() -> None:
    with pytest.raises(ConformanceError, match="has no pixels"):
        ObservationMap({"x": "pixels"}).apply({"image": 1})


# --- the space of a policy -------------------------------------------------------------

POLICY_SPACE = spaces.Dict(
    {
        "agent_pos": spaces.Box(-2, 3, (2,), np.float32),
        "observation": spaces.Tuple([spaces.Box(0, 255, (5, 7, 3), np.uint8), spaces.Text(8)]),
    }
)
POLICY = from_gymnasium(POLICY_SPACE)
TO_POLICY = ["observation/0=resize(pixels,5,7)", "observation/1=task"]


def test_a_leaf_without_an_entry_is_the_clients_of_the_same_path() -> None:
    observations = batch(0)

    complete = ObservationMap(TO_POLICY).completed(POLICY, CLIENT)
    mapped = complete.apply(observations)

    assert [leaf.path for leaf in leaves(complete.space(CLIENT))] == [
        ("agent_pos",),
        ("observation", 0),
        ("observation", 1),
    ]
    assert mapped["agent_pos"] is observations["agent_pos"]
    assert mapped["observation"][0].shape == (NUM_LANES, 5, 7, 3)
    assert mapped["observation"][1] is observations["task"]


def test_a_leaf_that_nothing_gives_is_named() -> None:
    with pytest.raises(ContractMismatchError, match="leaves observation/1 open: add an entry"):
        ObservationMap(TO_POLICY[:1]).completed(POLICY, CLIENT)


def test_an_entry_for_a_leaf_that_the_policy_lacks_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"agent_po, .*; did you mean agent_pos\?"):
        ObservationMap([*TO_POLICY, "agent_po=agent_pos"]).completed(POLICY, CLIENT)


def test_a_leaf_of_the_policy_that_has_two_entries_is_refused() -> None:
    entries = [*TO_POLICY, '"observation/1"=task']

    with pytest.raises(ConfigurationError, match="two entries for observation/1 of the policy's"):
        ObservationMap(entries).completed(POLICY, CLIENT)


def test_a_policys_key_may_have_a_slash_or_be_the_whole_observation() -> None:
    flat = from_gymnasium(spaces.Dict({"observation/image": CLIENT_SPACE["pixels"]}))
    bare = from_gymnasium(CLIENT_SPACE["pixels"])

    to_flat = ObservationMap(["observation/image=pixels"]).completed(flat, CLIENT)
    to_bare = ObservationMap(["observation=pixels"]).completed(bare, CLIENT)

    assert list(to_flat.apply(batch(0))) == ["observation/image"]
    assert to_bare.space(CLIENT) == bare


def test_the_lines_have_the_shapes_that_are_known() -> None:
    mapping = ObservationMap(['"odd/key"=cast(concat(agent_pos,gripper),float64)', "t=task"])

    assert mapping.lines(CLIENT, mapping.space(CLIENT)) == [
        '"odd/key" = cast(concat(agent_pos,gripper),float64): '
        "float32 (2,), float32 () -> float64 (3,)",
        "t = task: text () -> text ()",
    ]
    assert mapping.lines()[1] == "t = task: ? -> ?"
