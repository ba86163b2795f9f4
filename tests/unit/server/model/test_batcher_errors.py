import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.dialects.released.wire import values as released_values
from rlmesh_ray.errors import CodecError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import Policy, PolicyTraits, Rows, traits_of
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes
from rlmesh_ray.server.model.prediction_batch import (
    Actions,
    PredictionRequest,
    Route,
    run_batch,
)
from rlmesh_ray.spaces.batch import flatten
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs, decode_batch, encode_batch


def contract(observations: Any, actions: Any) -> EnvContract:
    return EnvContract(
        "Toy-v0",
        from_gymnasium(observations),
        from_gymnasium(actions),
        4,
        AutoresetMode.DISABLED,
    )


BOX = contract(spaces.Box(-10.0, 10.0, (2,), np.float32), spaces.Box(-9.0, 9.0, (1,), np.float32))


class Doubling:
    """Returns twice the first element; cannot bear 5, and answers 6 with NaN."""

    def __init__(self, *, is_repeatable: bool) -> None:
        self.traits = PolicyTraits(is_repeatable=is_repeatable)
        self.seen: list[list[float]] = []

    def check_contract(self, contract: EnvContract) -> None:
        pass

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        first = np.asarray(rows.observations)[:, :1]
        self.seen.append(first[:, 0].tolist())
        if (first == 5).any():
            raise ValueError("5 is too much")
        return np.where(first == 6, np.nan, 2 * first)

    def forget(self, route_key: str, env_index: int | None) -> None:
        pass


def part(*first: float, contract: EnvContract = BOX) -> PredictionRequest:
    data = np.array([[value, 0.0] for value in first], np.float32).tobytes()
    return request(contract, data, len(first))


def request(
    contract: EnvContract, data: bytes, num_rows: int, encoding: Any = values
) -> PredictionRequest:
    codecs = ContractCodecs.made_by(encoding.codec, contract)
    route = Route("route", contract, codecs, ContractLanes(4))
    return PredictionRequest(route, data, slots(num_rows), unanswered)


def unanswered(*_: object) -> None:
    raise AssertionError("the engine answers, and not the runner")


def answers(policy: Policy, parts: Sequence[PredictionRequest]) -> Sequence[Actions | RlmeshError]:
    is_repeatable = traits_of(policy).is_repeatable
    return run_batch(policy, parts, BatchRun(0, 0, 0), is_repeatable=is_repeatable)


def slots(count: int) -> list[PredictSlot]:
    return [PredictSlot(lane, "", 0, False) for lane in range(count)]


def floats(results: Sequence[Actions | RlmeshError]) -> list[Any]:
    return [
        np.frombuffer(result, np.float32).tolist() if isinstance(result, bytes) else type(result)
        for result in results
    ]


def test_each_part_gets_its_own_rows_back() -> None:
    policy = Doubling(is_repeatable=False)

    results = answers(policy, [part(1, 2), part(3), part(-4, 0, 2)])

    assert floats(results) == [[2, 4], [6], [-8, 0, 4]]
    assert len(policy.seen) == 1


def test_spaces_of_many_parts_are_cut_by_lanes_too() -> None:
    nested = spaces.Dict({"here": spaces.Box(0, 1, (1,)), "name": spaces.Text(3)})
    spec_with_text = contract(nested, spaces.Tuple((spaces.Discrete(9), spaces.Text(3))))

    class Echo(Doubling):
        def predict(self, contract: EnvContract, rows: Rows) -> object:
            observations: Any = rows.observations
            return ((observations["here"][:, 0] * 8).astype(np.int64), observations["name"])

    def part_of(*observed: tuple[float, str]) -> PredictionRequest:
        here = np.array([[value] for value, _ in observed], np.float32)
        names = tuple(name for _, name in observed)
        columns = flatten(spec_with_text.observation_space, {"here": here, "name": names})
        data = encode_batch(spec_with_text.observation_space, columns, len(observed))
        return request(spec_with_text, data, len(observed))

    parts = [part_of((0.5, "a"), (1.0, "b")), part_of((0.25, "c"))]

    first, second = answers(Echo(is_repeatable=False), parts)

    assert isinstance(first, bytes)
    assert isinstance(second, bytes)
    numbers, names = decode_batch(spec_with_text.action_space, first, 2)
    assert (np.asarray(numbers).tolist(), names) == ([4, 8], ("a", "b"))
    numbers, names = decode_batch(spec_with_text.action_space, second, 1)
    assert (np.asarray(numbers).tolist(), names) == ([2], ("c",))


@pytest.mark.parametrize("bad", [b"short", np.array([[np.nan, 0]], np.float32).tobytes()])
def test_an_observation_that_cannot_be_read_fails_alone_and_is_never_shown(bad: bytes) -> None:
    policy = Doubling(is_repeatable=False)

    results = answers(policy, [part(1), request(BOX, bad, 1), part(2)])

    assert floats(results) == [[2], CodecError, [4]]
    assert policy.seen == [[1], [2]]


def test_a_failure_of_a_policy_that_may_be_asked_again_is_its_cause_s_alone() -> None:
    results = answers(Doubling(is_repeatable=True), [part(1), part(5), part(2)])

    assert floats(results) == [[2], PolicyError, [4]]
    assert "5 is too much" in str(results[1])


def test_a_policy_that_may_not_be_asked_again_is_not() -> None:
    policy = Doubling(is_repeatable=False)

    results = answers(policy, [part(1), part(5)])

    assert floats(results) == [PolicyError, PolicyError]
    assert len(policy.seen) == 1


def test_actions_that_are_in_no_space_fail_their_whole_request_and_no_other() -> None:
    results = answers(Doubling(is_repeatable=False), [part(1), part(6, 2), part(3)])

    assert floats(results) == [[2], PolicyError, [6]]


class Writing(Doubling):
    """Writes into its observations, and fails if a row begins with 5."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        observations: Any = rows.observations
        for column in observations.values() if isinstance(observations, dict) else [observations]:
            if isinstance(column, np.ndarray):
                column *= 2
        first = observations["box"] if isinstance(observations, dict) else observations
        if (first == 10).any():
            raise ValueError("5 is too much")
        return first[:, :1]


OF_ALL_KINDS = contract(
    spaces.Dict(
        {
            "box": spaces.Box(-10.0, 10.0, (2,), np.float32),
            "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "number": spaces.Discrete(20),
            "flags": spaces.MultiBinary(3),
            "word": spaces.Text(8),
        }
    ),
    spaces.Box(-50.0, 50.0, (1,), np.float32),
)


@pytest.mark.parametrize("encoding", [values, released_values], ids=["own", "released"])
@pytest.mark.parametrize("space", [BOX, OF_ALL_KINDS], ids=["box", "dict"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_policy_may_write_into_its_observations_in_every_batch(
    space: EnvContract, encoding: Any, num_parts: int
) -> None:
    def made(first: float) -> PredictionRequest:
        box = np.full((1, 2), first, np.float32)
        column = {
            "box": box,
            "image": np.ones((1, 2, 2, 3), np.uint8),
            "number": np.array([1]),
            "flags": np.ones((1, 3), np.int8),
            "word": ("a",),
        }
        observed = flatten(space.observation_space, column if space is OF_ALL_KINDS else box)
        data = encoding.encode_batch(space.observation_space, observed, 1)
        return request(space, data, 1, encoding)

    sent = [made(first) for first in (1, 2, 3)[:num_parts]]
    results = answers(Writing(is_repeatable=False), sent)
    assert [encoding.decode_batch(space.action_space, each, 1)[0].item() for each in results] == [
        2,
        4,
        6,
    ][:num_parts]
    # What it has written is not there when it is asked again.
    again = answers(Writing(is_repeatable=True), [made(5), made(1)])
    assert isinstance(again[0], PolicyError)
    assert encoding.decode_batch(space.action_space, again[1], 1)[0].item() == 2


class Spoiling(Doubling):
    """Returns no batch of actions if a row begins with 7."""

    def __init__(self, spoil: Callable[[Any], object], *, is_repeatable: bool = True) -> None:
        super().__init__(is_repeatable=is_repeatable)
        self._spoil = spoil

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        actions = np.asarray(super().predict(contract, rows))
        return self._spoil(actions) if (actions == 14).any() else actions


@pytest.mark.parametrize(
    "spoil",
    [
        lambda actions: actions[:-1],
        lambda actions: actions[:, :, None],
        lambda actions: actions[:, 0],
        lambda actions: actions.astype(str),
        lambda actions: [[14.0, 1.0] if row == [14.0] else row for row in actions.tolist()],
        lambda _: None,
        lambda actions: np.full_like(actions, np.nan).tolist()[0],
    ],
    ids=["rows", "axes", "shape", "dtype", "ragged", "nothing", "one row"],
)
def test_what_is_no_batch_of_actions_fails_the_request_that_it_comes_from(spoil: Any) -> None:
    parts = [part(1, 2), part(7), part(3)]

    results = answers(Spoiling(spoil), parts)

    assert floats(results) == [[2, 4], PolicyError, [6]]
    assert "do not fit Toy-v0's action space" in str(results[1])


def test_a_wrong_number_of_actions_fails_all_parts_of_a_policy_that_is_not_asked_again() -> None:
    policy = Spoiling(lambda actions: actions[:-1], is_repeatable=False)

    results = answers(policy, [part(1), part(7)])

    assert floats(results) == [PolicyError, PolicyError]
    assert len(policy.seen) == 1


def test_actions_that_cannot_even_be_looked_at_end_nothing_but_their_batch() -> None:
    class Trap:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise SystemExit("enough")

    class Spiteful(Doubling):
        def predict(self, contract: EnvContract, rows: Rows) -> object:
            return Trap()

    results = answers(Spiteful(is_repeatable=True), [part(1), part(2)])

    assert floats(results) == [PolicyError, PolicyError]
    assert "SystemExit: enough" in str(results[0])


def test_the_policy_s_own_time_is_measured_batch_by_batch() -> None:
    policy = Doubling(is_repeatable=False)

    done, failed = BatchRun(0, 1, 0), BatchRun(0, 1, 0)
    run_batch(policy, [part(1)], done)
    run_batch(policy, [request(BOX, b"short", 1)], failed)

    assert done.forward_ns > 0
    assert failed.forward_ns == 0


def test_what_a_batch_takes_beside_the_policy_is_measured_too_and_where_it_fails() -> None:
    policy = Doubling(is_repeatable=False)

    done, failed = BatchRun(0, 1, 0), BatchRun(0, 1, 0)
    run_batch(policy, [part(1)], done)
    run_batch(policy, [request(BOX, b"short", 1)], failed)

    assert min(done.decode_ns, done.encode_ns) > 0
    assert failed.decode_ns > 0
    assert failed.encode_ns == 0


NESTED = spaces.Dict({"here": spaces.Box(-10.0, 10.0, (2,), np.float64), "name": spaces.Text(9)})
ARRAY = spaces.Box(-10.0, 10.0, (2,), np.float32)


def observed(space: Any, first: Sequence[float]) -> Any:
    here = np.array([[value, -value] for value in first])
    if space is ARRAY:
        return here.astype(np.float32)
    return {"here": here, "name": tuple(f"é{value}" for value in first)}


class Mirror(Doubling):
    """Acts what it observes."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        self.seen.append([])
        return rows.observations


@pytest.mark.parametrize("space", [ARRAY, NESTED], ids=["array", "nested"])
@pytest.mark.parametrize(
    "dialects", [[0, 1], [1, 1, 0, 0, 1], [1, 0, 1, 0], [1, 1, 1]], ids=["2", "5", "4", "alike"]
)
def test_each_part_of_a_batch_is_read_and_answered_in_its_own_dialect(
    space: Any, dialects: Sequence[int]
) -> None:
    encodings: Any = [values, released_values]
    spec = contract(space, space)
    firsts = [[number + row / 8 for row in range(1 + number % 3)] for number in range(9)]
    parts, expected = [], []
    for dialect, first in zip(dialects, firsts, strict=False):
        columns = flatten(spec.observation_space, observed(space, first))
        data = encodings[dialect].encode_batch(spec.observation_space, columns, len(first))
        parts.append(request(spec, data, len(first), encodings[dialect]))
        expected.append(data)
    policy = Mirror(is_repeatable=False)

    assert answers(policy, parts) == expected
    assert len(policy.seen) == 1


def test_an_observation_in_another_dialect_fails_alone() -> None:
    # The bytes of the one are none of the other.
    other = released_values.encode_batch(BOX.observation_space, [np.ones((1, 2), np.float32)], 1)
    wrong = request(BOX, other, 1)
    right = request(BOX, other, 1, released_values)

    first, second, third = answers(Doubling(is_repeatable=False), [part(3), wrong, right])

    assert floats([first, second]) == [[6], CodecError]
    assert isinstance(third, bytes)
    assert np.asarray(released_values.decode_batch(BOX.action_space, third, 1)[0]).tolist() == [
        [2.0]
    ]


class Unprintable(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise Unprintable


def test_an_error_without_a_text_is_an_answer_as_well() -> None:
    class Mute(Doubling):
        def predict(self, contract: EnvContract, rows: Rows) -> object:
            raise Unprintable

    (error,) = answers(Mute(is_repeatable=False), [part(1.0)])

    assert isinstance(error, PolicyError)
    assert "Unprintable" in str(error)


NUMBERED = contract(spaces.Box(-10.0, 10.0, (2,), np.float32), spaces.Discrete(20))
WITH_TEXT = contract(
    spaces.Box(-10.0, 10.0, (2,), np.float32),
    spaces.Dict({"number": spaces.Discrete(20), "word": spaces.Text(8, min_length=0)}),
)


class Numbering(Doubling):
    """Returns numbers in place of arrays of one."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        return np.ravel(np.asarray(super().predict(contract, rows)))


class Wording(Numbering):
    """Returns its numbers as text, too."""

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        numbers = super().predict(contract, rows)
        return {"number": numbers, "word": tuple(map(str, np.asarray(numbers).tolist()))}


@pytest.mark.parametrize(
    ("space", "policy"), [(NUMBERED, Numbering), (WITH_TEXT, Wording)], ids=["number", "text"]
)
def test_a_row_that_no_integer_can_hold_costs_its_own_part_only(
    space: EnvContract, policy: type[Doubling]
) -> None:
    parts = [part(*first, contract=space) for first in ((1, 2), (3, 6), (4,))]

    good, bad, other = answers(policy(is_repeatable=False), parts)

    assert isinstance(bad, PolicyError)
    assert "nan cannot be held exactly by int64" in str(bad)
    assert [numbers(space, good, 2), numbers(space, other, 1)] == [[2, 4], [8]]


@pytest.mark.parametrize("actions", [None, {}, {1, 2}, np.float32(np.nan), np.zeros(())])
def test_actions_of_no_rows_are_the_policy_s_fault_for_all_parts(actions: object) -> None:
    class Strange(Doubling):
        def predict(self, contract: EnvContract, rows: Rows) -> object:
            return actions

    parts = [part(1, contract=WITH_TEXT), part(2, contract=WITH_TEXT)]

    for result in answers(Strange(is_repeatable=False), parts):
        assert isinstance(result, PolicyError)
        assert "do not fit Toy-v0's action space" in str(result)


def numbers(space: EnvContract, data: Actions | RlmeshError, count: int) -> list[int]:
    assert isinstance(data, bytes), data
    column: Any = decode_batch(space.action_space, data, count)[0]
    return [int(number) for number in column]


# --- chunks ----------------------------------------------------------------------------


class Chunking(Doubling):
    """Returns three actions for each row: the first element, and one more a step."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__(is_repeatable=True)
        self.answer = answer

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        if self.answer is not None:
            return self.answer
        first = np.asarray(rows.observations)[:, :1]
        self.seen.append(first[:, 0].tolist())
        chunks = first[:, None] + np.arange(3, dtype=np.float32)[:, None]
        return np.where(chunks == 6, np.nan, chunks)


def chunk_part(horizon: int, *first: float, encoding: Any = values) -> PredictionRequest:
    made = part(*first)
    codecs = ContractCodecs.made_by(encoding.codec, BOX)
    made.route = Route("route", BOX, codecs, ContractLanes(4), 3, horizon)
    return made


def chunks(result: Actions | RlmeshError) -> list[list[float]]:
    """Return the actions of each step."""
    assert isinstance(result, tuple)
    return [np.frombuffer(data, np.float32).tolist() for data in result]


def test_clients_that_take_chunks_and_others_share_a_batch() -> None:
    policy = Chunking()

    one, two, three = answers(policy, [chunk_part(1, 1, 2), chunk_part(2, 3), chunk_part(3, -4, 0)])

    assert floats([one]) == [[1, 2]]
    assert chunks(two) == [[3], [4]]
    assert chunks(three) == [[-4, 0], [-3, 1], [-2, 2]]
    assert policy.seen == [[1, 2, 3, -4, 0]]


def test_only_the_actions_that_a_client_takes_are_checked() -> None:
    results = answers(Chunking(), [chunk_part(1, 5), chunk_part(3, 5), chunk_part(3, 1)])

    assert floats(results[:1]) == [[5]]
    assert isinstance(results[1], PolicyError)
    assert "NaN" in str(results[1])
    assert chunks(results[2]) == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (np.zeros((2, 2, 1)), r"shape \(2, 2, 1\)"),
        (np.zeros((2, 3)), r"shape \(2, 3\)"),
        (np.zeros((3, 2, 1)), r"shape \(3, 2, 1\)"),
        ([[[1.0]] * 3, [[1.0]] * 2], "not an array"),
    ],
)
def test_chunks_of_another_shape_are_refused_with_both_shapes(answer: Any, found: str) -> None:
    (result,) = answers(Chunking(answer), [chunk_part(3, 1, 2)])

    assert isinstance(result, PolicyError)
    assert re.search(found, str(result))
    assert "expected (2, 3, 1) (rows, horizon, *action)" in str(result)
