"""Sessions with lanes, whichever protocol their endpoint speaks: the address says which."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env_client import EnvClient, ResetResult, StepResult, shake_hands
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import allowed_transports, require_seconds
from rlmesh_ray.polling import WakeupDescriptors, should_spin
from rlmesh_ray.protocol.address import is_dm_env_rpc_address
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Column


class LaneClient(Protocol):
    """An open session; ``EnvClient`` says what its methods do."""

    @property
    def contract(self) -> EnvContract:
        """What the endpoint promised."""

    @property
    def answer(self) -> HandshakeResponse:
        """What it can do beyond that."""

    @property
    def address(self) -> str:
        """Where it is."""

    def reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> ResetResult:
        """Start new episodes, in all lanes or in ``lanes``."""

    def send_reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> str:
        """Start new episodes without waiting; return the request's id."""

    def receive_reset(self, request_id: str) -> ResetResult:
        """Wait for the result of the oldest request that was sent, a reset."""

    def step(self, action: Sequence[Column]) -> StepResult:
        """Apply one action a lane and wait for the result."""

    def send_step(self, action: Sequence[Column], *, is_last: bool = True) -> str:
        """Apply one action a lane without waiting; return the request's id."""

    def receive_step(self, request_id: str) -> StepResult:
        """Wait for the result of the oldest request that was sent, a step."""

    def wakeup(self) -> WakeupDescriptors | None:
        """Return what tells of the answer to a step; None: nothing but waiting does."""

    def render(self) -> bytes | None:
        """Return a PNG, or None where there is no picture."""

    def call(self, name: str, *arguments: object, lanes: Sequence[int] = ()) -> tuple[Any, ...]:
        """Call a method of the environment of each lane."""

    def close(self) -> None:
        """End the session. Idempotent."""


def open_lanes(
    connect_options: ConnectOptions,
    *,
    step_timeout_s: float,
    start_timeout_s: float = 120.0,
    transport: str = "auto",
    spin: bool | None = None,
) -> LaneClient:
    """Open a session.

    Args:
        connect_options: The endpoint.
        step_timeout_s: How long to wait for any answer.
        start_timeout_s: As for ``EnvClient``; without meaning for dm_env_rpc.
        transport: As for ``EnvClient``.
        spin: As for ``EnvClient``; without meaning for dm_env_rpc.

    Raises:
        ConfigurationError: An argument is for another protocol than the address, or what it
            asks for cannot be had there.
        RlmeshError: As ``EnvClient`` or ``WorldClient`` does.
    """
    require_seconds("step_timeout_s", step_timeout_s)
    require_seconds("start_timeout_s", start_timeout_s, allow_zero=True)
    wanted = allowed_transports(transport)
    should_spin(spin)  # names a setting that is none before anything is opened
    if not is_dm_env_rpc_address(connect_options.address):
        _require_no_settings(connect_options)
        return EnvClient(
            connect_options,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            transport=transport,
            spin=spin,
        )
    if len(wanted) == 1:
        raise ConfigurationError(
            f"{connect_options.address}: dm_env_rpc carries everything in messages; leave "
            "transport out"
        )
    settings = _world_settings(connect_options)
    from rlmesh_ray.dialects.dm_env_rpc.client.world_client import WorldClient

    return WorldClient(connect_options, settings, step_timeout_s=step_timeout_s)


def probe_endpoint(connect_options: ConnectOptions) -> HandshakeResponse:
    """Ask an endpoint what a session with it would be.

    Args:
        connect_options: The endpoint. One that speaks dm_env_rpc is joined for a moment, since it
            tells nobody else.

    Raises:
        RlmeshError: As ``open_lanes`` does.
    """
    if not is_dm_env_rpc_address(connect_options.address):
        _require_no_settings(connect_options)
        return shake_hands(connect_options)
    settings = _world_settings(connect_options)
    from rlmesh_ray.dialects.dm_env_rpc.client.world_client import probe_world

    return probe_world(connect_options, settings)


def _require_no_settings(connect_options: ConnectOptions) -> None:
    if connect_options.dm_env_rpc is not None:
        raise ConfigurationError(
            f"{connect_options.address} is no dm_env_rpc:// address, which the dm_env_rpc settings "
            "are for"
        )


def _world_settings(connect_options: ConnectOptions) -> DmEnvRpcSettings:
    """Return the settings for a server; also the one place that needs the extra's messages."""
    if connect_options.edition_text is not None:
        raise ConfigurationError(
            f"{connect_options.address}: dm_env_rpc has no editions; leave out edition_text"
        )
    try:
        import rlmesh_ray.dialects.dm_env_rpc.wire.package_messages  # noqa: F401  # whether it is there
    except ImportError as error:
        raise ConfigurationError(
            f"{connect_options.address}: dm_env_rpc's messages are not installed ({error}); "
            "pip install 'rlmesh-ray[dm-env-rpc]'"
        ) from error
    return connect_options.dm_env_rpc or DmEnvRpcSettings()
