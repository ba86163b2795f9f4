"""The policy of a model endpoint: its predictions, its routes, its weights."""

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError

from rlmesh_ray.errors import ConfigurationError, EndpointClosedError, EndpointTimeoutError
from rlmesh_ray.models.policy import Policy, UpdatablePolicy, traits_of
from rlmesh_ray.models.wrappers import KeptChunks
from rlmesh_ray.options import FIRST, KEPT, require_seconds
from rlmesh_ray.server.batcher import Batcher
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_options import checked_version, version_after
from rlmesh_ray.server.policy_executor import PolicyExecutor
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import image_leaves
from rlmesh_ray.spaces.space_description import space_lines
from rlmesh_ray.wire.policy_v1 import PolicyFacts

_MAX_ACCEPTED = 64
"""Kinds of environments that a host remembers the policy to accept."""


class ModelHost:
    """The policy of one endpoint, for all routes of all sessions.

    Args:
        policy: Called from one thread at a time, but for what its ``PolicyTraits`` allow.
        engine: Runs the policy's predictions.
    """

    def __init__(self, policy: Policy, engine: Batcher) -> None:
        self._policy = policy
        self._engine = engine
        self._executor = self._check_executor = engine.executor
        if traits_of(policy).checks_concurrently:
            # One thread for all checks: each may take the memory of a client's largest space.
            self._check_executor = PolicyExecutor(
                name="rlmesh-ray-policy-checks",
                stuck_after_s=self._executor.stuck_after_s,
                torch_threads=self._executor.torch_threads,
            )
        self._accepted: dict[Hashable, None] = {}
        """Environments that the policy need not be asked about again, the newest last."""
        # Every request passes these three: a method here would add a call to each.
        self.submit = engine.submit
        """See ``Batcher.submit``."""
        self.predict = engine.predict
        """See ``Batcher.predict``."""
        self.cancel = engine.cancel
        """See ``Batcher.cancel``."""
        self.sessions = engine.sessions
        """Counts the sessions, as those who open and end them note it."""
        self.horizon = traits_of(policy).horizon
        """How many actions the policy chooses at once."""
        self.observation_space = traits_of(policy).observation_space
        """The only space that the policy acts on; None: not known."""

    @property
    def policy_version(self) -> int:
        """Version of the policy's present weights; 0 for those that it was made with."""
        return self._engine.policy_version

    def facts(self) -> PolicyFacts:
        """Return a description of the policy. From any thread."""
        traits = traits_of(self._policy)
        observations, actions = (
            () if space is None else tuple(space_lines(space))
            for space in (traits.observation_space, traits.action_space)
        )
        kind = traits.kind or type(self._policy).__name__
        replay = ""
        if self.horizon > 1:
            replay = KEPT if isinstance(self._policy, KeptChunks) else FIRST
        space = traits.observation_space
        images = [] if space is None else image_leaves(space)
        return PolicyFacts(
            kind,
            traits.algorithm,
            self.policy_version,
            observations,
            actions,
            traits.observation_map,
            self.horizon,
            replay,
            {leaf.name: (leaf.shape[-3], leaf.shape[-2]) for leaf in images},
        )

    def health(self) -> Health:
        """Return whether the policy makes progress. From any thread.

        A check of an environment that hangs keeps new clients waiting as a batch does.
        """
        health = self._executor.health()
        return health if not health.is_serving else self._check_executor.health()

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act in an environment; if so, count a route from now on.

        It waits for no batch if the policy has accepted such an environment before, or can be
        asked at any time (``PolicyTraits.checks_concurrently``).

        Raises:
            ContractMismatchError: It cannot.
        """
        environment = _environment_of(contract)
        if environment not in self._accepted:
            check = self._check_executor.submit(self._policy.check_contract, contract)
            await asyncio.wrap_future(check)
            self._note_accepted(environment)
        self._engine.num_routes += 1

    def forget(self, route_key: str) -> "asyncio.Future[None]":
        """End a route at once; return a future of the policy's call that frees its state.

        The call runs after the batch that may be running. No other route may have the key.

        Returns:
            Raises the policy's RlmeshError; is cancelled when the host is closed before.
        """
        self._engine.num_routes -= 1
        call = self._executor.submit(self._policy.forget, route_key, None, is_grouped=True)
        return asyncio.wrap_future(call)

    async def forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        """Free the policy's state of some lanes of a route, which goes on.

        Raises:
            RlmeshError: The policy could not; it may remember some of them.
        """
        await asyncio.wrap_future(self._executor.submit(self._forget_lanes, route_key, lanes))

    def set_weights(self, weights: object, *, version: int | None, timeout_s: float | None) -> int:
        """Replace the policy's weights from the next batch on. Blocks; see ModelServer."""
        wanted = None if version is None else checked_version(version)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, allow_zero=True)
            timeout_s = float(timeout_s)  # locks refuse NumPy's smaller floats
        replaced = self._executor.submit(self._replace_weights, weights, wanted)
        try:
            return replaced.result(timeout_s)
        except CancelledError:
            raise EndpointClosedError(
                "the server has been stopped: the weights have not been replaced"
            ) from None
        except TimeoutError:
            if not replaced.cancel():  # it began just now
                return replaced.result()
            raise EndpointTimeoutError(
                f"the policy has not come back for {self._executor.busy_for_s:.0f} s: the weights "
                "have not been replaced"
            ) from None

    def close(self) -> None:
        """End the threads after their present work; waiting calls are cancelled. Does not block."""
        self._executor.close()
        self._check_executor.close()

    def _replace_weights(self, weights: object, version: int | None) -> int:
        """Replace the weights, in the policy's thread; return their version."""
        policy, present = self._policy, self._engine.policy_version
        if not isinstance(policy, UpdatablePolicy):
            raise ConfigurationError(
                f"the weights of a {type(policy).__name__} cannot be replaced; serve a torch "
                "module, an RLlib checkpoint, or a policy with get_weights and set_weights"
            )
        newer = version_after(present) if version is None else version
        if newer <= present:
            raise ConfigurationError(
                f"version {newer} is not newer than version {present}, which acts already"
            )
        policy.set_weights(weights)
        self._engine.policy_version = newer
        return newer

    def _forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._policy.forget(route_key, lane)

    def _note_accepted(self, environment: Hashable) -> None:
        if self._check_executor is self._executor:  # otherwise another check delays no batch
            self._accepted[environment] = None
            while len(self._accepted) > _MAX_ACCEPTED:
                del self._accepted[next(iter(self._accepted))]


def _environment_of(contract: EnvContract) -> Hashable:
    """Return what ``Policy.check_contract`` may judge by."""
    return contract.id, contract.observation_space, contract.action_space, contract.num_envs
