"""RemoteVecEnv: an endpoint's lanes as a vector environment of Stable-Baselines3.

Importing this needs the extra ``sb3``.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_session_client import ClientOptions
from rlmesh_ray.client.env.remote_env import RemoteVectorEnv, require_same_step, same_step
from rlmesh_ray.errors import ConfigurationError, MissingPackageError, RemoteEnvError
from rlmesh_ray.spaces.batch import stack, unflatten
from rlmesh_ray.spaces.vector_infos import lane_info

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices
except ImportError as error:
    raise MissingPackageError(
        f"rlmesh_ray.sb3 needs Stable-Baselines3, which cannot be imported ({error}): "
        "pip install stable-baselines3"
    ) from error


class RemoteVecEnv(VecEnv):
    """The lanes of one session with an endpoint, for the algorithms of Stable-Baselines3.

    Behaves as ``DummyVecEnv`` does with the same environments and seeds: a lane that ends is reset
    within the step, ``infos[lane]["terminal_observation"]`` is its last observation, and
    ``infos[lane]["TimeLimit.truncated"]`` says whether the episode was truncated. The endpoint's
    autoreset mode does not matter. Wrap it in ``VecMonitor`` for the returns of episodes.

    Args:
        env: The endpoint's address, also as ``ConnectOptions``, or an open RemoteVectorEnv, which
            ``close`` closes, too.
        options: Keyword arguments of RemoteVectorEnv, for an address: ``token``, ``tls``,
            ``step_timeout_s``, …

    Raises:
        ConfigurationError: ``env`` is of another type, the endpoint cannot reset single lanes
            or has several agents in each, or there are options for an open RemoteVectorEnv.
        EndpointError: The endpoint cannot be reached, requires another token, or is full.
        HandshakeRefusedError: The endpoint shares no generation or edition with this package.
    """

    def __init__(
        self, env: str | ConnectOptions | RemoteVectorEnv, **options: Unpack[ClientOptions]
    ) -> None:
        if not isinstance(env, str | ConnectOptions | RemoteVectorEnv):
            raise ConfigurationError(
                "RemoteVecEnv takes the address of an endpoint or a RemoteVectorEnv, and "
                f"{env!r:.80} is neither"
            )
        if isinstance(env, RemoteVectorEnv) and options:
            raise ConfigurationError(
                f"{', '.join(options)}: these are for an address; give them to RemoteVectorEnv"
            )
        self.env = env if isinstance(env, RemoteVectorEnv) else RemoteVectorEnv(env, **options)
        try:
            require_same_step(self.env)
        except ConfigurationError:
            self.env.close()
            raise
        super().__init__(
            self.env.num_envs, self.env.single_observation_space, self.env.single_action_space
        )
        self.metadata = dict(self.env.contract.metadata)

    def reset(self) -> Any:
        """Start new episodes in all lanes, with what ``seed`` and ``set_options`` have set.

        Lanes with different options are reset by one request each. Where no lane has been reset
        yet, as after an error, all are reset once before that, without options.

        Returns:
            Batched observations.
        """
        groups = [np.ones(self.num_envs, np.bool_)]
        if any(self._options) and any(own is not self._options[0] for own in self._options):
            groups = list(np.eye(self.num_envs, dtype=np.bool_))
            if not self.env.has_begun:  # the first Reset of a session must reset all lanes
                self.env.reset()
        observations: Any = None
        for mask in groups:
            lanes = np.flatnonzero(mask).tolist()
            observations, infos = self.env.reset(
                seed=self._seeds, options={**self._options[lanes[0]], "reset_mask": mask}
            )
            for lane in lanes:
                self.reset_infos[lane] = lane_info(infos, lane)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Send one action for each lane, in an array or a sequence; see ``step_wait``."""
        if not isinstance(actions, np.ndarray):
            spec = self.env.contract.action_space
            actions = unflatten(spec, stack(spec, actions))
        self.env.step_async(actions)

    def step_wait(
        self,
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Wait for the step that ``step_async`` sent, and reset the lanes that have ended.

        Returns:
            Batched observations, rewards (num_envs,) float32, ends (num_envs,) bool, and one info
            a lane.
        """
        step = same_step(self.env)
        is_truncated = (step.truncated & ~step.terminated).tolist()
        for info, flag in zip(step.infos, is_truncated, strict=True):
            info["TimeLimit.truncated"] = flag
        for lane, observation in step.final_observations.items():
            step.infos[lane]["terminal_observation"] = observation
            self.reset_infos[lane] = step.reset_infos[lane]
        ends = step.terminated | step.truncated
        return step.observations, step.rewards.astype(np.float32), ends, step.infos

    def close(self) -> None:
        """End the session."""
        self.env.close()

    def has_attr(self, attr_name: str) -> bool:
        """Return whether the lanes' environments have an attribute.

        ``get_attr`` finds out, which calls a method; ``has_wrapper_attr`` of the environments,
        where the operator allows that, calls none. Raises as ``env_method``.
        """
        try:
            return all(self.env_method("has_wrapper_attr", attr_name))
        except ConfigurationError:
            return bool(super().has_attr(attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the lanes' environments, where the operator allows it.

        A method is called without arguments, and its result returned: methods cannot be
        transferred. ``render_mode`` is known without a call. Raises as ``env_method``.
        """
        if attr_name == "render_mode":
            return [self.env.render_mode for _ in self._lanes(indices)]
        return self.env_method(attr_name, indices=indices)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute, by ``gymnasium.Env.set_wrapper_attr``. Raises as ``env_method``."""
        self.env_method("set_wrapper_attr", attr_name, value, indices=indices)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of the lanes' environments; see ``EnvClient.call``.

        Raises:
            AttributeError: The environments have no such method, or attribute.
            ConfigurationError: The operator of the endpoint has not allowed the call, or there are
                keyword arguments.
            RemoteEnvError: An environment raised.
        """
        if method_kwargs:
            raise ConfigurationError(
                f"{method_name}: arguments travel by position; give {', '.join(method_kwargs)} so"
            )
        lanes = self._lanes(indices)
        if not lanes:
            return []
        try:
            return list(self.env.call(method_name, *method_args, lanes=lanes))
        except RemoteEnvError as error:
            reason = error.message.removeprefix("AttributeError: ")
            # With any other code it is one of the environment's own errors.
            if error.code == "INVALID_ACTION" and reason != error.message:
                raise AttributeError(reason) from error
            raise

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Return False for each lane: a client cannot see the wrappers at the endpoint."""
        return [False for _ in self._lanes(indices)]

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """Return one frame for each lane, (height, width, 3) uint8; None in other render modes.

        Raises:
            LocalProtocolError: The lanes have not been reset yet.
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"{self.env.address} has render mode {self.render_mode}, which gives no pictures; "
                "serve the environment with render_mode='rgb_array'",
                stacklevel=2,
            )
            return [None] * self.num_envs
        pictures = self.env.render()
        assert pictures is not None, "the render mode is rgb_array"
        return pictures

    def _lanes(self, indices: VecEnvIndices) -> list[int]:
        lanes = range(self.num_envs)
        return [lanes[index] for index in self._get_indices(indices)]
