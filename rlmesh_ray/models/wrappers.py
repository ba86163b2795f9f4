"""Policies that change what another one gets or returns: a map before it, kept chunks behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np

from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
    PolicyError,
    RlmeshError,
)
from rlmesh_ray.models.policy import (
    ChunkRouteRows,
    EpisodeStates,
    Policy,
    PolicyTraits,
    Rows,
    UpdatablePolicy,
    traits_of,
)
from rlmesh_ray.options import CHUNK_REPLAYS, FIRST
from rlmesh_ray.spaces.batch import chunk_steps, coerce, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.observation_map import ObservationMap
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import structure_checker

_MOST_SPACES = 64
_MOST_LINES = 8


class PolicyWrapper:
    """A policy that changes what another one gets or returns; the rest is the other one's.

    Args:
        policy: The other one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        """The other one."""
        if isinstance(policy, UpdatablePolicy):
            self.get_weights = policy.get_weights
            """See ``UpdatablePolicy.get_weights``."""
            self.set_weights = policy.set_weights
            """See ``UpdatablePolicy.set_weights``."""

    @property
    def traits(self) -> PolicyTraits:
        traits = traits_of(self.policy)
        return replace(traits, kind=traits.kind or type(self.policy).__name__)

    def check_contract(self, contract: EnvContract) -> None:
        self.policy.check_contract(contract)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.policy.forget(route_key, env_index)


# --- behind an ObservationMap ------------------------------------------------------------------


class MappedPolicy(PolicyWrapper):
    """Maps the observations of clients, then calls a policy.

    Where the policy's observation space is known, keys without an entry are taken as the client has
    them; otherwise the policy gets the map's keys alone.

    Args:
        policy: Acts on mapped observations.
        observation_map: From the clients' observations to the policy's.

    Raises:
        ConfigurationError: The policy's observation space is known, and has no leaf of an entry.
    """

    def __init__(self, policy: Policy, observation_map: ObservationMap) -> None:
        super().__init__(policy)
        self._map = observation_map
        self._policy_space = traits_of(policy).observation_space
        if self._policy_space is not None:
            observation_map.completed(self._policy_space, self._policy_space)  # checks its keys
        self._bound = lru_cache(_MOST_SPACES)(self._bind)
        self._client_space: SpaceSpec | None = None
        """That of the environment that was accepted last, for display."""

    @property
    def traits(self) -> PolicyTraits:
        client_space, mapped_space, own_map = self._client_space, self._policy_space, self._map
        if client_space is not None:
            own_map, mapped_space = self._bound(client_space)
        return replace(
            super().traits,
            observation_space=None,
            observation_map=tuple(own_map.lines(client_space, mapped_space)),
        )

    def check_contract(self, contract: EnvContract) -> None:
        """Check that the map fits an environment, and the policy what the map makes of it.

        Raises:
            ContractMismatchError: One of them does not.
        """
        try:
            own_map, mapped_space = self._bound(contract.observation_space)
        except ContractMismatchError as error:
            raise ContractMismatchError(
                f"the observation map does not fit {contract.id}: {error}"
            ) from error
        try:
            self.policy.check_contract(replace(contract, observation_space=mapped_space))
        except ContractMismatchError as error:
            lines = own_map.lines(contract.observation_space, mapped_space)
            more = ["..."] if len(lines) > _MOST_LINES else []
            raise ContractMismatchError(
                f"{error}; the observation map has made: {'; '.join(lines[:_MOST_LINES] + more)}"
            ) from error
        self._client_space = contract.observation_space

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return the policy's actions.

        Raises:
            PolicyError: The policy failed, or a ``cast`` of the map cannot hold a number.
        """
        own_map, mapped_space = self._bound(contract.observation_space)
        try:
            mapped = own_map.apply(rows.observations)
        except RlmeshError as error:
            raise PolicyError(f"the observation map failed: {error}") from error
        mapped_contract = replace(contract, observation_space=mapped_space)
        return self.policy.predict(mapped_contract, rows._replace(observations=mapped))

    def _bind(self, client_space: SpaceSpec) -> tuple[ObservationMap, SpaceSpec]:
        own_map = self._map
        if self._policy_space is not None:
            own_map = own_map.completed(self._policy_space, client_space)
        return own_map, own_map.space(client_space)


# --- what clients that take one action get of a policy that chooses several -----------------------


def with_replay(policy: Policy, chunk_replay: str) -> Policy:
    """Return the policy to serve for an operator's ``chunk_replay``; see ``ModelServer``.

    Raises:
        ConfigurationError: It is no such choice, or the policy has no chunks to keep.
    """
    if chunk_replay not in CHUNK_REPLAYS:
        raise ConfigurationError(
            f"chunk_replay={chunk_replay!r:.40} is not one of {', '.join(CHUNK_REPLAYS)}"
        )
    if chunk_replay == FIRST:
        return policy
    if traits_of(policy).horizon == 1:
        raise ConfigurationError(
            'chunk_replay="kept" needs a policy that chooses several actions at once: give its '
            "horizon (horizon=…, --horizon), or leave chunk_replay out"
        )
    return KeptChunks(policy)


@dataclass(slots=True)
class _KeptChunk:
    """The chunk of one lane's episode."""

    columns: Sequence[Any] = ()
    """The leaves of the chunk, each ``(horizon, *action)``; none: there is no chunk yet."""
    num_used: int = 0
    """How many of its actions were answered."""

    @property
    def is_used_up(self) -> bool:
        return not self.columns or self.num_used == len(self.columns[0])


class KeptChunks(PolicyWrapper):
    """Asks a policy for a lane's next chunk when the lane's present one is used up.

    A lane and its episode are identified as ``Policy`` says. Rows of clients that take chunks
    themselves are passed on, and nothing is kept for them. Chunks of former weights are used up.

    Args:
        policy: A policy with a horizon above 1.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._horizon = traits_of(policy).horizon
        self._chunks = EpisodeStates(_KeptChunk)

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return chunks ``(N, horizon, *action)`` that begin with each lane's next action.

        The lanes of a request with an action outside the action space, which is refused, keep
        their actions; for the lane of that action the policy chooses another chunk next time.

        Raises:
            PolicyError: The policy failed, or returned no chunks, or a lane occurs twice; no
                action was taken from a chunk.
        """
        single = [route for route in rows.routes if not isinstance(route, ChunkRouteRows)]
        kept = iter(self._chunks.of(rows._replace(routes=single)))
        chunks = [
            _KeptChunk() if isinstance(route, ChunkRouteRows) else next(kept)
            for route in rows.routes
            for _ in route.slots
        ]
        is_asked = [chunk.is_used_up for chunk in chunks]
        if any(is_asked):
            actions = self.policy.predict(contract, _selected(contract, rows, is_asked))
            fresh = zip(*self._columns(contract, actions, sum(is_asked)), strict=True)
            for chunk, columns in zip(compress(chunks, is_asked), fresh, strict=True):
                chunk.columns, chunk.num_used = columns, 0
        # A chunk begins with the action for this step; its rest is not sent.
        begun = [
            [np.roll(column, -chunk.num_used, axis=0) for column in chunk.columns]
            for chunk in chunks
        ]
        actions = [*map(np.stack, zip(*begun, strict=True))]
        fits = iter(_rows_that_fit(contract.action_space, [column[:, 0] for column in actions]))
        acting = iter(chunks)
        for route in rows.routes:
            own = [(next(acting), next(fits)) for _ in route.slots]
            is_answered = all(is_fit for _, is_fit in own)  # else the server refuses the request
            for chunk, is_fit in own:
                chunk.num_used += is_answered
                if not is_fit:
                    chunk.columns = ()
        return unflatten(contract.action_space, actions)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._chunks.forget(route_key, env_index)
        self.policy.forget(route_key, env_index)

    def _columns(self, contract: EnvContract, actions: object, num_rows: int) -> list[Any]:
        """Return the leaves of the policy's chunks as arrays ``(num_rows, horizon, *action)``."""
        spec = contract.action_space
        try:
            return [
                np.stack(chunk_steps(leaf, value, num_rows, self._horizon), axis=1)
                for leaf, value in zip(leaves(spec), flatten(spec, actions), strict=True)
            ]
        except ConformanceError as error:
            raise PolicyError(
                f"the policy's actions do not fit {contract.id}'s action space: "
                f"{error.about('action')}"
            ) from error


def _rows_that_fit(spec: SpaceSpec, actions: Sequence[Any]) -> list[bool]:
    num_rows = len(actions[0])
    try:
        pairs = zip(leaves(spec), actions, strict=True)
        structure_checker(spec).check([coerce(leaf, value, num_rows) for leaf, value in pairs])
    except ConformanceError:
        if num_rows == 1:
            return [False]
        rows = ([column[row : row + 1] for column in actions] for row in range(num_rows))
        return [is_fit for row in rows for is_fit in _rows_that_fit(spec, row)]
    return [True] * num_rows


def _selected(contract: EnvContract, rows: Rows, is_selected: Sequence[bool]) -> Rows:
    if all(is_selected):
        return rows
    spec = contract.observation_space
    selected = [
        column[np.array(is_selected)]
        if isinstance(column, np.ndarray)
        else tuple(compress(column, is_selected))
        for column in flatten(spec, rows.observations)
    ]
    flags = iter(is_selected)
    routes = [
        route._replace(slots=[slot for slot in route.slots if next(flags)]) for route in rows.routes
    ]
    return Rows(unflatten(spec, selected), [route for route in routes if route.slots])
