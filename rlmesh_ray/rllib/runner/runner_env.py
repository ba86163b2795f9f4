"""What RLlib and its callbacks see as the environment of a runner."""

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space

from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

LaneCall = Callable[[str, tuple[object, ...]], tuple[Any, ...]]
"""Calls an attribute, by name and with arguments, in every lane; one result a lane."""


class RunnerEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The spaces and the width of a runner's lanes.

    It cannot be stepped: the runner steps the lanes of each session when they are ready.

    Args:
        contract: Of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute, by name and with arguments, in every lane.
    """

    def __init__(
        self,
        contract: EnvContract,
        num_envs: int,
        close: Callable[[], None],
        call: LaneCall,
    ) -> None:
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
        self._close = close
        self._call = call

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a method of every lane's environment, if the endpoints allow it.

        As gymnasium's vectors do, and between steps: see ``EnvClient.call``. Lanes that are away
        get what was called with arguments when they are back, and give None.
        """
        return self._call(name, args)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every lane's environment; as in gymnasium, methods are called."""
        return self._call(name, ())

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        self._close()
