"""The index of a recording, whole and damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import EpisodeSummary, load
from rlmesh_ray.recording.store import RecordingInfo, Store
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, DiscreteSpec
from rlmesh_ray.testing.equality import assert_identical
from tests.odd_files import IRREGULAR, NONSENSE, put
from tests.unit.recording.recordings import ENDLESS, cart_pole, cart_poles

INFO = RecordingInfo(
    "Camera-v0",
    DictSpec((("camera", BoxSpec((4, 4, 3), "uint8", b"\0", b"\xff")), ("speed", ENDLESS))),
    DiscreteSpec(3, start=1),
    12.5,
)


def summary(id_: str, **changes: Any) -> EpisodeSummary:
    values: dict[str, Any] = {
        "id": id_,
        "length": 3,
        "return_": 1.5,
        "seed": None,
        "lane": 1,
        "endpoint": "127.0.0.1:50051",
        "policy_version": 7,
        "ended_at": 1.0,
        "terminated": False,
        "truncated": True,
        "video": None,
    }
    return EpisodeSummary(**{**values, **changes})


def test_a_recording_says_what_it_was_made_with(tmp_path: Path) -> None:
    Store(tmp_path / "new").create(INFO)

    assert load(tmp_path / "new").info == INFO
    assert load(tmp_path / "new").episodes == []


def test_the_first_description_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create(INFO)

    assert store.create(RecordingInfo("Other-v0", ENDLESS, ENDLESS, 1.0)) == INFO


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "holds no recording"), ('{"format": 2}', "format 2"), ("[]", "cannot be read")],
)
def test_a_folder_that_is_no_recording_is_refused(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    if text is not None:
        (tmp_path / "recording.json").write_text(text)

    with pytest.raises(ConfigurationError, match=expected):
        load(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match="holds no recording"):
        load(tmp_path / "file")
    for nothing in (None, "", 3):
        with pytest.raises(ConfigurationError, match="must be a folder"):
            load(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("return_", [2.0, float("nan"), float("-inf")])
def test_a_summary_is_one_line_of_strict_json(tmp_path: Path, return_: float) -> None:
    video = tmp_path / "episodes" / "000004.mp4"
    line = summary("000004", return_=return_, seed=9, video=video).to_json()

    read = EpisodeSummary.from_json(line, video.parent)

    assert "NaN" not in line
    assert "\n" not in line
    assert repr(read) == repr(
        summary("000004", return_=2.0 if return_ == 2 else float("nan"), seed=9, video=video)
    )


@pytest.mark.parametrize("id_", ["../../etc/passwd", "1.parquet", "", "-1", "٣", "9" * 19, 3, None])
def test_an_id_that_could_name_another_file_is_none(tmp_path: Path, id_: Any) -> None:
    line = json.dumps({**json.loads(summary("000001").to_json()), "id": id_})

    with pytest.raises(ValueError, match=r"is no id|no summary"):
        EpisodeSummary.from_json(line, tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"return": "x"}, {"length": 1.5}, {"ended_at": None}, {"seed": [1]}, {"video": 1}]
)
def test_a_value_of_another_type_is_no_summary(tmp_path: Path, wrong: dict[str, Any]) -> None:
    line = json.dumps({**json.loads(summary("000001").to_json()), **wrong})

    with pytest.raises(ValueError, match=next(iter(wrong))):
        EpisodeSummary.from_json(line, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"lane"', b'"lame"', 1),
        lambda data: data[: len(data) // 2 + 9],
        lambda data: b"",
        lambda data: b"\xff\xfe" + data,
    ],
    ids=["a field", "the end", "all", "no text"],
)
def test_a_damaged_index_is_put_together_from_the_files(tmp_path: Path, damage: Any) -> None:
    cart_poles(tmp_path, num_episodes=4)
    whole = list(load(tmp_path).episodes)
    index = tmp_path / "index.jsonl"
    index.write_bytes(damage(index.read_bytes()))

    assert load(tmp_path).episodes == whole
    assert Store(tmp_path).begin_writing() == 4
    assert load(tmp_path).episodes == whole


def test_an_episode_that_the_index_lacks_is_read_and_added_by_the_next_writer(
    tmp_path: Path,
) -> None:
    cart_poles(tmp_path, num_episodes=3)
    index = tmp_path / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:2]))
    ids = ["000001", "000002", "000003"]

    assert [each.id for each in load(tmp_path).episodes] == ids
    assert index.read_bytes().count(b"\n") == 2  # reading writes nothing
    Store(tmp_path).begin_writing()

    assert index.read_bytes().count(b"\n") == 3
    assert [each.id for each in load(tmp_path).episodes] == ids


def test_ids_go_on_where_the_recording_ended(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=2)
    cart_poles(tmp_path, num_episodes=1)

    assert [each.id for each in load(tmp_path).episodes] == ["000001", "000002", "000003"]


def test_an_id_that_another_writer_has_taken_is_left_to_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create(INFO)
    numbers = []
    for text in ("one", "two"):
        path = store.temporary_path()
        path.write_text(text)
        numbers.append(store.publish(path, None, 5))

    assert numbers == [5, 6]
    assert store.path("000006").read_text() == "two"


def test_an_id_that_is_claimed_and_has_no_episode_yet_is_left_out(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=1)
    Store(tmp_path).path("000002").touch()

    assert [each.id for each in load(tmp_path).episodes] == ["000001"]
    cart_poles(tmp_path, num_episodes=1)
    assert [each.id for each in load(tmp_path).episodes] == ["000001", "000003"]


def test_an_id_whose_episode_cannot_get_its_name_is_free_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create(INFO)

    with pytest.raises(FileNotFoundError):
        store.publish(store.temporary_path(), None, 1)

    assert not store.path("000001").exists()


def test_a_recording_of_the_version_before_is_read_and_continued(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "written_by_0_1_0a1", old)
    (old / ".lock").touch()

    first, second = load(old).episodes
    assert (first.id, first.length, first.video) == ("000001", 3, None)
    assert (second.id, second.length, second.seed) == ("000002", 4, 1)
    assert second.video == old / "episodes" / "000002.mp4"
    assert_identical(load(old).episode("000002").actions, cart_pole(4, seed=1).columns[1][1:])

    cart_poles(old, num_episodes=1)
    (old / "index.jsonl").unlink()

    assert load(old).episodes[:2] == [first, second]
    assert [each.id for each in load(old).episodes] == ["000001", "000002", "000003"]


def test_an_unknown_episode_is_refused(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=1)

    with pytest.raises(ConfigurationError, match="has no episode '000002'"):
        load(tmp_path).episode("000002")
    with pytest.raises(ConfigurationError, match="has no episode"):
        load(tmp_path).episode("../recording")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=1)
    Store(tmp_path).path("000001").write_bytes(b"PAR1")

    with pytest.raises(ConfigurationError, match=r"episode 000001 .* cannot be read"):
        load(tmp_path).episode("000001")


MAKERS = IRREGULAR | NONSENSE
ODD = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@ODD
def test_anything_in_place_of_the_description_is_named(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    Store(tmp_path).create(INFO)
    put(make, tmp_path / "recording.json")

    with pytest.raises(ConfigurationError, match=r"recording\.json"):
        load(tmp_path)


@ODD
def test_anything_in_place_of_the_index_costs_no_episode(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    cart_poles(tmp_path, num_episodes=2)
    put(make, tmp_path / "index.jsonl")

    assert [each.id for each in load(tmp_path).episodes] == ["000001", "000002"]


@ODD
def test_anything_in_place_of_an_episode_costs_no_other(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    cart_poles(tmp_path, num_episodes=2)
    recording = load(tmp_path)
    put(make, tmp_path / "episodes" / "000001.parquet")

    with pytest.raises(ConfigurationError, match=r"episode 000001 .* cannot be read"):
        recording.episode("000001")
    (tmp_path / "index.jsonl").unlink()
    assert [each.id for each in load(tmp_path).episodes] == ["000002"]


@pytest.mark.parametrize("footer", [b"[1]", b"[" * 100_000, b'"text"', b"1", b"{}", b"\xff", None])
def test_a_footer_that_describes_no_episode_is_left_out(
    footer: bytes | None, tmp_path: Path
) -> None:
    cart_poles(tmp_path, num_episodes=1)
    (tmp_path / "index.jsonl").unlink()
    table = pa.table({"reward": [0.0, 1.0]})
    if footer is not None:
        table = table.replace_schema_metadata({"rlmesh_ray.episode": footer})
    pq.write_table(table, tmp_path / "episodes" / "000002.parquet")

    assert [each.id for each in load(tmp_path).episodes] == ["000001"]


def test_infos_that_are_no_json_are_named(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=1)
    path = Store(tmp_path).path("000001")
    table = pq.read_table(path).drop_columns("info")
    pq.write_table(table.append_column("info", pa.array(["["] * len(table))), path)

    with pytest.raises(ConfigurationError, match=r"episode 000001 .* cannot be read"):
        load(tmp_path).episode("000001")


def test_rewards_are_read_alone_and_only_as_many_as_there_are_steps(tmp_path: Path) -> None:
    cart_poles(tmp_path, num_episodes=1)
    recording, path = load(tmp_path), Store(tmp_path).path("000001")
    whole = recording.episode("000001").rewards
    table = pq.read_table(path)
    pq.write_table(table.drop_columns("info").drop_columns("action"), path)

    assert recording.rewards("000001").tolist() == whole.tolist()
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(ConfigurationError, match="0 rows for 3 steps"):
        recording.rewards("000001")


def test_no_link_of_others_is_read_or_written_through(tmp_path: Path) -> None:
    cart_poles(tmp_path / "own", num_episodes=1)
    cart_poles(tmp_path / "shared", num_episodes=1)
    index = tmp_path / "own" / "index.jsonl"
    before = index.read_bytes()
    put(lambda path: path.symlink_to(index), tmp_path / "shared" / "index.jsonl")
    file = tmp_path / "own" / "episodes" / "000001.parquet"
    put(lambda path: path.symlink_to(file), tmp_path / "shared" / "episodes" / "000001.parquet")

    assert load(tmp_path / "shared").episodes == []
    with pytest.raises(OSError, match="symbolic link"):
        Store(tmp_path / "shared").append(summary("000002"))
    assert index.read_bytes() == before
