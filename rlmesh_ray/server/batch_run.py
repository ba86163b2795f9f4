"""One batch of predictions, from bytes to bytes; runs in the policy's thread.

Those who share a batch need not speak alike: each part is read and answered in its own language.

Those who share a batch do not share what is wrong with one of them: a batch that fails is run
again request by request, as far as the policy allows that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rlmesh_ray.errors import CodecError, ConformanceError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import Policy, RouteRows, Rows, traits_of
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.server.batch_values import (
    BatchValues,
    CodecTimes,
    JoinedValues,
    MixedValues,
    TimedValues,
)
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.spaces.batch import Column, unflatten
from rlmesh_ray.spaces.columns import split
from rlmesh_ray.spaces.conformance import coerce_batch, structure_checker
from rlmesh_ray.spaces.contract import EnvContract

ResultT = TypeVar("ResultT")

_NO_TIMES = CodecTimes()


@dataclass(slots=True, eq=False)
class Part:
    """One request's part of a batch."""

    contract: EnvContract
    observation: bytes
    """A batch with one row a slot, from the wire."""
    route_key: str
    slots: Sequence[PredictSlot]
    values: BatchValues
    """Of whoever asks."""

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return len(self.slots)


@dataclass(slots=True)
class BatchRunner:
    """Runs batches, and measures where the time goes, as far as anybody is told."""

    policy: Policy
    untimed: BatchValues | None = None
    """What those speak who are told nothing beside the policy's time: theirs is not measured."""
    forward_ns: int = 0
    """Time within ``Policy.predict`` in the latest batch."""
    codec: CodecTimes = field(default_factory=CodecTimes)
    """What else the latest batch took; nothing if all of it was untimed."""

    def run(self, parts: Sequence[Part]) -> Sequence[bytes | RlmeshError]:
        """Return each part's actions for the wire, or why there are none. Never raises.

        Args:
            parts: At least one; their contracts agree in the spaces.
        """
        self.forward_ns = 0
        self.codec = _NO_TIMES
        try:
            return self._run(parts)
        except BaseException as error:  # noqa: BLE001  # whoever waits gets an answer
            name = type(error).__name__
            failure = PolicyError(f"the batch could not be run, {name}: {text_of(error)}")
            return [failure] * len(parts)

    def _run(self, parts: Sequence[Part]) -> Sequence[bytes | RlmeshError]:
        contract, values = parts[0].contract, _joined_values(parts)
        if values is not self.untimed:
            values = self._timed(values)
        counts = [len(part.slots) for part in parts]
        try:
            rows = guarded(_rows, contract, values, parts, counts)
        except RlmeshError as error:
            return self._one_by_one(parts, error)
        start_ns = time.perf_counter_ns()
        try:
            actions = guarded(self.policy.predict, contract, rows)
        except RlmeshError as error:
            if not traits_of(self.policy).is_repeatable:
                return [error] * len(parts)
            return self._one_by_one(parts, error)
        finally:
            self.forward_ns += time.perf_counter_ns() - start_ns
        try:
            # What the policy returned may be anything, and raise when it is looked at.
            return guarded(_answers, contract, values, actions, counts)
        except RlmeshError as error:
            return [error] * len(parts)

    def _timed(self, values: JoinedValues) -> JoinedValues:
        if self.codec is _NO_TIMES:
            self.codec = CodecTimes()
        return TimedValues(values, self.codec)

    def _one_by_one(
        self, parts: Sequence[Part], error: RlmeshError
    ) -> Sequence[bytes | RlmeshError]:
        if len(parts) == 1:
            return [error]
        return [result for part in parts for result in self._run([part])]


def guarded(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Call what belongs to the policy, whatever it raises: the thread must go on.

    Raises:
        RlmeshError: As the policy raised it, or a PolicyError in place of anything else.
    """
    try:
        return function(*arguments)
    except RlmeshError:
        raise
    except BaseException as error:
        name = type(error).__name__
        raise PolicyError(f"the policy raised {name}: {text_of(error)}") from error


def _joined_values(parts: Sequence[Part]) -> JoinedValues:
    """Return how to read and write the batch; much cheaper if its parts all speak alike."""
    first = parts[0].values
    for part in parts:
        if part.values is not first:
            return MixedValues([part.values for part in parts])
    return first


def _rows(
    contract: EnvContract,
    values: JoinedValues,
    parts: Sequence[Part],
    counts: Sequence[int],
) -> Rows:
    space = contract.observation_space
    columns = values.join_batches(space, [part.observation for part in parts], counts)
    try:
        # What is in no space the policy would make nonsense of, or remember.
        structure_checker(space).check(columns)
    except ConformanceError as error:
        raise CodecError(
            f"the observation does not fit {contract.id}'s observation space: {error}"
        ) from error
    routes = [RouteRows(part.route_key, part.slots) for part in parts]
    return Rows(unflatten(space, columns), routes)


def _answers(
    contract: EnvContract, values: JoinedValues, actions: object, counts: Sequence[int]
) -> Sequence[bytes | RlmeshError]:
    space = contract.action_space
    try:
        columns = coerce_batch(space, actions, sum(counts))
    except ConformanceError as error:
        raise _misfit(contract, error) from error
    encoded = values.split_batch(space, columns, counts)
    if _nonsense(contract, columns) is None:
        return encoded
    return [
        _nonsense(contract, part) or data
        for part, data in zip(split(columns, counts), encoded, strict=True)
    ]


def _nonsense(contract: EnvContract, columns: list[Column]) -> PolicyError | None:
    """Return the error of actions that are in no space: NaN, or outside a Discrete's domain."""
    try:
        structure_checker(contract.action_space).check(columns)
    except ConformanceError as error:
        return _misfit(contract, error)
    return None


def _misfit(contract: EnvContract, error: ConformanceError) -> PolicyError:
    return PolicyError(f"the policy's actions do not fit {contract.id}'s action space: {error}")
