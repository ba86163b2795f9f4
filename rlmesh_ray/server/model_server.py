"""ModelServer: a policy as an endpoint, without Ray."""

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.chunk_replay import with_replay
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.mapped_policy import MappedPolicy
from rlmesh_ray.models.policy import traits_of
from rlmesh_ray.options import FIRST, as_names
from rlmesh_ray.polling import should_spin
from rlmesh_ray.protocol.handshake import edition_sha256
from rlmesh_ray.server.batch_collector import BatchCollector
from rlmesh_ray.server.batch_queue import DEFAULT_MAX_ROWS
from rlmesh_ray.server.bind_policy import TlsSource, checked_address
from rlmesh_ray.server.endpoint import Endpoint, FurtherPort
from rlmesh_ray.server.handshake_service import ServiceOptions
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.idle_timeout import checked_idle_timeout
from rlmesh_ray.server.model_dialects import ModelPortOptions
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_options import (
    DEFAULT_STUCK_AFTER_S,
    checked_message_bytes,
    message_limit,
)
from rlmesh_ray.server.model_service import ModelService
from rlmesh_ray.server.observer_service import StatisticsService
from rlmesh_ray.server.statistics import ModelStatistics
from rlmesh_ray.server.statistics_report import observed_statistics
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map


class ModelServer:
    """Serves a policy over gRPC, to many clients at once. Usable as a context manager.

    A policy has one thread. Routes are answered in completion order
    (``rlmesh.model.concurrent_predict.v1``), but their requests share the policy's batches: a slow
    batch delays the requests of all of the server's routes, and no other requests. Opening and
    closing routes and sessions, health and statistics do not wait for it. Only an environment of a
    new kind may: a module with code of its own, or a ``Policy`` that does not claim
    ``PolicyTraits.checks_concurrently``, is asked about that between two batches. Serve two
    policies, or two copies of one, by two servers: each has a thread of its own, also in one
    process.

    Args:
        policy: A ``Policy``, a torch module, or a function (a batch of observations in, a batch
            of actions out).
        horizon: How many actions the module or function chooses at once for each row: its output is
            ``(rows, horizon, *action)``. Default: its attribute ``horizon``, or 1, without that
            axis.
        chunk_replay: What a client gets that takes one action of a policy with a horizon above 1:
            ``"first"``: the first action of a new chunk at each request; ``"kept"``: the actions of
            one chunk after the other, which the endpoint keeps for each lane until it is used up or
            the lane begins another episode.
        address: ``HOST:PORT`` (port 0: a free one) or ``unix:PATH``.
        token: The token that clients must send, or a ``TokenFile``; required unless ``address`` is
            loopback.
        tls: Files for TLS; ``RayTls()``: those that Ray uses.
        no_token: Whether the endpoint may listen without a token where other machines can reach
            it; the log then warns what that means.
        max_batch_rows: Most rows in a batch that joins the requests of several routes.
        max_delay_s: Longest time for which a batch waits for further requests, from the moment at
            which it could run, up to 60 s. It does not wait when it has ``max_batch_rows`` rows, or
            a request of each open route. Default: a batch takes the requests that have come.
        max_message_bytes: Size of the largest message to accept, from 65,536 to 2**31 - 1; a larger
            one ends its session with a size error. Default: what ``max_batch_rows`` observations
            need where the policy's observation space is known (as of RLlib checkpoints), 32 MiB
            where it is not. For a moment, gRPC takes three times as much memory as a message has
            bytes.
        inference: For a ``torch.nn.Module``: ``"torch"``, ``"compiled"`` or ``"auto"``; see
            ``TorchPolicy``.
        observation_map: Makes the policy's observations from those that clients send: an
            ``ObservationMap``, or its entries. Routes that it does not fit are refused.
        torch_threads: How many threads torch uses for a batch. More than one pays for large modules
            only: on two cores, two of them were seen to be forty times as slow for small ones.
        stuck_after_s: After how many seconds at one batch ``health`` calls the policy stuck; more
            than 0.
        allow_shutdown: Whether a client's Shutdown stops the server, as ``stop`` does.
        stop_on_close: Whether a client's Close stops the server after that client's session. By
            default it ends the session only: other clients may be at work.
        accept_edition_texts: See ``EnvServer``.
        dialects: Names of the dialects to enable: ``"rlmesh.protocol.v1"``, ``"rlmesh-wire-v1"``
            (the released rlmesh 0.1.0). Default: both.
        openpi: ``HOST:PORT`` at which openpi clients are served, too, with the same token and TLS;
            None: nowhere. Needs the extra ``openpi``. Each connection is a session with one lane;
            its largest message is ``max_message_bytes``, or what an observation needs.
        openpi_env: An environment (or its contract) with the spaces of openpi clients, which send
            none; needed where the policy's traits do not name them.
        idle_timeout_s: See ``EnvServer``; a session that waits for an answer is not idle.
        endpoint_id: See ``EnvServer``.

    Raises:
        ConfigurationError: ``policy`` is none of these, an option is out of its range, an edition
            text or a name in ``dialects`` is not known, ``observation_map`` is wrong, or the spaces
            of openpi clients are not known or not possible.
        MissingPackageError: The extra ``openpi`` is not installed.
        AddressError: ``address`` is malformed, or needs a token.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        policy: object,
        *,
        horizon: int | None = None,
        chunk_replay: str = FIRST,
        address: str = "127.0.0.1:0",
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        max_batch_rows: int = DEFAULT_MAX_ROWS,
        max_delay_s: float = 0.0,
        max_message_bytes: int | None = None,
        inference: str = "auto",
        observation_map: ObservationMap | Sequence[str] | Mapping[str, str] | None = None,
        torch_threads: int = 1,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        allow_shutdown: bool = False,
        stop_on_close: bool = False,
        accept_edition_texts: Collection[str] = (),
        dialects: Collection[str] | None = None,
        idle_timeout_s: float | None = None,
        endpoint_id: str | None = None,
        openpi: str | None = None,
        openpi_env: object = None,
    ) -> None:
        # Options are checked before the policy is used: an engine starts a thread.
        checked_address(address, token, no_token=no_token)
        accept_texts = frozenset(
            map(edition_sha256, as_names("accept_edition_texts", accept_edition_texts))
        )
        enabled = registry.enabled_dialects(dialects, registry.model_dialects())
        checked_idle_timeout(idle_timeout_s)
        should_spin()  # refuses a wrong environment variable
        wanted_bytes = checked_message_bytes(max_message_bytes)
        if openpi is not None:
            checked_address(openpi, token, no_token=no_token)
            openpi_port = registry.model_port("openpi")
        elif openpi_env is not None:
            raise ConfigurationError("openpi_env is for openpi clients; give openpi=HOST:PORT, too")
        mapping = as_observation_map(observation_map)
        served = as_policy(policy, horizon=horizon, inference=inference)
        if mapping is not None:
            served = MappedPolicy(served, mapping)
        served = with_replay(served, chunk_replay)
        self._engine = BatchCollector(
            served,
            max_batch_rows,
            max_delay_s=max_delay_s,
            stuck_after_s=stuck_after_s,
            torch_threads=torch_threads,
            name=uuid.uuid4().hex,
        )
        self._host = ModelHost(served, self._engine)
        self._max_message_bytes = message_limit(served, max_batch_rows, wanted_bytes)
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            no_token=no_token,
            endpoint_id=endpoint_id,
            on_stop=self._host.close,
            probe=self._host.health,
        )
        self._openpi: FurtherPort | None = None
        if openpi is not None:
            options = ModelPortOptions(
                openpi, openpi_env, token, tls, no_token, wanted_bytes, idle_timeout_s
            )
            self._openpi = openpi_port(self._host, traits_of(served), self._endpoint, options)
            self._endpoint.add_port(self._openpi)
        self._options = ServiceOptions(
            shutdown=self._endpoint.stop_soon if allow_shutdown else None,
            on_close=self._endpoint.stop_soon if stop_on_close else None,
            accept_texts=accept_texts,
            dialects=enabled,
            idle_timeout_s=idle_timeout_s,
        )

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""
        return self._endpoint.address

    @property
    def openpi_address(self) -> str | None:
        """The address that openpi clients dial, after ``ws://``; None: they are not served."""
        return None if self._openpi is None else self._openpi.address

    def statistics(self) -> ModelStatistics:
        """Return its statistics. From any thread."""
        return self._engine.statistics()

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

    def health(self) -> Health:
        """Return whether it would serve a new client now: the policy works, nothing drains.

        Does not wait for the policy. ``grpc.health.v1`` reports the same, except while the policy
        runs in the serving loop, as fast ones do: one that gets stuck there is reported when it has
        come back.
        """
        return self._endpoint.health()

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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no new sessions from now on, and block until the open ones have ended.

        Call ``stop`` afterwards.

        Args:
            timeout_s: How long to wait; None: as long as it takes.

        Returns:
            Whether the last session has ended.
        """
        return self._endpoint.finish_sessions(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Answer what is outstanding, then end the sessions. Idempotent; blocks.

        It takes little longer than ``grace_s``, also while the policy hangs. If that runs in the
        serving loop then, clients are cut off when it comes back, or the process ends.

        Args:
            grace_s: After how many seconds outstanding requests are cancelled.
        """
        self._endpoint.stop(grace_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
