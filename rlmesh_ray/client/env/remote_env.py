"""RemoteEnv: a single-lane endpoint as a gymnasium environment."""

import warnings
from typing import Any, Unpack

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_session_client import ClientOptions, open_client_session
from rlmesh_ray.client.env.remote_vector_env import RemoteSession, action_error, render_lanes
from rlmesh_ray.errors import (
    ConfigurationWarning,
    ConformanceError,
    ContractMismatchError,
    RemoteEnvError,
)
from rlmesh_ray.options import as_reset_options, as_seed, takes_options
from rlmesh_ray.spaces.batch import Column, coerce, flatten, leaves, unflatten
from rlmesh_ray.spaces.gym_conversion import env_spec, to_gymnasium
from rlmesh_ray.spaces.validation import structure_checker
from rlmesh_ray.spaces.vector_infos import lane_info


@takes_options(ClientOptions)
class RemoteEnv(RemoteSession, gymnasium.Env[Any, Any]):
    """The lane of one session with an endpoint whose width is 1.

    To be used by one thread at a time, in the process that has opened it.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, with or without ``rlmesh://`` or ``tcp://``;
            ``dm_env_rpc://HOST:PORT``, for a server of that protocol; or a ``ConnectOptions``,
            which also has how long the connection may take, and another edition text.
        **options: Those of ``ClientOptions``.

    Raises:
        ConfigurationError: ``edition_text`` is not known, or ``image_codec`` or ``resize`` does not
            fit the environment, the endpoint or the ``transport``.
        ContractMismatchError: The endpoint has more than one lane.
        EndpointError: The endpoint cannot be reached, requires another token, or is full.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    def __init__(self, address: str | ConnectOptions, **options: Unpack[ClientOptions]) -> None:
        self._client = open_client_session("RemoteEnv", address, options)

        def connect_again(render_mode: str | None = None) -> RemoteEnv:
            """Open another session: what ``spec.make()`` and gymnasium's checker ask for."""
            env = RemoteEnv(address, **options)
            if render_mode not in (None, env.render_mode):
                warnings.warn(
                    f"{env.address} serves render_mode={env.render_mode!r}, not {render_mode!r}: a "
                    "client cannot choose it",
                    ConfigurationWarning,
                    stacklevel=2,
                )
            return env

        contract = self._client.contract
        if contract.num_envs != 1:
            self._client.close()
            raise ContractMismatchError(
                f"{self.address} serves {contract.num_envs} lanes; use RemoteVectorEnv"
            )
        self.metadata = dict(contract.metadata)
        self.spec = env_spec(contract, connect_again)
        self.render_mode = contract.render_mode or None
        self.observation_space = to_gymnasium(contract.observation_space)
        self.action_space = to_gymnasium(contract.action_space)
        self._action_leaves = leaves(contract.action_space)
        self._action_checker = structure_checker(contract.action_space)

    @property
    def np_random_seed(self) -> int:
        """The seed that the last ``reset`` with one has sent; see ``RemoteVectorEnv``."""
        return -1 if self._np_random_seed is None else self._np_random_seed

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether this client, the environment or one of its wrappers has an attribute.

        Raises:
            ConfigurationError: The client has not, and the operator of the endpoint does not allow
                the call ``has_wrapper_attr``.
        """
        return hasattr(self, name) or bool(self.call("has_wrapper_attr", name))

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this client; ``call`` reads those of the environment.

        Raises:
            AttributeError: The client has no such attribute.
        """
        if hasattr(self, name) or hasattr(type(self), name):  # np_random says why there is none
            return getattr(self, name)
        raise AttributeError(
            f"RemoteEnv has no attribute {name!r}; if the environment at {self.address} has it, "
            f"call({name!r}) reads or calls it there"
        )

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of this client if it has one of that name, else of the environment.

        Raises:
            ConfigurationError: The operator of the endpoint does not allow the call
                ``set_wrapper_attr``, or ``has_wrapper_attr``, which ``force=False`` needs.
        """
        if hasattr(self, name) or hasattr(type(self), name):
            setattr(self, name, value)
            return True
        return (force or self.has_wrapper_attr(name)) and bool(
            self.call("set_wrapper_attr", name, value)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; see ``gymnasium.Env.reset``, and ``EnvClient.reset`` for options.

        Raises:
            CodecError: An option cannot travel; the message names it, and nothing was sent.
            ConfigurationError: ``seed`` is no whole number from 0 on, or ``options`` are no
                mapping; nothing was sent.
            RemoteEnvError: The environment raised or timed out; another reset may follow.
            EndpointError: The session broke.
        """
        seeds = () if seed is None else (as_seed(seed),)
        own_options = as_reset_options(options)
        try:
            result = self._client.reset(seeds=seeds, options=own_options)
        except RemoteEnvError:
            self._np_random_seed = None
            raise
        super().reset(seed=seed)  # gymnasium's checker looks at the private generator
        return self._value(result.observation), lane_info(result.infos, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply ``action``; see ``gymnasium.Env.step``.

        Raises:
            ConformanceError: ``action`` has the wrong structure or dtype, NaN, or an element
                outside the domain of its Discrete, MultiDiscrete or MultiBinary; nothing was sent,
                and the session goes on. A Box's bounds are the endpoint's affair
                (``validation``).
            RemoteEnvError: The environment raised or timed out, or the endpoint refused the action;
                where the error ``is_recoverable``, a reset may follow.
            EndpointError: The session broke.
        """
        try:
            parts = flatten(self.contract.action_space, action)
            own = [
                coerce(leaf, part, None)
                for leaf, part in zip(self._action_leaves, parts, strict=True)
            ]
            columns: list[Column] = [
                (part,) if isinstance(part, str) else np.asarray(part)[np.newaxis] for part in own
            ]
            # The endpoint would end the session for it.
            self._action_checker.check(columns)
        except ConformanceError as error:
            raise action_error(error, self.contract) from error.__cause__
        try:
            result = self._client.step(columns)
        except RemoteEnvError:
            self._np_random_seed = None  # it may have ended the environment that got the seed
            raise
        return (
            self._value(result.observation),
            float(result.rewards[0]),
            bool(result.terminated[0]),
            bool(result.truncated[0]),
            lane_info(result.infos, 0),
        )

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the environment; see ``EnvClient.call``.

        Args:
            name: One that the operator of the endpoint allows.
            args: By position.
        """
        return self._client.call(name, *args)[0]

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]  # pictures only
        """Return a picture, (height, width, 3) uint8; see ``RemoteVectorEnv.render``."""
        pictures = render_lanes(self._client)
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _value(self, columns: list[Any]) -> Any:
        return unflatten(self.contract.observation_space, [column[0] for column in columns])
