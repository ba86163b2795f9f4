"""What an endpoint does with its policy, for all routes of all sessions."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError

from rlmesh_ray.errors import EndpointClosedError, EndpointTimeoutError, RlmeshError
from rlmesh_ray.models.policy import Policy
from rlmesh_ray.models.torch_threads import limit_torch_threads
from rlmesh_ray.options import require_count, require_seconds
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_options import checked_version
from rlmesh_ray.server.policy_calls import PolicyCalls
from rlmesh_ray.server.policy_health import DEFAULT_STUCK_AFTER_S, PolicyHealth
from rlmesh_ray.server.policy_weights import PolicyWeights
from rlmesh_ray.server.predictions import Predictions
from rlmesh_ray.server.statistics import ModelStatistics
from rlmesh_ray.spaces.contract import EnvContract

_LOG = logging.getLogger(__name__)


class ModelHost:
    """The policy of one endpoint: its predictions, its routes, its weights.

    Args:
        policy: Called from one thread at a time.
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
        self._predictions = Predictions(
            policy, self._weights, self._health, max_rows, torch_threads, name
        )
        self._gathering = self._predictions.gathering
        self._thread = self._predictions.thread
        self._calls = PolicyCalls(self._thread)
        # What each request goes through is handed out as it is: a method here would cost a call.
        self.soon = self._gathering.soon
        """See ``Gathering.soon``."""
        self.predict = self._predictions.predict
        """See ``Predictions.predict``."""
        self.cancel = self._predictions.cancel
        """See ``Predictions.cancel``."""
        self.sessions = self._predictions.counts.sessions
        """Where sessions are counted, for whoever opens and ends them."""
        self._calls.make(limit_torch_threads, torch_threads)

    @property
    def policy_version(self) -> int:
        """Of the weights that act now; 0 for those that the policy came with."""
        return self._weights.version

    def statistics(self) -> ModelStatistics:
        """Return what has been counted. From any thread."""
        return self._predictions.statistics()

    def health(self) -> Health:
        """Tell whether the policy gets on with its work. From any thread."""
        return self._health.look(self._thread.busy_for_s)

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act there; what acts there counts as a route from now on.

        Raises:
            ContractMismatchError: It cannot.
        """
        await asyncio.wrap_future(self._calls.make(self._policy.check_contract, contract))
        self._gathering.num_routes += 1

    async def reconfigure(self, route_key: str, contract: EnvContract) -> None:
        """Ask the same for a route that is there already, and forget what it was before.

        Raises:
            ContractMismatchError: It cannot; what it remembers stays.
            PolicyError: The policy could not forget.
        """
        await asyncio.wrap_future(self._calls.make(self._renew, route_key, contract))

    async def forget(self, route_key: str) -> None:
        """Free what the policy remembers about a route, which ends with that.

        Raises:
            RlmeshError: The policy could not; the route is still there.
            asyncio.CancelledError: The caller was cancelled, and the route may still be there; or
                the host was closed.
        """
        await asyncio.wrap_future(self._calls.make(self._policy.forget, route_key, None))
        self._gathering.num_routes -= 1

    async def forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        """Free what the policy remembers about some lanes of a route, which goes on.

        Raises:
            RlmeshError: The policy could not; it may remember some of them.
        """
        await asyncio.wrap_future(self._calls.make(self._forget_lanes, route_key, lanes))

    async def abandon(self, route_key: str) -> None:
        """End a route whose client has gone, whatever the policy says; to be run to its end.

        Raises:
            asyncio.CancelledError: The host was closed.
        """
        try:
            await self.forget(route_key)
        except RlmeshError as error:  # nobody is there any more whom it would concern
            _LOG.warning("the policy failed: %s", text_of(error))
            self._gathering.num_routes -= 1

    def set_weights(self, weights: object, *, version: int | None, timeout_s: float | None) -> int:
        """Let the policy act with other weights from the next batch on. Blocks; see ModelServer."""
        wanted = None if version is None else checked_version(version)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, may_be_zero=True)
            timeout_s = float(timeout_s)  # NumPy's smaller floats no lock takes
        replaced = self._calls.make(self._weights.replace, weights, wanted)
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
        """End the thread, after what it is doing; calls that wait are cancelled. Does not block."""
        self._thread.end()
        self._calls.close()

    def _forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._policy.forget(route_key, lane)

    def _renew(self, route_key: str, contract: EnvContract) -> None:
        self._policy.check_contract(contract)
        self._policy.forget(route_key, None)
