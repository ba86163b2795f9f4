"""A session with a released ModelService, frame by frame."""

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.client.model.model_dialect import RouteBatch
from rlmesh_ray.client.model.remote_model import ModelSessionStream
from rlmesh_ray.dialects.released.client.model_dialect import (
    ReleasedModelClientDialect,
    RowEpisodes,
)
from rlmesh_ray.dialects.released.protocol import GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import (
    CodecError,
    EndpointClosedError,
    EndpointLostError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteConfigured,
)
from rlmesh_ray.protocol.model_session import EpisodesForgotten, ForgetEpisodes, SessionRequest
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb

CONTRACT = EnvContract(
    "E",
    from_gymnasium(spaces.Box(-1, 1, (2,))),
    from_gymnasium(spaces.Discrete(9)),
    3,
    AutoresetMode.NEXT_STEP,
)
CONTEXT = PredictContext("s", "route", "1")


def row(lane: int, episode: str = "", *, reset: bool = False) -> PredictSlot:
    return PredictSlot(lane, episode, 0, reset)


def names(episodes: RowEpisodes, *rows: PredictSlot) -> list[str]:
    return [each.episode_id for each in episodes.of(rows)[0]]


def request(frame: bytes) -> SessionRequest | GroupedPredict:
    read = wire.parse_request(frame)
    assert not isinstance(read, MalformedRequest)
    return read


# --- episodes of rows ----------------------------------------------------------------------


def test_lanes_without_named_episodes_have_one_each_until_the_next_begins() -> None:
    episodes = RowEpisodes()

    first = names(episodes, row(0), row(1))
    again = names(episodes, row(1), row(0))
    named, replaced = episodes.of([row(0, reset=True), row(1)])

    assert again == first[::-1]
    assert named[1].episode_id == first[1]
    assert named[0].episode_id not in {"", *first}
    assert replaced == (first[0],)


def test_named_episodes_are_the_same_until_another_is_named() -> None:
    episodes = RowEpisodes()

    first = names(episodes, row(0, "a", reset=True), row(1, "b", reset=True))
    named, replaced = episodes.of([row(0, "a"), row(1, "c")])

    assert [name.partition("-")[0] for name in first] == ["a", "b"]
    assert named[0].episode_id == first[0]
    assert named[1].episode_id.startswith("c-")
    assert replaced == (first[1],)


def test_another_route_s_episode_of_the_same_name_is_another_one() -> None:
    """A server keeps the episodes of all its routes, sessions and clients together."""
    one, other = (names(RowEpisodes(), row(0, "a", reset=True)) for _ in range(2))

    assert one != other


def test_an_episode_that_begins_again_under_its_name_is_another_one() -> None:
    episodes = RowEpisodes()
    first = names(episodes, row(0, "a", reset=True))

    named, replaced = episodes.of([row(0, "a", reset=True)])

    assert named[0].episode_id not in {"", *first}
    assert replaced == tuple(first)
    assert names(episodes, row(0, "a")) == [named[0].episode_id]


@given(
    st.lists(
        st.lists(
            st.builds(row, st.integers(0, 3), st.sampled_from(["", "a", "b"]), reset=st.booleans()),
            min_size=1,
            unique_by=lambda each: each.env_index,
        ),
        max_size=8,
    )
)
def test_no_two_rows_are_ever_of_one_episode_and_all_that_is_replaced_is_reported(
    batches: list[list[PredictSlot]],
) -> None:
    episodes = RowEpisodes()
    running: dict[int, str] = {}
    over: set[str] = set()

    for rows in batches:
        named, replaced = episodes.of(rows)
        reported = [each.episode_id for each in named]
        assert len(set(reported)) == len(reported)
        assert "" not in reported
        before = {running[each.env_index] for each in rows if each.env_index in running}
        assert before - set(reported) == set(replaced)
        over |= set(replaced)
        running |= {each.env_index: name for each, name in zip(rows, reported, strict=True)}
        assert len(set(running.values())) == len(running)


# --- frames --------------------------------------------------------------------------------


def test_a_route_is_an_adapter() -> None:
    dialect, ids = ReleasedModelClientDialect("s"), map(str, itertools.count(1))

    opened_frame = dialect.configure(ids, "route", CONTRACT).frame
    opened = request(opened_frame)
    closed = request(dialect.release(ids, "route").frame)
    last = request(dialect.end(ids).frame)

    assert isinstance(opened, ConfigureRoute)
    assert opened.context == CONTEXT
    message = pb.JoinRequest.FromString(opened_frame).resolve_adapter
    assert message.selected_workflow_edition == "2026.06"
    assert isinstance(opened.contract, EnvContract)
    assert opened.contract.observation_space == CONTRACT.observation_space
    assert isinstance(closed, CloseRoute)
    assert closed.context == PredictContext("s", "route", "2")
    assert isinstance(last, CloseModel)


def test_ended_episodes_are_reported_before_the_prediction() -> None:
    dialect, ids = ReleasedModelClientDialect("s"), map(str, itertools.count(1))
    data = dialect.encoder(CONTRACT)([np.ones((1, 2), np.float32)], 1)

    (first,) = dialect.predict(ids, "route", [row(0, "a", reset=True)], data)
    reset, second = dialect.predict(ids, "route", [row(0, "b", reset=True)], data)
    dialect.release(ids, "route")
    (anew,) = dialect.predict(ids, "route", [row(0, "c", reset=True)], data)

    asked, over, then = request(first.frame), request(reset.frame), request(second.frame)
    assert isinstance(asked, Predict)
    assert asked.observation == data
    assert isinstance(over, ForgetEpisodes)
    assert over.episode_ids == tuple(each.episode_id for each in asked.context.slots)
    assert isinstance(then, Predict)
    assert [each.request_id for each in (first, reset, second, anew)] == ["1", "2", "3", "5"]


def test_a_route_says_how_many_actions_it_wants_and_learns_how_many_there_are() -> None:
    dialect, ids = ReleasedModelClientDialect("s"), map(str, itertools.count(1))

    opened = request(dialect.configure(ids, "route", CONTRACT, 4).frame)
    declared, undeclared = (
        dialect.read(wire.pack_response(RouteConfigured("1", horizon))).horizon
        for horizon in (4, 1)
    )

    assert isinstance(opened, ConfigureRoute)
    assert opened.horizon == 4
    assert (declared, undeclared) == (4, None)


def predicted(request_id: str, *actions: bytes) -> Predicted:
    first, *later = actions
    return Predicted(request_id, CONTEXT, first, later=tuple(later))


def chunked(*chunks: tuple[int, ...]) -> GroupedPredicted:
    """The answer to a prediction of chunks, one a row."""
    encoded = [
        [values.encode_batch(CONTRACT.action_space, [np.array([each])], 1) for each in chunk]
        for chunk in chunks
    ]
    return GroupedPredicted("2", tuple(predicted("2", *own) for own in encoded))


def test_chunks_are_asked_for_row_by_row_in_one_request() -> None:
    dialect, ids = ReleasedModelClientDialect("s"), map(str, itertools.count(1))
    columns = [np.array([[1, 0], [0, 1]], np.float32)]
    lanes = [row(0, "a"), row(1, "b")]

    batch = RouteBatch(dialect.encoder(CONTRACT), lanes, columns)
    (asked,) = dialect.predict_chunk(ids, "route", batch)
    batch = batch._replace(rows=[row(0, "c"), row(1, "b")])
    reset, _ = dialect.predict_chunk(ids, "route", batch)

    groups = request(asked.frame)
    assert isinstance(groups, GroupedPredict)
    asked_rows = [group for group in groups.groups if isinstance(group, Predict)]
    assert [group.observation for group in asked_rows] == [
        dialect.encoder(CONTRACT)([columns[0][each : each + 1]], 1) for each in (0, 1)
    ]
    assert [len(group.context.slots) for group in asked_rows] == [1, 1]
    over = request(reset.frame)
    assert isinstance(over, ForgetEpisodes)
    assert over.episode_ids == (asked_rows[0].context.slots[0].episode_id,)


def test_chunks_are_read_step_by_step() -> None:
    dialect = ReleasedModelClientDialect("s")
    reply = dialect.read(wire.pack_response(chunked((1, 2, 3), (4, 5, 6))))

    (actions,) = dialect.actions(CONTRACT, reply, 2, 3)

    np.testing.assert_array_equal(actions, [1, 4, 2, 5, 3, 6])


@pytest.mark.parametrize("chunks", [((1, 2), (3,)), ((1, 2),), ((1, 2, 3, 4), (1, 2, 3, 4)), ()])
def test_chunks_of_unequal_length_are_refused(chunks: tuple[tuple[int, ...], ...]) -> None:
    dialect = ReleasedModelClientDialect("s")
    reply = dialect.read(wire.pack_response(chunked(*chunks)))

    with pytest.raises(CodecError, match="2 chunks of 3 actions at most were expected"):
        dialect.actions(CONTRACT, reply, 2, 3)


def test_a_row_without_a_chunk_is_a_failure_of_all() -> None:
    failed = ModelFailed("", ModelErrorCode.INTERNAL, "no idea", is_recoverable=True)
    answer = chunked((1, 2))

    reply = ReleasedModelClientDialect("s").read(
        wire.pack_response(GroupedPredicted("2", (*answer.results, failed)))
    )

    assert reply.failure is not None
    assert (reply.failure.request_id, reply.failure.message) == ("2", "no idea")


def test_the_first_actions_of_a_chunk_are_those_of_this_step() -> None:
    dialect = ReleasedModelClientDialect("s")
    steps = [
        values.encode_batch(CONTRACT.action_space, [np.array([step, step + 1])], 2)
        for step in (4, 5)
    ]
    frame = wire.pack_response(predicted("1", *steps))
    timed = wire.with_timings(frame, {"user_ns": 2_000_000_000, "queue_ns": 500_000_000})

    plain, reported = dialect.read(frame), dialect.read(timed)

    (actions,) = dialect.actions(CONTRACT, reported, 2)
    np.testing.assert_array_equal(actions, [4, 5])
    assert plain.telemetry is None
    assert reported.telemetry is not None
    assert (reported.telemetry.forward_s, reported.telemetry.queue_s) == (2.0, 0.5)
    assert (reported.telemetry.policy_version, reported.telemetry.batch_rows) == (-1, 0)


def test_answers_without_actions_are_none() -> None:
    dialect = ReleasedModelClientDialect("s")
    failed = ModelFailed("1", ModelErrorCode.BUSY, "later", True)

    assert dialect.read(wire.pack_response(failed)).failure == failed
    assert dialect.read(wire.pack_response(RouteConfigured("7"))).request_id == "7"
    empty: list[dict[str, Any]] = [
        {"predict": {}},
        {"grouped_predict": {"results": [{"response": {}}]}},
    ]
    for kind in empty:
        with pytest.raises(CodecError, match="no actions"):
            dialect.read(pb.JoinResponse(request_id="1", **kind).SerializeToString())
    with pytest.raises(RemoteProtocolError, match="does not answer Predict"):
        dialect.actions(CONTRACT, dialect.read(wire.pack_response(EpisodesForgotten("1"))), 1)


# --- the order of frames -------------------------------------------------------------------


class SlowStream:
    """A stream to a model that works on everything that it has been sent when it answers.

    It gives a client the time to send too much.
    """

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.together: list[list[str]] = []
        """The kinds of the requests that were there at once."""
        self.cancel = self.close
        self.pid = os.getpid()
        self.receive = self._frames().__next__

    def send(self, frame: bytes) -> None:
        self._sent.put(frame)

    def _frames(self) -> Iterator[bytes]:
        while (frame := self._sent.get()) is not None:
            asked = [request(frame)]
            with contextlib.suppress(queue.Empty):
                if isinstance(asked[0], ForgetEpisodes) and (more := self._sent.get(timeout=0.2)):
                    asked.append(request(more))
            self.together.append([type(each).__name__ for each in asked])
            yield from map(self._answer, asked)
        raise EndpointLostError("closed")

    def _answer(self, asked: SessionRequest | GroupedPredict) -> bytes:
        action = values.encode_batch(CONTRACT.action_space, [np.array([1])], 1)
        if isinstance(asked, Predict):
            return wire.pack_response(Predicted(asked.request_id, asked.context, action))
        if isinstance(asked, CloseModel):
            return wire.pack_response(ModelClosed(asked.request_id))
        return wire.pack_response(EpisodesForgotten(asked.request_id))

    def close(self) -> None:
        self._sent.put(None)


def test_a_prediction_waits_until_what_is_over_is_forgotten() -> None:
    stream, dialect = SlowStream(), ReleasedModelClientDialect("s")
    exchange = ModelSessionStream(stream, dialect, "here")  # type: ignore[arg-type]  # a fake
    data = dialect.encoder(CONTRACT)([np.ones((1, 2), np.float32)], 1)

    for _ in range(2):
        exchange.ask(lambda ids: dialect.predict(ids, "r", [row(0, reset=True)], data), 9.0)
    exchange.close()

    assert stream.together == [
        ["Predict"], ["ForgetEpisodes"], ["Predict"], ["CloseModel"]
    ]  # fmt: skip


# --- the end of a session ------------------------------------------------------------------


class SilentStream:
    """A stream to a model that answers nothing, and ends when it is asked to close."""

    def __init__(self) -> None:
        self.has_predict = threading.Event()
        self._is_over = threading.Event()
        self.cancel = self._is_over.set
        self.pid = os.getpid()

    def send(self, frame: bytes) -> None:
        if isinstance(request(frame), CloseModel):
            self._is_over.set()
        self.has_predict.set()

    def receive(self) -> bytes:
        self._is_over.wait()
        raise EndpointLostError("the server ended the session")

    def close(self) -> None:
        self._is_over.set()


def test_a_session_that_is_closing_stays_closed_however_its_stream_ends() -> None:
    stream, dialect = SilentStream(), ReleasedModelClientDialect("s")
    exchange = ModelSessionStream(stream, dialect, "here")  # type: ignore[arg-type]  # a fake
    data = dialect.encoder(CONTRACT)([np.ones((1, 2), np.float32)], 1)

    def ask() -> object:
        return exchange.ask(lambda ids: dialect.predict(ids, "r", [row(0)], data), 9.0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        stream.has_predict.wait()
        exchange.close()
        with pytest.raises(EndpointClosedError):
            waiting.result()

    with pytest.raises(EndpointClosedError):
        ask()
    exchange.close()


def test_a_session_that_broke_is_closed_all_the_same() -> None:
    stream, dialect = SilentStream(), ReleasedModelClientDialect("s")
    exchange = ModelSessionStream(stream, dialect, "here")  # type: ignore[arg-type]  # a fake

    def ask() -> object:
        return exchange.ask(lambda ids: [dialect.configure(ids, "r", CONTRACT)], 9.0)

    stream.close()
    with pytest.raises(EndpointLostError):
        ask()
    exchange.close()
    with pytest.raises(EndpointClosedError):
        ask()
