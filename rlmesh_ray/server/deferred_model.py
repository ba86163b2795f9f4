"""A ModelService whose answers come when somebody else says so, each by itself.

``ModelServer`` runs batches: while one is out, nothing else is chosen, and a policy that waited
would keep everybody waiting, those for whom it waits included. Here every request waits alone.
"""

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.batcher import QueuedPrediction
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.server.batch_codecs import BatchCodecs
from rlmesh_ray.server.batch_engine import Answer
from rlmesh_ray.server.batch_runner import result_or_error
from rlmesh_ray.server.batch_schema import BatchPart, BatchSchema
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.event_loop import shared_loop
from rlmesh_ray.server.handshake_service import ServiceOptions
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_options import DEFAULT_MODEL_MESSAGE_BYTES
from rlmesh_ray.server.model_service import ModelService
from rlmesh_ray.spaces.contract import EnvContract


class ChosenActions(NamedTuple):
    """What was chosen for the rows of one request."""

    actions: object
    """Batched like observations, one row a slot."""
    version: int
    """Of the weights that have chosen."""


class DeferredPolicy(Protocol):
    """Chooses actions when it can; never waits itself."""

    def check_contract(self, contract: EnvContract) -> None:
        """Say whether it can act in an environment; see ``models.policy.Policy``."""

    def choose_actions(self, rows: Rows) -> Future[ChosenActions]:
        """Have actions chosen for the rows of one route; called in the serving loop.

        Args:
            rows: No lane of them is being asked for already.

        Returns:
            What may be cancelled, when the client has gone.

        Raises:
            RlmeshError: The rows cannot be answered; nothing has changed.
        """

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free what is remembered about one lane of a route, or about the whole route (None)."""


class DeferredModelServer:
    """Serves such a policy over gRPC, to many clients at once.

    Args:
        policy: Asked in the serving loop, and told of routes in a thread of its own.
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
        self._host = _DeferredHost(policy)
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
        """Where clients dial it; only after ``start``."""
        return self._endpoint.address

    def health(self) -> Health:
        """Tell whether it would serve a new client now."""
        return self._endpoint.health()

    def start(self) -> None:
        """Listen. Blocks until clients can connect.

        Raises:
            AddressError: The address is in use or not this machine's.
        """
        service = ModelService(self._host, ServiceOptions(), self._endpoint.drain)
        self._endpoint.start([service.handlers()], max_receive_bytes=self._max_message_bytes)

    def stop(self) -> None:
        """End all sessions, whatever they wait for. Idempotent; blocks."""
        self._endpoint.stop(grace_s=0.0)


@dataclass(slots=True, eq=False)
class _DeferredRequest(BatchPart):
    """A request that waits for its answer."""

    answer: Answer
    arrived_ns: int
    choice: Future[ChosenActions] | None = None


class _DeferredHost(ModelHost):
    """Asks for each request by itself; routes are a ModelHost's."""

    def __init__(self, policy: DeferredPolicy) -> None:
        super().__init__(_Unbatched(policy), 1)
        self._deferred_policy = policy
        self._name = uuid.uuid4().hex
        self.submit = _at_once
        self.predict = self._ask
        self.cancel = self._take_back

    def _ask(
        self,
        route_key: str,
        schema: BatchSchema,
        observation: bytes,
        slots: Sequence[PredictSlot],
        values: BatchCodecs,
        answer: Answer,
    ) -> QueuedPrediction[Any]:
        arrived_ns = time.monotonic_ns()
        request = _DeferredRequest(
            schema, observation, route_key, slots, values, answer, arrived_ns
        )
        choice = result_or_error(self._choice, request)
        if isinstance(choice, RlmeshError):
            # Whoever asks has not noted yet that it has.
            shared_loop().post(partial(self._answer, request, choice, 0))
        else:
            request.choice = choice
            choice.add_done_callback(lambda _: shared_loop().post(partial(self._deliver, request)))
        return QueuedPrediction(None, route_key, len(slots), request)

    def _choice(self, request: _DeferredRequest) -> Future[ChosenActions]:
        schema, parts = request.schema, [request]
        rows = schema.rows(schema.codecs(parts), parts, [len(request.slots)])
        return self._deferred_policy.choose_actions(rows)

    def _take_back(self, ticket: QueuedPrediction[Any]) -> None:
        if ticket.payload.choice is not None:
            ticket.payload.choice.cancel()

    def _deliver(self, request: _DeferredRequest) -> None:
        assert request.choice is not None
        if request.choice.cancelled():  # by who has asked
            return
        error = request.choice.exception()
        if error is not None:
            self._answer(request, _as_ours(error), 0)
            return
        choice = request.choice.result()
        self._answer(request, result_or_error(_encoded, request, choice.actions), choice.version)

    def _answer(self, request: _DeferredRequest, result: bytes | RlmeshError, version: int) -> None:
        run = BatchRun(version, len(request.slots), 0, self._name)
        request.answer(result, run, time.monotonic_ns() - request.arrived_ns)


class _Unbatched:
    """What a ModelHost knows of the policy: all but its choices."""

    def __init__(self, policy: DeferredPolicy) -> None:
        self.check_contract = policy.check_contract
        self.forget = policy.forget

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Refuse: each request is asked for by itself."""
        raise PolicyError(f"{rows.num_rows} rows of {contract.id} came in a batch")


def _at_once(take: Any, data: bytes) -> None:
    """Work on a request: there are no batches that others should be in, too."""
    take(data)


def _encoded(request: _DeferredRequest, actions: object) -> bytes | RlmeshError:
    schema = request.schema
    (answer,) = schema.answers(schema.codecs([request]), actions, [len(request.slots)])
    return answer


def _as_ours(error: BaseException) -> RlmeshError:
    if isinstance(error, RlmeshError):
        return error
    return PolicyError(f"the policy raised {type(error).__name__}: {text_of(error)}")
