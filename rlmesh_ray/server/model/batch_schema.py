"""From the observations of requests to a batch, and from a policy's actions to their answers.

Everything that depends on a route's spaces alone is computed once, when the route is configured:
for a batch of a few rows it would take longer than the policy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from rlmesh_ray.errors import CodecError, ConformanceError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import ChunkRouteRows, RouteRows, Rows
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.spaces.batch import (
    chunk_steps,
    coerce,
    flatten,
    horizon_hint,
    split,
    unflatten,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import Column, SpaceSpec, leaves
from rlmesh_ray.spaces.validation import structure_checker
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs, join_each, split_each

_ROWS = (np.ndarray, list, tuple)

Actions = bytes | tuple[bytes, ...]
"""A request's actions; of a route with a horizon above 1 a batch for each step."""
Answer = Callable[[Actions | RlmeshError, BatchRun, int], None]
"""Takes a request's actions (or its error), its batch, and the ns that it waited.

Must not raise: the other requests of the batch wait for their answers."""


class CodecPair(NamedTuple):
    """How the parts of one batch are read and written; see ``BatchCodec``."""

    join_observations: Callable[[Sequence[bytes], Sequence[int]], list[Column]]
    split_actions: Callable[[Sequence[Column], Sequence[int]], list[bytes]]


class BatchSchema:
    """Converts between bytes and values for batches with rows of one route.

    Args:
        contract: The environment contract of the route.
        policy_horizon: How many actions the policy returns for each row.
        horizon: How many of these the route's client takes, from 1 to ``policy_horizon``.
    """

    def __init__(self, contract: EnvContract, policy_horizon: int = 1, horizon: int = 1) -> None:
        observations, actions = _shared(contract.observation_space), _shared(contract.action_space)
        self.contract = replace(contract, observation_space=observations, action_space=actions)
        """The route's contract; routes with equal spaces share the space objects."""
        self.group = (observations, actions)
        """Equal for routes whose rows can be in one batch."""
        self.horizon = horizon
        """How many actions of each chunk the route's client takes."""
        self._policy_horizon = policy_horizon
        self._observation_checker = structure_checker(observations)
        self._action_checker = structure_checker(actions)
        self._action_leaves = leaves(actions)

    def codecs(self, parts: "Requests") -> CodecPair:
        """Return the codecs of a batch; much cheaper if all parts have the same dialect.

        Args:
            parts: At least one, of this group.
        """
        first = parts[0].codecs
        for part in parts:
            if part.codecs != first:
                return CodecPair(
                    partial(join_each, [part.codecs.observations for part in parts]),
                    partial(split_each, [part.codecs.actions for part in parts]),
                )
        return CodecPair(first.observations.join, first.actions.split)

    def rows(self, codecs: CodecPair, parts: "Requests", counts: Sequence[int]) -> Rows:
        """Return the parts' observations as the policy takes them; takers of chunks are marked.

        Their arrays are writable and not shared, whether they come from one part or many.

        Args:
            codecs: From ``codecs(parts)``.
            parts: At least one, of this group.
            counts: Number of rows of each part.

        Raises:
            CodecError: An observation cannot be read, or is not in its space.
        """
        columns = codecs.join_observations([part.observation for part in parts], counts)
        try:
            # The policy might remember a value that is not in the space.
            self._observation_checker.check(columns)
        except ConformanceError as error:
            raise CodecError(
                f"the observation does not fit {self.contract.id}'s observation space: "
                f"{error.about('observation')}"
            ) from error
        columns = [_writable(column) for column in columns]
        kinds = [RouteRows if part.schema.horizon == 1 else ChunkRouteRows for part in parts]
        routes = [kind(part.route_key, part.slots) for kind, part in zip(kinds, parts, strict=True)]
        return Rows(unflatten(self.contract.observation_space, columns), routes)

    def answers(
        self, codecs: CodecPair, actions: object, parts: "Requests", counts: Sequence[int]
    ) -> Sequence[Actions | RlmeshError]:
        """Return as many actions for each part as its client takes, or the error of that part.

        Args:
            codecs: From ``codecs(parts)``.
            actions: What the policy returned for all parts; it may be anything.
            parts: At least one, of this group.
            counts: Number of rows of each part.

        Raises:
            PolicyError: The number of actions differs from that of the rows or the horizon, or
                their structure is not that of the action space.
        """
        try:
            values = flatten(self.contract.action_space, actions)
            if self._policy_horizon == 1:
                return self._answers(codecs, values, parts, counts)
            num_rows, horizon = sum(counts), self._policy_horizon
            pairs = zip(self._action_leaves, values, strict=True)
            by_leaf = [chunk_steps(leaf, value, num_rows, horizon) for leaf, value in pairs]
        except ConformanceError as error:
            raise self._policy_error(error) from error
        horizons = [part.schema.horizon for part in parts]
        by_step = [
            self._answers(codecs, values, parts, counts)
            for values in list(zip(*by_leaf, strict=True))[: max(horizons)]
        ]
        return [
            _chunk(of_part[:horizon])
            for of_part, horizon in zip(zip(*by_step, strict=True), horizons, strict=True)
        ]

    def _answers(
        self, codecs: CodecPair, values: Sequence[Any], parts: "Requests", counts: Sequence[int]
    ) -> Sequence[bytes | RlmeshError]:
        """Return each part's actions of one step as bytes, or the error of that part.

        Args:
            codecs: From ``codecs(parts)``.
            values: What the policy returned for each leaf of the action space.
            parts: See ``answers``.
            counts: Number of rows of each part.

        Raises:
            PolicyError: The actions of all parts have a wrong dtype or number.
        """
        num_rows = sum(counts)
        pairs = zip(self._action_leaves, values, strict=True)
        try:
            columns = [coerce(leaf, value, num_rows) for leaf, value in pairs]
        except ConformanceError as error:
            is_parted = all(isinstance(each, _ROWS) and len(each) == num_rows for each in values)
            if len(parts) > 1 and is_parted:
                answers = list(self._answers_by_part(values, parts, counts))
                if not all(has_wrong_dtype for _, has_wrong_dtype in answers):
                    return [answer for answer, _ in answers]
            hint = ""
            if is_parted:
                hint = max(
                    horizon_hint(getattr(value, "shape", ()), (num_rows, *leaf.shape))
                    for leaf, value in zip(self._action_leaves, values, strict=True)
                )
            raise self._policy_error(error, hint) from error
        try:  # NaN, or not in the domain of a Discrete
            self._action_checker.check(columns)
        except ConformanceError as error:
            if len(parts) == 1:
                return [self._policy_error(error)]
            return [answer for answer, _ in self._answers_by_part(columns, parts, counts)]
        return codecs.split_actions(columns, counts)

    def _answers_by_part(
        self, values: Sequence[Any], parts: "Requests", counts: Sequence[int]
    ) -> Iterator[tuple[bytes | RlmeshError, bool]]:
        """Yield each part's answer, by itself, and whether the part has a wrong dtype."""
        for part, own, count in zip(parts, split(values, counts), counts, strict=True):
            try:
                (answer,) = self._answers(self.codecs([part]), own, [part], [count])
                yield answer, False
            except PolicyError as error:
                yield error, True

    def _policy_error(self, error: ConformanceError, hint: str = "") -> PolicyError:
        return PolicyError(
            f"the policy's actions do not fit {self.contract.id}'s action space: "
            f"{error.about('action')}{hint}"
        )


def _writable(column: Column) -> Column:
    """Return a column that a policy may write into, a copy if it is a view of the message."""
    if isinstance(column, tuple) or column.flags.writeable:
        return column
    return column.copy()


def _chunk(steps: Sequence[bytes | RlmeshError]) -> Actions | RlmeshError:
    """Return the actions of a part's steps, or the first error of them."""
    found: list[bytes] = []
    for step in steps:
        if isinstance(step, RlmeshError):
            return step
        found.append(step)
    return found[0] if len(found) == 1 else tuple(found)


@dataclass(slots=True, eq=False)
class PredictionRequest:
    """One request of a route: its part of a batch."""

    schema: BatchSchema
    """The schema of its route."""
    observation: bytes
    """A batch with one row per slot, as received."""
    route_key: str
    """Names the route over all sessions."""
    slots: Sequence[PredictSlot]
    """At least one."""
    codecs: ContractCodecs
    """Those of its route, in the client's dialect; codecs of one dialect and space are the same."""
    answer: Answer
    """Called in the serving loop, unless the request is cancelled before."""
    arrived_ns: int = 0
    """When it was given to the batcher, by ``time.monotonic_ns``."""


Requests = Sequence[PredictionRequest]
"""The requests of a batch."""


@lru_cache(maxsize=256)
def _shared(spec: SpaceSpec) -> SpaceSpec:
    """Return an equal space, the same object each time: identical objects compare quickly."""
    return spec
