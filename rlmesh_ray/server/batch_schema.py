"""From the observations of requests to a batch, and from a policy's actions to their answers.

All that depends on a route's spaces alone is found out once, when the route is configured: for a
batch of a few rows it would take longer than the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlmesh_ray.errors import CodecError, ConformanceError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.server.batch_codecs import BatchCodecs, CodecPair, MixedCodec
from rlmesh_ray.spaces.batch import flatten, unflatten
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.conformance import coerce, structure_checker
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.spec import SpaceSpec

_ROWS = (np.ndarray, list, tuple)


class BatchSchema:
    """What batches with rows of a route look like.

    Args:
        contract: The route's.
    """

    def __init__(self, contract: EnvContract) -> None:
        observations, actions = _shared(contract.observation_space), _shared(contract.action_space)
        self.contract = replace(contract, observation_space=observations, action_space=actions)
        """The route's, whose spaces are the same objects as those of routes with equal ones."""
        self.group = (observations, actions)
        """Equal for routes whose rows can be in one batch."""
        self._observation_checker = structure_checker(observations)
        self._action_checker = structure_checker(actions)
        self._action_leaves = leaves(actions)
        self._codecs: dict[BatchCodecs, CodecPair] = {}

    def codecs(self, parts: "Sequence[BatchPart]") -> CodecPair:
        """Return how to read and write a batch; much cheaper if its parts all speak alike.

        Args:
            parts: At least one, of this group.
        """
        first = parts[0].values
        for part in parts:
            if part.values is not first:
                observations, actions = self.group
                return CodecPair(
                    MixedCodec([part.values.codec(observations) for part in parts]),
                    MixedCodec([part.values.codec(actions) for part in parts]),
                )
        found = self._codecs.get(first)
        if found is None:
            found = self._codecs[first] = CodecPair(*map(first.codec, self.group))
        return found

    def rows(self, codecs: CodecPair, parts: "Sequence[BatchPart]", counts: Sequence[int]) -> Rows:
        """Return what to ask the policy.

        Args:
            codecs: Of the parts.
            parts: At least one, of this group.
            counts: How many rows each has.

        Raises:
            CodecError: An observation is none.
        """
        columns = codecs.observations.join([part.observation for part in parts], counts)
        try:
            # What is in no space the policy would make nonsense of, or remember.
            self._observation_checker.check(columns)
        except ConformanceError as error:
            raise CodecError(
                f"the observation does not fit {self.contract.id}'s observation space: {error}"
            ) from error
        routes = [RouteRows(part.route_key, part.slots) for part in parts]
        return Rows(unflatten(self.contract.observation_space, columns), routes)

    def answers(
        self, codecs: CodecPair, actions: object, counts: Sequence[int]
    ) -> Sequence[bytes | RlmeshError]:
        """Return each part's actions for the wire, or what is wrong with them.

        Args:
            codecs: Of the parts.
            actions: From the policy, for all parts; they may be anything.
            counts: How many rows each part has.

        Raises:
            PolicyError: They are not as many actions as there are rows, or nothing that could be.
        """
        try:
            values = flatten(self.contract.action_space, actions)
        except ConformanceError as error:
            raise self._misfit(error) from error
        try:
            columns = self._columns(values, sum(counts))
        except ConformanceError as error:
            return self._answers_apart(codecs, values, counts, error)
        encoded = codecs.actions.split(columns, counts)
        if self._nonsense(columns) is None:
            return encoded
        return [
            self._nonsense(part) or data
            for part, data in zip(split(columns, counts), encoded, strict=True)
        ]

    def _columns(self, values: Sequence[Any], num_rows: int) -> list[Column]:
        pairs = zip(self._action_leaves, values, strict=True)
        return [coerce(leaf, value, num_rows) for leaf, value in pairs]

    def _answers_apart(
        self,
        codecs: CodecPair,
        values: Sequence[Any],
        counts: Sequence[int],
        error: ConformanceError,
    ) -> Sequence[bytes | RlmeshError]:
        """Return the answers where some actions are of no dtype: only their parts get none."""
        if any(not isinstance(value, _ROWS) or len(value) != sum(counts) for value in values):
            raise self._misfit(error) from error
        parts: list[list[Column] | PolicyError] = []
        for own, count in zip(split(values, counts), counts, strict=True):
            try:
                parts.append(self._columns(own, count))
            except ConformanceError as misfit:
                parts.append(self._misfit(misfit))
        sound = next((part for part in parts if not isinstance(part, PolicyError)), None)
        if sound is None:
            raise self._misfit(error) from error
        # Who writes the answers wants a column over all rows.
        first = [column[:1] for column in sound]
        whole = [
            concatenate([first] * count) if isinstance(part, PolicyError) else part
            for part, count in zip(parts, counts, strict=True)
        ]
        encoded = codecs.actions.split(concatenate(whole), counts)
        return [
            part if isinstance(part, PolicyError) else self._nonsense(part) or data
            for part, data in zip(parts, encoded, strict=True)
        ]

    def _nonsense(self, columns: list[Column]) -> PolicyError | None:
        """Return the error of actions that are in no space: NaN, or outside a Discrete's domain."""
        try:
            self._action_checker.check(columns)
        except ConformanceError as error:
            return self._misfit(error)
        return None

    def _misfit(self, error: ConformanceError) -> PolicyError:
        return PolicyError(
            f"the policy's actions do not fit {self.contract.id}'s action space: {error}"
        )


@dataclass(slots=True, eq=False)
class BatchPart:
    """One request's part of a batch."""

    schema: BatchSchema
    """The route's."""
    observation: bytes
    """A batch with one row a slot, from the wire."""
    route_key: str
    slots: Sequence[PredictSlot]
    values: BatchCodecs
    """Of whoever asks."""


@lru_cache(maxsize=256)
def _shared(spec: SpaceSpec) -> SpaceSpec:
    """Return an equal space, the same object each time: those compare without being looked at."""
    return spec
