"""A policy behind an ObservationMap."""

from dataclasses import replace
from functools import lru_cache

from rlmesh_ray.errors import ContractMismatchError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import Policy, PolicyTraits, PolicyWrapper, Rows, traits_of
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.observation_map import ObservationMap
from rlmesh_ray.spaces.spec import SpaceSpec

_MOST_SPACES = 64
_MOST_LINES = 8


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
