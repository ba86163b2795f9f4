"""ModelServer: a policy as an endpoint, without Ray."""

import uuid
from typing import Self, Unpack

from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.models.wrappers import MappedPolicy, with_replay
from rlmesh_ray.options import completed, takes_options
from rlmesh_ray.polling import should_spin
from rlmesh_ray.server.endpoint.bind_policy import checked_address
from rlmesh_ray.server.endpoint.endpoint import Endpoint, FurtherPort, Server
from rlmesh_ray.server.endpoint.endpoint_options import edition_texts, listening
from rlmesh_ray.server.endpoint.handshake_service import ServiceOptions
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.model_options import (
    DEFAULT_MODEL_MESSAGE_BYTES,
    DEFAULT_STUCK_AFTER_S,
    ModelServerOptions,
    checked_message_bytes,
)
from rlmesh_ray.server.model.model_service import ModelService
from rlmesh_ray.server.observe.observer_service import StatisticsService
from rlmesh_ray.server.observe.statistics import ModelStatistics
from rlmesh_ray.server.observe.statistics_report import observed_statistics
from rlmesh_ray.spaces.observation_map import as_observation_map
from rlmesh_ray.wire.rlmesh_v1.limits import max_predict_bytes


@takes_options(ModelServerOptions)
class ModelServer(Server):
    """Serves a policy over gRPC, to many clients at once. Usable as a context manager.

    A policy has one thread. Routes are answered in completion order
    (``rlmesh.model.concurrent_predict.v1``), but their requests share the policy's batches: a slow
    batch delays the requests of all of the server's routes, and no other requests. Opening and
    closing routes and sessions, health and statistics do not wait for it. Only an environment of a
    new kind may: a module with code of its own, or a ``Policy`` that does not claim
    ``PolicyTraits.checks_concurrently``, is asked about that between two batches. Serve two
    policies, or two copies of one, by two servers: each has a thread of its own, also in one
    process.

    ``health`` does not wait for the policy, and ``stop`` takes little longer than ``grace_s``, also
    while the policy hangs. Fast policies run in the serving loop: where one is stuck,
    ``grpc.health.v1`` reports that when it has come back, and clients are cut off then, or when the
    process ends.

    Args:
        policy: A ``Policy``, a torch module, or a function (a batch of observations in, a batch
            of actions out).
        **options: Those of ``ModelServerOptions``.

    Raises:
        ConfigurationError: ``policy`` is none of these, an option is out of its range, an edition
            text or a name in ``dialects`` is not known, ``observation_map`` is wrong, or the spaces
            of openpi clients are not known or not possible.
        MissingPackageError: The extra ``openpi`` is not installed.
        AddressError: ``address`` is malformed, or needs a token.
    """

    def __init__(
        self,
        policy: object,
        *,
        _endpoint_id: str | None = None,
        _stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        **options: Unpack[ModelServerOptions],
    ) -> None:
        # An actor gives its id in the registry; only tests need another time.
        # Options are checked before the policy is used: the batcher starts a thread.
        given = completed("ModelServer", ModelServerOptions, options)
        address, listen = listening("ModelServer", given["address"], "data_address")
        token, tls = given["token"], given["tls"]
        checked_address(address, token)
        should_spin()  # refuses a wrong environment variable
        wanted_bytes = checked_message_bytes(given["max_message_bytes"])
        openpi, openpi_env = listen.openpi, given["openpi_env"]
        if openpi is not None:
            checked_address(openpi, token)
            openpi_port = registry.model_port("openpi")
        elif openpi_env is not None:
            raise ConfigurationError(
                "openpi_env is for openpi clients; give the address as a ListenOptions(address, "
                "openpi=HOST:PORT)"
            )
        mapping = as_observation_map(given["observation_map"])
        served = as_policy(policy, horizon=given["horizon"], inference=given["inference"])
        if mapping is not None:
            served = MappedPolicy(served, mapping)
        served = with_replay(served, given["chunk_replay"])
        self._host = Batcher(
            served,
            given["max_batch_rows"],
            max_delay_s=given["max_delay_s"],
            stuck_after_s=_stuck_after_s,
            torch_threads=given["torch_threads"],
            name=uuid.uuid4().hex,
        )
        self._max_message_bytes = wanted_bytes or _message_limit(served, given["max_batch_rows"])
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            endpoint_id=_endpoint_id,
            on_stop=self._host.close,
            probe=self._host.health,
        )
        self._openpi: FurtherPort | None = None
        if openpi is not None:
            self._openpi = openpi_port(self._host, traits_of(served), self._endpoint, given)
            self._endpoint.add_port(self._openpi)
        self._options = ServiceOptions(
            shutdown=self._endpoint.stop_soon if given["allow_shutdown"] else None,
            on_close=self._endpoint.stop_soon if given["stop_on_close"] else None,
            accept_texts=edition_texts(listen.accept_edition_texts),
            dialects=registry.enabled_dialects(given["dialects"], registry.model_dialects()),
            idle_timeout_s=listen.idle_timeout_s,
        )

    @property
    def openpi_address(self) -> str | None:
        """The address that openpi clients dial, after ``ws://``; None: they are not served."""
        return None if self._openpi is None else self._openpi.address

    def statistics(self) -> ModelStatistics:
        """Return its statistics. From any thread."""
        return self._host.statistics()

    @property
    def policy_version(self) -> int:
        """Version of the present weights; 0 for those that it was made with."""
        return self._host.policy_version

    def set_weights(
        self, weights: object, *, version: int | None = None, timeout_s: float | None = 60.0
    ) -> int:
        """Replace the policy's weights, from the next batch on.

        Blocks until then. No request is refused or lost, and none sees a half of them; running
        episodes keep what the policy remembers of them.

        Args:
            weights: In the policy's own form: a module's state dict; of an RLlib checkpoint, the
                state of an EnvRunner (``rl_module``, and the connectors' if they have changed).
            version: The version that each answer has from then on: an integer from 1 to 2**63 - 1,
                rounded in answers beyond 2**53; default: one more than now.
            timeout_s: How long to wait for the policy, which may be at a batch.

        Returns:
            The version that acts now.

        Raises:
            ConfigurationError: ``version`` is no such integer or not newer than the present one,
                ``timeout_s`` is no time, or the policy's weights cannot be replaced.
            PolicyError: The weights do not fit; nothing has changed.
            EndpointTimeoutError: The policy did not come back in time; nothing has changed.
            EndpointClosedError: The server has been stopped.
        """
        return self._host.set_weights(weights, version=version, timeout_s=timeout_s)

    def start(self) -> Self:
        """Listen. Blocks until clients can connect.

        Raises:
            ListenError: The address is in use or not this machine's.
            ContractMismatchError: The policy cannot act in the spaces of ``openpi_env``.
        """
        service = ModelService(self._host, self._options, self._endpoint.drain)
        statistics = StatisticsService(lambda: [observed_statistics(self.statistics())])
        self._endpoint.start(
            [service.handlers(), statistics.handlers()], max_receive_bytes=self._max_message_bytes
        )
        return self


def _message_limit(policy: Policy, max_batch_rows: int) -> int:
    observation_space = traits_of(policy).observation_space
    if observation_space is None:
        return DEFAULT_MODEL_MESSAGE_BYTES
    return max_predict_bytes(observation_space, max_batch_rows)
