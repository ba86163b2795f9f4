import json
import pickle
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlmesh_ray.dialects.rllink import wire as encodings
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.wire import (
    JSON,
    MOST_BODY_BYTES,
    RAY,
    Encoding,
    body_bytes,
    encoding_of,
    framed,
)
from rlmesh_ray.errors import CodecError

DIALECTS = pytest.mark.parametrize("encoding", [JSON, RAY], ids=["json", "ray"])

finite = st.floats(-1e9, 1e9, allow_nan=False)


@st.composite
def chunks(draw: Any) -> m.Chunk:
    num_steps = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    obs = draw(hnp.arrays(np.float64, (num_steps + 1, *shape), elements=finite))
    actions = draw(hnp.arrays(np.int64, num_steps, elements=st.integers(0, 9)))
    rewards = draw(hnp.arrays(np.float64, num_steps, elements=finite))
    outputs = {
        m.ACTION_DIST_INPUTS: draw(hnp.arrays(np.float64, (num_steps, 2), elements=finite)),
        m.ACTION_LOGP: draw(hnp.arrays(np.float64, num_steps, elements=finite)),
    }
    return m.Chunk(
        obs,
        actions,
        rewards,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.text("abc", min_size=1, max_size=4)),
        draw(st.sampled_from([{}, outputs])),
    )


def reported(value: Any) -> Any:
    """What a message says, in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__dataclass_fields__"):
        return {name: reported(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: reported(each) for key, each in value.items()}
    return [reported(each) for each in value] if isinstance(value, list | tuple) else value


REQUESTS = st.one_of(
    st.builds(m.Ping, st.none() | st.text(min_size=1, max_size=9)),
    st.builds(m.GetConfig),
    st.builds(m.GetState),
    st.builds(
        m.Episodes,
        st.lists(chunks(), max_size=3).map(tuple),
        st.booleans(),
        st.none() | st.integers(0, 2**40),
    ),
)
STEPWISE = st.one_of(
    st.builds(m.StartEpisode, st.none() | st.just("e")),
    st.builds(m.GetAction, st.just("e"), hnp.arrays(np.float64, 2, elements=finite), finite),
    st.builds(m.LogReturns, st.just("e"), finite),
    st.builds(
        m.EndEpisode,
        st.just("e"),
        hnp.arrays(np.float64, 2, elements=finite),
        finite,
        st.booleans(),
    ),
)


def test_an_observation_may_be_a_number_of_numpy() -> None:
    request = m.GetAction("e", np.int64(3), 0.5)  # type: ignore[arg-type]

    read = JSON.parse_request(JSON.pack_request(request))
    assert isinstance(read, m.GetAction)
    assert read.obs == 3


ONE_STEP = m.Chunk(np.zeros((2, 3)), np.zeros(1), np.zeros(1), False, False)
TEXTS = np.array(["left"])


@pytest.mark.parametrize(
    ("request_", "fault"),
    [
        (m.GetAction("e", np.zeros(2), np.inf), "reward must be a finite number"),
        (m.LogReturns("e", 10**400), "reward must be a finite number"),
        (m.LogReturns("e", True), "reward must be a finite number"),
        (m.LogReturns("e" * 257, 0.0), "episode_id must be a text of 1 to 256"),
        (m.StartEpisode(""), "episode_id must be a text"),
        (m.GetAction("e", TEXTS), "obs must hold numbers"),
        (m.EndEpisode("e", np.zeros(2, complex)), "obs must hold numbers"),
        (m.EndEpisode("e", np.zeros(2, np.longdouble)), "obs must hold numbers"),
        (m.Episodes((replace(ONE_STEP, actions=TEXTS),), False), "actions must hold numbers"),
        (m.Episodes((replace(ONE_STEP, obs=np.zeros((1, 3))),), False), "1 observations"),
        (m.Episodes((replace(ONE_STEP, rewards=np.array([np.nan])),), False), "a reward that is"),
        (
            m.Episodes((replace(ONE_STEP, model_outputs={"x": TEXTS}),), False),
            "x must hold numbers",
        ),
    ],
)
def test_what_every_server_refuses_is_not_sent(request_: m.Request, fault: str) -> None:
    with pytest.raises(CodecError, match=f"^{fault}"):
        JSON.pack_request(request_)


# --- frames ------------------------------------------------------------------------------


def test_a_frame_is_eight_digits_and_the_body() -> None:
    assert framed(JSON.pack_request(m.Ping())) == b'00000016{"type": "PING"}'
    assert framed(RAY.pack_request(m.Ping())) == b"00000011\x81\xa4type\xa4PING"


@given(st.integers(1, MOST_BODY_BYTES))
def test_a_header_says_how_long_the_body_is(size: int) -> None:
    assert body_bytes(b"%08d" % size) == size


@pytest.mark.parametrize(
    "header",
    [b"", b"0000016", b"000000016", b"+0000016", b"-0000016", b"      16", b"0_000_16", b"00000x16",
     b"00000000", b"\xd9\xa0" * 4],
)  # fmt: skip
def test_what_int_would_take_but_is_not_eight_digits_is_refused(header: bytes) -> None:
    with pytest.raises(CodecError):
        body_bytes(header)


def test_a_body_above_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(CodecError, match="1 to 99 are accepted"):
        body_bytes(b"00000100", limit=99)
    with pytest.raises(CodecError, match="fewer steps"):
        framed(memoryview(bytes(1)).tobytes() * (MOST_BODY_BYTES + 1))


# --- both dialects -----------------------------------------------------------------------


@DIALECTS
@given(request=REQUESTS)
def test_a_request_is_read_as_it_was_written(encoding: Encoding, request: m.Request) -> None:
    body = encoding.pack_request(request)

    assert encoding_of(body) is encoding
    assert reported(encoding.parse_request(body)) == reported(request)


@given(STEPWISE)
def test_a_request_for_single_actions_is_read_as_it_was_written(request: m.Request) -> None:
    assert reported(JSON.parse_request(JSON.pack_request(request))) == reported(request)


@pytest.mark.parametrize(
    "reply",
    [
        m.Pong(),
        m.SetConfig(500, True, {"explore": True, "observation_space": {"shape": [4]}}),
        m.SetState(7, b"a model", extras={"epsilon": 0.5}),
        m.EpisodeStarted("e"),
        m.Action("e", np.array([0.5, -1.0]), 3),
        m.Failed("why"),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_a_reply_in_json_is_read_as_it_was_written(reply: m.Reply) -> None:
    assert reported(JSON.parse_reply(JSON.pack_reply(reply))) == reported(reply)


@pytest.mark.parametrize(
    "reply",
    [
        m.Pong(),
        m.SetConfig(500, True, pickled_config=b"\x80never read"),
        m.SetState(7, weights={"net.weight": np.ones((2, 3), np.float32)}),
        m.Failed("why"),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_a_reply_in_rays_dialect_is_read_as_it_was_written(reply: m.Reply) -> None:
    assert reported(RAY.parse_reply(RAY.pack_reply(reply))) == reported(reply)


@DIALECTS
@given(data=st.binary(max_size=64))
def test_all_bytes_are_read_or_refused(encoding: Encoding, data: bytes) -> None:
    for read in (encoding.parse_request, encoding.parse_reply):
        try:
            read(data)
        except CodecError:
            continue


def test_a_body_of_neither_dialect_is_refused() -> None:
    for body in (b"", b" {}", b"[]", b"\x93\x01\x02\x03", b"GET / HTTP/1.1"):
        with pytest.raises(CodecError, match="no dialect"):
            encoding_of(body)


# --- JSON --------------------------------------------------------------------------------

EPISODE = '{"obs": [[0, 1], [1, 2]], "actions": [1], "rewards": [0.5]%s}'


def parsed(episode: str) -> m.Chunk:
    body = f'{{"type": "EPISODES_AND_GET_STATE", "episodes": [{episode}], "env_steps": 1}}'
    request = JSON.parse_request(body.encode())
    assert isinstance(request, m.Episodes)
    assert request.wants_state
    assert request.weights_seq_no is None
    return request.chunks[0]


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        (', "is_terminated": true, "is_truncated": false', (True, False)),
        (', "terminateds": true, "truncateds": false', (True, False)),
        (', "terminateds": [false], "truncateds": [true]', (False, True)),
        ("", (False, False)),
    ],
)
def test_both_spellings_of_an_end_are_read(more: str, ends: tuple[bool, bool]) -> None:
    chunk = parsed(EPISODE % more)

    assert (chunk.is_terminated, chunk.is_truncated) == ends
    assert chunk.obs.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    "episode",
    [
        '{"obs": [[0]], "actions": [], "rewards": [], "is_terminated": true}',
        '{"obs": [], "actions": [], "rewards": []}',
        '{"obs": [[0]], "actions": [1], "rewards": [1]}',
        '{"obs": [[0], [1, 2]], "actions": [1], "rewards": [1]}',
        '{"obs": [["a"], ["b"]], "actions": [1], "rewards": [1]}',
        '{"obs": [[0], [1]], "actions": [null], "rewards": [1]}',
        '{"obs": [[0], [1]], "actions": [1], "rewards": [NaN]}',
        '{"obs": [[0], [1]], "actions": [1], "rewards": [[1]]}',
        '{"obs": 3, "actions": [1], "rewards": [1]}',
        '{"obs": [[0], [1]], "actions": [1], "rewards": [1], "is_terminated": "no"}',
        '{"obs": [[0], [1]], "actions": [1], "rewards": [1], "id": 7}',
        '{"obs": [[0], [1]], "actions": [1], "rewards": [1], "action_logp": [1, 2]}',
        "[]",
    ],
)
def test_an_episode_that_contradicts_itself_is_refused(episode: str) -> None:
    with pytest.raises(CodecError):
        parsed(episode)


def test_an_episode_that_has_only_begun_is_no_chunk() -> None:
    request = JSON.parse_request(
        b'{"type": "EPISODES", "episodes": [{"obs": [[0]], "actions": [], "rewards": []}]}'
    )

    assert isinstance(request, m.Episodes)
    assert request.chunks == ()


def memory_to_refuse(encoding: Encoding, body: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            encoding.parse_request(body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_text_among_numbers_costs_no_memory() -> None:
    # NumPy would make each of the numbers as wide as the text: 400 MB.
    obs = ["x" * 10_000, *([1] * 10_000)]
    episode = {"obs": obs, "actions": [1], "rewards": [1]}
    lists = {"type": "EPISODES", "episodes": [episode]}
    states = {"type": "EPISODES", "episodes": [state(observations=buffer(obs))]}

    assert memory_to_refuse(JSON, json.dumps(lists).encode()) < 2**22
    assert memory_to_refuse(RAY, msgpack.packb(states)) < 2**22


def test_what_is_announced_and_does_not_come_costs_no_memory() -> None:
    assert memory_to_refuse(RAY, b"\x81\xa4type" + b"\xdd\x00\x0f\xff\xff" * 500) < 2**22
    # Nor where the message is as long as one of the lists announces.
    few_bytes = b"\x81\xa4type" + b"\xdd\x00\x0f\xff\xff" * 500 + bytes(2**20)
    assert memory_to_refuse(RAY, few_bytes) < 4 * len(few_bytes)


def test_a_message_of_very_many_values_is_refused_with_the_remedy() -> None:
    with pytest.raises(CodecError, match="more than 262144 values in JSON; send fewer steps"):
        JSON.parse_request(b'{"type": "GET_STATE", "x": [' + b"[]," * 2**19 + b"[]]}")
    lists = b"\x82\xa4type\xa9GET_STATE\xa1x\x92" + (b"\xdd\x00\x08\x00\x00" + b"\x90" * 2**19) * 2
    with pytest.raises(CodecError, match="more than 1048576 values; send arrays instead of lists"):
        RAY.parse_request(lists)


@pytest.mark.parametrize(
    ("encoding", "pack"), [(JSON, lambda value: json.dumps(value).encode()), (RAY, msgpack.packb)]
)
def test_episodes_without_number_are_refused(encoding: Encoding, pack: Any) -> None:
    with pytest.raises(CodecError, match="at most 16384"):
        encoding.parse_request(pack({"type": "EPISODES", "episodes": [{}] * 16385}))


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"type": "SHOUT"}',
        b"{}",
        b'{"type": ["PING"]}',
        b"{" + b'"a":{' * 100_000,
        b'{"type": "GET_ACTION", "episode_id": "e", "obs": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"type": "EPISODES", "episodes": [], "weights_seq_no": -1}',
        b'{"type": "EPISODES", "episodes": [], "weights_seq_no": true}',
        b'{"type": "EPISODES", "episodes": [], "weights_seq_no": 1.0}',
        b'{"type": "EPISODES", "episodes": [], "weights_seq_no": 9007199254740993}',
        b'{"type": "GET_ACTION", "episode_id": "e", "obs": [1], "reward": Infinity}',
        b'{"type": "LOG_RETURNS", "episode_id": "e", "reward": 1' + b"0" * 4000 + b"}",
        b'{"type": "LOG_RETURNS", "episode_id": "e", "reward": 1' + b"0" * 5000 + b"}",
    ],
)
def test_json_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        JSON.parse_request(body)


def test_a_model_that_unpacks_to_more_than_there_is_is_refused() -> None:
    body = JSON.pack_reply(m.SetState(1, b"a model"))

    with pytest.raises(CodecError, match="onnx_file"):
        JSON.parse_reply(body.replace(b'"onnx_file": "H4s', b'"onnx_file": "AAA'))


# --- arrays in Ray's dialect -------------------------------------------------------------


@given(
    hnp.arrays(
        st.sampled_from(["?", "i1", "u2", "<i4", ">i8", "f2", "<f4", ">f8"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_an_array_is_read_as_it_was_written(array: Any) -> None:
    again = encodings.decode_array(encodings.encode_array(array))

    assert again.dtype == array.dtype
    assert np.array_equal(again, array, equal_nan=array.dtype.kind == "f")


class Mine:
    """Writes a file when it is unpickled."""

    path = ""

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def as_msgpack_numpy(array: Any, *, kind: bytes = b"") -> dict[bytes, Any]:
    return {
        b"nd": True,
        b"type": array.dtype.str,
        b"kind": kind,
        b"shape": array.shape,
        b"data": array.tobytes(),
    }


def wrong_arrays() -> Iterator[dict[Any, Any]]:
    good = as_msgpack_numpy(np.ones((2, 3), "<f4"))
    yield good | {b"type": "|O"}
    yield good | {b"type": "O", b"kind": b"O"}
    yield good | {b"kind": b"O"}
    yield good | {b"kind": b"V", b"type": [["a", "<f4"]]}
    yield good | {b"kind": as_msgpack_numpy(np.ones(2))}
    yield good | {b"type": "<U3"}
    yield good | {b"type": "<c8"}
    yield good | {b"type": "<M8[s]"}
    yield good | {b"type": b"\xff"}
    yield good | {b"shape": [2, -3]}
    yield good | {b"shape": [2**30, 2**30, 2**30, 0, 2**30]}
    yield good | {b"shape": [4]}
    yield good | {b"shape": [1] * 33}
    yield good | {b"shape": "23"}
    yield good | {b"data": b"short"}
    yield good | {b"data": None}
    yield {b"nd": False, b"type": "|O", b"data": b"12345678"}
    yield {b"complex": True, b"data": "1j"}
    yield as_msgpack_numpy(np.ones(2, "?")) | {b"data": b"\x01\x02"}


@pytest.mark.parametrize("wrong", list(wrong_arrays()), ids=repr)
def test_what_is_no_array_of_plain_numbers_is_refused(wrong: dict[Any, Any]) -> None:
    if wrong.get(b"shape") == [2**30, 2**30, 2**30, 0, 2**30]:
        wrong = wrong | {b"data": b""}  # nothing, in a shape that NumPy cannot have
    body = msgpack.packb({"type": "EPISODES", "episodes": [{"observations": {"data": wrong}}]})

    with pytest.raises(CodecError):
        RAY.parse_request(body)


def test_a_pickle_in_an_array_is_not_run(tmp_path: Path) -> None:
    Mine.path = str(tmp_path / "made")
    wrong = as_msgpack_numpy(np.zeros(1)) | {
        b"type": "|O",
        b"kind": b"O",
        b"data": pickle.dumps(np.array([Mine()], object)),
    }

    with pytest.raises(CodecError, match="only plain numbers"):
        RAY.parse_request(msgpack.packb({"type": "EPISODES", "episodes": [wrong]}))

    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"\x81",
        b"\x80",
        msgpack.packb({"type": "GET_ACTION", "episode_id": "e"}),
        msgpack.packb({"type": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"type": "EPISODES", "episodes": [msgpack.Timestamp(1)]}),
        msgpack.packb({"type": "EPISODES", "episodes": {}}),
        b"\x81\xa4type" + b"\x91" * 5000,
        b"\x81\xa4type\xdd\xff\xff\xff\xff",
        b"\x81\xa4type" + b"\xdd\x00\x0f\xff\xff" * 900,
        b"\x81\xa4type\xc7\xff\xff",
        b"\x81\x90\xa4PING",
        msgpack.packb({"type": as_msgpack_numpy(np.ones(2))}),
    ],
)
def test_msgpack_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        RAY.parse_request(body)


def buffer(values: Any, lookback: int = 0) -> dict[str, Any]:
    return {"data": values, "lookback": lookback, "finalized": False, "space": None}


def state(**changed: Any) -> dict[str, Any]:
    own = {
        "id_": "e",
        "observations": buffer([[0.0], [1.0], [2.0]], lookback=1),
        "actions": buffer([5, 6], lookback=1),
        "rewards": buffer([0.5, 1.5], lookback=1),
        "extra_model_outputs": {"action_logp": buffer([-1.0, -2.0], lookback=1)},
        "is_terminated": True,
        "is_truncated": False,
    }
    return own | changed


def test_what_belongs_to_earlier_chunks_is_left_out() -> None:
    request = RAY.parse_request(msgpack.packb({"type": "EPISODES", "episodes": [state()]}))

    assert isinstance(request, m.Episodes)
    (chunk,) = request.chunks
    assert chunk.obs.tolist() == [[1.0], [2.0]]
    assert (chunk.actions.tolist(), chunk.rewards.tolist()) == ([6], [1.5])
    assert chunk.model_outputs["action_logp"].tolist() == [-2.0]
    assert (chunk.episode_id, chunk.is_terminated) == ("e", True)


def test_an_episode_in_which_nothing_has_happened_is_no_chunk() -> None:
    empty = state(observations=buffer([[0.0]]), actions=buffer([]), rewards=buffer([]))

    request = RAY.parse_request(msgpack.packb({"type": "EPISODES", "episodes": [empty]}))

    assert isinstance(request, m.Episodes)
    assert request.chunks == ()


@pytest.mark.parametrize(
    "wrong",
    [
        state(actions=buffer([5, 6])),
        state(actions=buffer([5, 6], lookback=-1)),
        state(actions=None),
        state(id_=None),
        state(observations=buffer("abc")),
        state(extra_model_outputs=[1]),
        state(extra_model_outputs=as_msgpack_numpy(np.ones(2))),
        state(extra_model_outputs={"action_logp": 1}),
        state(rewards=buffer([0.5, float("inf")], lookback=1)),
        7,
    ],
)
def test_a_state_that_is_no_episode_is_refused(wrong: Any) -> None:
    with pytest.raises(CodecError):
        RAY.parse_request(msgpack.packb({"type": "EPISODES", "episodes": [wrong]}))
