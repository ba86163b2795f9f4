"""What an endpoint does with its policy, for all routes of all sessions."""

import asyncio
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError

from rlmesh_ray.errors import EndpointClosedError, EndpointTimeoutError
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.models.torch.threads import limit_torch_threads
from rlmesh_ray.options import require_count, require_seconds
from rlmesh_ray.server.batch_engine import BatchEngine
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_options import checked_version
from rlmesh_ray.server.policy_executor import PolicyExecutor
from rlmesh_ray.server.policy_health import DEFAULT_STUCK_AFTER_S, PolicyHealth
from rlmesh_ray.server.policy_thread import PolicyThread
from rlmesh_ray.server.policy_weights import PolicyWeights
from rlmesh_ray.server.statistics import ModelStatistics
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.space_description import space_lines
from rlmesh_ray.wire.policy_v1 import PolicyFacts

_MAX_ACCEPTED = 64
"""Kinds of environments that a host remembers the policy to accept."""


class ModelHost:
    """The policy of one endpoint: its predictions, its routes, its weights.

    Args:
        policy: Called from one thread at a time, but for what its ``PolicyTraits`` allow.
        max_rows: Most rows in a batch that joins several requests.
        stuck_after_s: After how many seconds at one batch, or one call, the policy counts as
            stuck.
        torch_threads: How many threads torch uses for a batch.
        name: Names the server in what it tells about each prediction.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    def __init__(
        self,
        policy: Policy,
        max_rows: int,
        *,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        torch_threads: int = 1,
        name: str = "",
    ) -> None:
        require_count("max_batch_rows", max_rows)
        require_count("torch_threads", torch_threads)
        self._policy = policy
        self._health = PolicyHealth(stuck_after_s)
        self._weights = PolicyWeights(policy)
        self._engine = BatchEngine(
            policy, self._weights, self._health, max_rows, torch_threads, name
        )
        self._collector = self._engine.collector
        self._thread = self._engine.thread
        self._threads = [self._thread]
        self._calls = self._checks = PolicyExecutor(self._thread)
        if traits_of(policy).checks_concurrently:
            # One thread for all checks: each may take the memory of a client's largest space.
            self._threads.append(PolicyThread(_no_batch, "rlmesh-ray-policy-checks"))
            self._checks = PolicyExecutor(self._threads[-1])
        self._accepted: dict[Hashable, None] = {}
        """Environments that the policy need not be asked about again, the newest last."""
        # What each request goes through is handed out as it is: a method here would cost a call.
        self.submit = self._collector.submit
        """See ``BatchCollector.submit``."""
        self.predict = self._engine.predict
        """See ``BatchEngine.predict``."""
        self.cancel = self._engine.cancel
        """See ``BatchEngine.cancel``."""
        self.sessions = self._engine.counts.sessions
        """Where sessions are counted, for whoever opens and ends them."""
        for calls in {self._calls, self._checks}:
            calls.submit(limit_torch_threads, torch_threads)

    @property
    def policy_version(self) -> int:
        """Of the weights that act now; 0 for those that the policy came with."""
        return self._weights.version

    def statistics(self) -> ModelStatistics:
        """Return what has been counted. From any thread."""
        return self._engine.statistics()

    def facts(self) -> PolicyFacts:
        """Tell what the policy is. From any thread."""
        traits = traits_of(self._policy)
        observations, actions = (
            () if space is None else tuple(space_lines(space))
            for space in (traits.observation_space, traits.action_space)
        )
        kind = traits.kind or type(self._policy).__name__
        return PolicyFacts(kind, traits.algorithm, self.policy_version, observations, actions)

    def health(self) -> Health:
        """Tell whether the policy gets on with its work. From any thread."""
        return self._health.look(self._thread.busy_for_s)

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act there; what acts there counts as a route from now on.

        It waits for no batch if the policy has accepted such an environment before, or can be
        asked at any time (``PolicyTraits.checks_concurrently``).

        Raises:
            ContractMismatchError: It cannot.
        """
        environment = _environment_of(contract)
        if environment not in self._accepted:
            await asyncio.wrap_future(self._checks.submit(self._policy.check_contract, contract))
            self._note_accepted(environment)
        self._collector.num_routes += 1

    def forget(self, route_key: str) -> "asyncio.Future[None]":
        """End a route at once; return what is done when the policy has freed what it remembers.

        The policy does so after the batch that may be running. No other route may have the key.

        Returns:
            Raises the policy's RlmeshError; is cancelled when the host is closed before.
        """
        self._collector.num_routes -= 1
        return asyncio.wrap_future(self._calls.submit_grouped(self._policy.forget, route_key, None))

    async def forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        """Free what the policy remembers about some lanes of a route, which goes on.

        Raises:
            RlmeshError: The policy could not; it may remember some of them.
        """
        await asyncio.wrap_future(self._calls.submit(self._forget_lanes, route_key, lanes))

    def set_weights(self, weights: object, *, version: int | None, timeout_s: float | None) -> int:
        """Let the policy act with other weights from the next batch on. Blocks; see ModelServer."""
        wanted = None if version is None else checked_version(version)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, allow_zero=True)
            timeout_s = float(timeout_s)  # NumPy's smaller floats no lock takes
        replaced = self._calls.submit(self._weights.replace, weights, wanted)
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
                f"the policy has not come back for {self._thread.busy_for_s:.0f} s: the weights "
                "have not been replaced"
            ) from None

    def close(self) -> None:
        """End the threads, after what they do; calls that wait are cancelled. Does not block."""
        for thread in self._threads:
            thread.end()
        self._calls.close()
        self._checks.close()

    def _forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._policy.forget(route_key, lane)

    def _note_accepted(self, environment: Hashable) -> None:
        if self._checks is self._calls:  # otherwise to ask again delays no batch
            self._accepted[environment] = None
            while len(self._accepted) > _MAX_ACCEPTED:
                del self._accepted[next(iter(self._accepted))]


def _environment_of(contract: EnvContract) -> Hashable:
    """Return what ``Policy.check_contract`` may judge by."""
    return contract.id, contract.observation_space, contract.action_space, contract.num_envs


def _no_batch() -> None:
    """Have nothing to run: batches are for the policy's own thread."""
