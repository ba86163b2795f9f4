"""The environment of a runner, as RLlib and its callbacks see it."""

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space

from rlmesh_ray.client.remote_env import remote_np_random
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

LaneCall = Callable[[str, tuple[object, ...]], tuple[Any, ...]]
"""Calls an attribute, by name and with arguments, in every lane; one result for each lane."""


class LaneCalls:
    """The methods of a vector environment that reach into its lanes.

    Args:
        close: Ends the sessions.
        call: Calls an attribute in every lane.
    """

    def __init__(self, close: Callable[[], None], call: LaneCall) -> None:
        self._close = close
        self._call = call

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a method of every lane's environment, if the endpoints allow it.

        It works as in gymnasium's vector environments, and between steps: see ``EnvClient.call``.
        Lanes whose session is lost return None; a call with arguments is repeated in the new one.
        """
        return self._call(name, args)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every lane's environment; as in gymnasium, methods are called."""
        return self._call(name, ())

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        self._close()


class RunnerEnv(LaneCalls, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The spaces and the number of a runner's lanes.

    It has no ``step``: the runner steps the lanes of each session when they are ready.

    Args:
        contract: The contract of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute in every lane.
    """

    def __init__(
        self, contract: EnvContract, num_envs: int, close: Callable[[], None], call: LaneCall
    ) -> None:
        super().__init__(close, call)
        self.num_envs = num_envs
        self.render_mode = contract.render_mode or None
        self.metadata = {
            **contract.metadata,
            "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
        }
        self.single_observation_space = to_gymnasium(contract.observation_space)
        self.single_action_space = to_gymnasium(contract.action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as SyncVectorEnv
        """-1 for each lane, as in gymnasium where the seed is not known."""
        return (-1,) * self.num_envs

    np_random = remote_np_random
