"""Simulators that ask a ModelService for each action, and remember what they have seen."""

import threading
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

CART_POLE = gymnasium.make("CartPole-v1")


def contract(num_lanes: int = 1, **changed: Any) -> EnvContract:
    """Describe a simulator of CartPole, but for what is changed: a part of it, or the actions."""
    parts = {
        "observation": CART_POLE.observation_space,
        "reward": gymnasium.spaces.Box(-np.inf, np.inf, ()),
        "terminated": gymnasium.spaces.Discrete(2),
        "truncated": gymnasium.spaces.MultiBinary(1),
    }
    actions = changed.pop("actions", CART_POLE.action_space)
    mode = changed.pop("mode", AutoresetMode.NEXT_STEP)
    wanted = {name: part for name, part in (parts | changed).items() if part is not None}
    return EnvContract(
        "CartPole-reporting",
        from_gymnasium(gymnasium.spaces.Dict(wanted)),
        from_gymnasium(actions),
        num_lanes,
        mode,
    )


def report(
    obs: NDArray[Any], reward: Any = 0.0, terminated: Any = False, truncated: Any = False
) -> dict[str, NDArray[Any]]:
    """Return what is sent; one row a lane."""
    num = len(obs)
    return {
        "observation": np.asarray(obs, np.float32),
        "reward": np.broadcast_to(np.float32(reward), num),
        "terminated": np.broadcast_to(np.int64(terminated), num),
        "truncated": np.broadcast_to(np.int8(truncated), num)[:, None],
    }


@dataclass(slots=True)
class Played:
    """An episode, as a simulator has seen it."""

    obs: list[Any]
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    is_terminated: bool = False
    is_truncated: bool = False


class ReportingSimulator:
    """CartPole in a thread, many lanes at a time; its rewards tell steps apart.

    Args:
        address: Of the ModelService.
        num_lanes: Of its one route.
        cuts_at: After how many steps every second episode, from the first, is truncated.
        names_episodes: Whether slots do; otherwise nothing but ends says where episodes begin.
        token: What it shows.
    """

    def __init__(
        self,
        address: str,
        num_lanes: int = 1,
        *,
        cuts_at: int = 500,
        names_episodes: bool = True,
        token: str | None = None,
    ) -> None:
        self.played: list[Played] = []
        """All episodes, those that go on included, in the order in which they began."""
        self.versions: list[int] = []
        """Of the weights that have acted, one a request."""
        self.failure: RlmeshError | None = None
        self._model = RemoteModel(address, token=token)
        self._num_lanes = num_lanes
        self._cuts_at = cuts_at
        self._names_episodes = names_episodes
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has been hung up on."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._model.close()

    def _run(self) -> None:
        try:
            self._model.configure_route(contract(self._num_lanes))
            self._play()
        except RlmeshError as error:
            self.failure = error

    def _play(self) -> None:
        num = self._num_lanes
        envs = [gymnasium.make("CartPole-v1") for _ in range(num)]
        lanes = [self._begin(env, seed) for seed, env in enumerate(envs)]
        while True:
            ended = [lane.is_terminated or lane.is_truncated for lane in lanes]
            sent = report(
                np.stack([lane.obs[-1] for lane in lanes]),
                [lane.rewards[-1] if lane.rewards else 99.0 for lane in lanes],
                [lane.is_terminated for lane in lanes],
                np.array([lane.is_truncated for lane in lanes]),
            )
            actions = self._model.predict(sent, slots=self._slots(lanes))
            reported = self._model.last_telemetry()
            assert reported is not None
            self.versions.append(reported.policy_version)
            for number, env in enumerate(envs):
                if ended[number]:
                    lanes[number] = self._begin(env, None)
                else:
                    self._step(env, lanes[number], int(actions[number]))

    def _begin(self, env: gymnasium.Env[Any, Any], seed: int | None) -> Played:
        self.played.append(Played([env.reset(seed=seed)[0]]))
        return self.played[-1]

    def _slots(self, lanes: list[Played]) -> Slots | None:
        if not self._names_episodes:
            return None
        ids = [str(self._number(lane)) for lane in lanes]
        steps = [len(lane.actions) for lane in lanes]
        return Slots(range(len(lanes)), ids, steps, [step == 0 for step in steps])

    def _number(self, lane: Played) -> int:
        return next(number for number, each in enumerate(self.played) if each is lane)

    def _step(self, env: gymnasium.Env[Any, Any], lane: Played, action: int) -> None:
        obs, _, terminated, truncated, _ = env.step(action)
        lane.actions.append(action)
        lane.obs.append(obs)
        lane.rewards.append(len(lane.actions) / 8)
        is_cut = self._number(lane) % 2 == 0 and len(lane.actions) >= self._cuts_at
        lane.is_terminated, lane.is_truncated = terminated, (truncated or is_cut) and not terminated
