"""A ModelService whose policy chooses actions later, for each request by itself.

``ModelServer`` runs batches: while one runs, no other is chosen, so a policy that waited would
block all clients, also those that it waits for. Here every request waits alone.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.messages import BatchRun
from rlmesh_ray.server.batch_schema import PredictionRequest
from rlmesh_ray.server.counters import ModelCounters
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.event_loop import shared_loop
from rlmesh_ray.server.handshake_service import ServiceOptions
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_host import ModelHost, RoutePolicy
from rlmesh_ray.server.model_options import DEFAULT_MODEL_MESSAGE_BYTES
from rlmesh_ray.server.model_service import ModelService
from rlmesh_ray.server.policy_executor import PolicyExecutor, result_or_error


class ChosenActions(NamedTuple):
    """The actions for the rows of one request."""

    actions: object
    """Batched like observations, one row per slot."""
    version: int
    """Version of the weights that chose them."""


class DeferredPolicy(RoutePolicy, Protocol):
    """Chooses actions when it can; never waits itself."""

    def choose_actions(self, rows: Rows) -> Future[ChosenActions]:
        """Begin to choose actions for the rows of one route; called in the serving loop.

        Args:
            rows: No lane of them waits for an action already.

        Returns:
            The actions. The server cancels it when the client has gone.

        Raises:
            RlmeshError: The rows cannot be answered; nothing has changed.
        """


class DeferredModelServer:
    """Serves a deferred policy over gRPC, to many clients at once.

    Args:
        policy: Chooses actions in the serving loop; its other methods are called in one thread of
            their own.
        address: ``HOST:PORT``; port 0: a free one.
        token: What clients must show; required unless ``address`` is loopback.
        tls: Files for TLS; None for plain text.
        no_token: Whether it may do without a token where other machines can reach it.
        max_message_bytes: Size of the largest message to accept.

    Raises:
        AddressError: ``address`` is malformed, or needs a token.
    """

    def __init__(
        self,
        policy: DeferredPolicy,
        *,
        address: str,
        token: TokenSource | None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        max_message_bytes: int = DEFAULT_MODEL_MESSAGE_BYTES,
    ) -> None:
        self._host = ModelHost(policy, DeferredEngine(policy))
        self._max_message_bytes = max_message_bytes
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            no_token=no_token,
            on_stop=self._host.close,
            probe=self._host.health,
        )

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""
        return self._endpoint.address

    def health(self) -> Health:
        """Return whether it would serve a new client now."""
        return self._endpoint.health()

    def start(self) -> None:
        """Listen. Blocks until clients can connect.

        Raises:
            ListenError: The address is in use or not this machine's.
        """
        service = ModelService(self._host, ServiceOptions(), self._endpoint.drain)
        self._endpoint.start([service.handlers()], max_receive_bytes=self._max_message_bytes)

    def stop(self) -> None:
        """End all sessions, with the requests that wait. Idempotent; blocks."""
        self._endpoint.stop(grace_s=0.0)


class DeferredEngine:
    """Asks the policy for each request by itself; a ``PredictionEngine``.

    Args:
        policy: Its ``choose_actions`` is called in the serving loop.
    """

    def __init__(self, policy: DeferredPolicy) -> None:
        self.executor = PolicyExecutor()
        self.counts = ModelCounters()
        self.num_routes = 0
        self.policy_version = 0
        self._policy = policy
        self._name = uuid.uuid4().hex
        self._choices: dict[PredictionRequest, Future[ChosenActions]] = {}
        """The choices of requests that wait."""

    def submit(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Call ``take(data)`` at once: there are no batches to collect."""
        take(data)

    def predict(self, request: PredictionRequest) -> bool:
        """Begin to choose actions; the answer always comes later."""
        request.arrived_ns = time.monotonic_ns()
        choice = result_or_error(self._choose, request)
        if isinstance(choice, RlmeshError):
            # Not at once: the stream notes the request after this has returned.
            shared_loop().post(partial(self._answer, request, choice, 0))
        else:
            self._choices[request] = choice
            choice.add_done_callback(lambda _: shared_loop().post(partial(self._deliver, request)))
        return True

    def cancel(self, request: PredictionRequest) -> None:
        """Cancel the choice for a request; it is not answered."""
        choice = self._choices.pop(request, None)
        if choice is not None:
            choice.cancel()

    def _choose(self, request: PredictionRequest) -> Future[ChosenActions]:
        schema, parts = request.schema, [request]
        rows = schema.rows(schema.codecs(parts), parts, [request.num_rows])
        return self._policy.choose_actions(rows)

    def _deliver(self, request: PredictionRequest) -> None:
        choice = self._choices.pop(request, None)
        if choice is None or choice.cancelled():  # by ``cancel``
            return
        error = choice.exception()
        if error is not None:
            self._answer(request, _as_rlmesh_error(error), 0)
            return
        actions, version = choice.result()
        self._answer(request, result_or_error(_encode, request, actions), version)

    def _answer(
        self, request: PredictionRequest, result: bytes | RlmeshError, version: int
    ) -> None:
        run = BatchRun(version, request.num_rows, 0, self._name)
        request.answer(result, run, time.monotonic_ns() - request.arrived_ns)


def _encode(request: PredictionRequest, actions: object) -> bytes | RlmeshError:
    schema = request.schema
    (answer,) = schema.answers(schema.codecs([request]), actions, [request], [request.num_rows])
    assert not isinstance(answer, tuple), "the policy has no horizon"
    return answer


def _as_rlmesh_error(error: BaseException) -> RlmeshError:
    if isinstance(error, RlmeshError):
        return error
    return PolicyError(f"the policy raised {type(error).__name__}: {text_of(error)}")
