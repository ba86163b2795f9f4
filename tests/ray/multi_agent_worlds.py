"""Environments with several agents, for tests; they need neither RLlib nor PettingZoo."""

from collections import OrderedDict
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlmesh_ray.protocol import capabilities

POINT = spaces.Box(-1.0, 1.0, (2,), np.float32)
MESSAGE = spaces.Dict(OrderedDict(word=spaces.Discrete(5), place=POINT))
WALK = spaces.Box(-1.0, 1.0, (1,), np.float32)


class Crossing:
    """Cars, a light and a tram at a crossing: agents differ, leave, join, and wait their turns.

    ``light`` is there from the first step to the last, but is asked only at every other one.
    ``car_0`` leaves early, terminated; ``car_1`` joins at step 2 and is cut off, truncated, if
    the episode lasts; ``tram`` is listed and never comes. Rewards go also to the light while it
    waits. What happens depends on the seed and on every action. Episodes end by termination and
    truncation, in turns.
    """

    possible_agents = ("tram", "light", "car_1", "car_0")
    observation_spaces: ClassVar[Any] = {
        "tram": spaces.Box(2.0, 3.0, (1,), np.float64),
        "light": MESSAGE,
        "car_1": POINT,
        "car_0": POINT,
    }
    action_spaces: ClassVar[Any] = {
        "tram": spaces.MultiDiscrete([2, 3]),
        "light": spaces.Discrete(3),
        "car_1": WALK,
        "car_0": spaces.Discrete(4),
    }

    def __init__(self, context: Any = None) -> None:
        self.agents: list[str] = []
        self._episodes = 0
        self._steps = 0
        self._length = 0
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._episodes += 1
        self._steps = 0
        self._length = int(self._random.integers(5, 10))
        self.agents = ["light", "car_0"]
        return {agent: self._look(agent) for agent in self.agents}, {
            "light": {"length": self._length}
        }

    def step(self, actions: Any) -> Any:
        self._steps += 1
        for agent in sorted(actions):
            self._random.bit_generator.advance(int(1000 * np.sum(actions[agent])) % 97)  # type: ignore[attr-defined]
        is_over = self._steps >= self._length
        rewards = {agent: float(self._random.normal()) for agent in self.agents}
        terminated = {"__all__": is_over and self._episodes % 2 == 1}
        truncated = {"__all__": is_over and self._episodes % 2 == 0}
        observations = {
            agent: self._look(agent)
            for agent in self.agents
            if agent != "light" or self._steps % 2 == 0 or is_over
        }
        if self._steps == 4:
            terminated["car_0"] = True
            self.agents.remove("car_0")
        if self._steps == 8 and "car_1" in self.agents:
            truncated["car_1"] = True
            self.agents.remove("car_1")
        if self._steps == 2:
            self.agents.insert(1, "car_1")
            observations["car_1"] = self._look("car_1")
            # In the agents' order, as lanes have them: the order decides who draws first.
            observations = {agent: observations[agent] for agent in self.agents}
        infos = {agent: {"step": self._steps} for agent in observations}
        return observations, rewards, terminated, truncated, infos

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _look(self, agent: str) -> Any:
        place = self._random.uniform(-1.0, 1.0, 2).astype(np.float32)
        if agent != "light":
            return place
        return OrderedDict(word=np.int64(self._random.integers(5)), place=place)


NUMBERED = {3: "tram", ("light", 0): "light", 1: "car_1", 0: "car_0"}
"""The crossing's agents by other ids."""
_NUMBERS = {name: agent_id for agent_id, name in NUMBERED.items()}


def _numbered(by_name: Any) -> Any:
    return {_NUMBERS.get(name, name): value for name, value in by_name.items()}


class NumberedCrossing(Crossing):
    """The same, with integers and a tuple as ids, which stand nowhere but among the spaces."""

    possible_agents = ()  # type: ignore[assignment]
    observation_spaces: ClassVar[Any] = _numbered(Crossing.observation_spaces)
    action_spaces: ClassVar[Any] = _numbered(Crossing.action_spaces)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return tuple(map(_numbered, super().reset(seed=seed, options=options)))

    def step(self, actions: Any) -> Any:
        by_name = {NUMBERED[agent_id]: action for agent_id, action in actions.items()}
        return tuple(map(_numbered, super().step(by_name)))


class Turnover:
    """Agents join, wait, come back and end as the seed draws it; the episode ends independently.

    So all agents may have ended while others join, or while none is present. Actions of agents that
    have ended have no effect.
    """

    possible_agents = (0, 1, 2, 3)
    observation_spaces: ClassVar[Any] = dict.fromkeys(
        possible_agents, spaces.Box(-np.inf, np.inf, (2,), np.float64)
    )
    action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, spaces.Discrete(3))

    def __init__(self, context: Any = None) -> None:
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._steps, self._sum = 0, 0
        self._ended: set[int] = set()
        self._joins = dict(enumerate(self._random.choice([0, 0, 1, 2, 3, 5], 4).tolist()))
        self._length = int(self._random.integers(2, 12))
        self._odds = self._random.choice([0.1, 0.5, 0.9], 2)
        first = [agent for agent, step in self._joins.items() if step == 0]
        return {agent: self._look() for agent in first}, {agent: {} for agent in first}

    def step(self, actions: Any) -> Any:
        self._steps += 1
        self._sum += sum(actions[agent] for agent in actions.keys() - self._ended)
        is_over, is_cut = self._steps >= self._length, bool(self._random.integers(2))
        terminated: dict[Any, bool] = {"__all__": is_over and not is_cut}
        truncated: dict[Any, bool] = {"__all__": is_over and is_cut}
        observations, rewards, infos = {}, {}, {}
        for agent, joins in self._joins.items():
            draws, reward = self._random.random(4), float(self._random.normal())
            if agent in self._ended or joins > self._steps:
                terminated |= {agent: True} if agent in self._ended and draws[3] < 0.3 else {}
                continue
            has_ended = joins < self._steps and draws[0] < 0.4 * self._odds[0]
            is_cut_off = (has_ended and draws[1] < 0.5) or truncated["__all__"]
            rewards[agent] = reward
            # RLlib wants a last observation of agents that are truncated.
            if joins == self._steps or draws[2] < self._odds[1] or is_cut_off:
                observations[agent] = self._look()
                infos[agent] = {"step": self._steps}
            if has_ended:
                (truncated if is_cut_off else terminated)[agent] = True
                self._ended.add(agent)
        return observations, rewards, terminated, truncated, infos

    def close(self) -> None:
        pass

    def _look(self) -> Any:
        return np.array([self._sum, self._random.normal()])


class Fragile(Crossing):
    """Raises in the third episode of its life."""

    def step(self, actions: Any) -> Any:
        if self._episodes == 3 and self._steps == 1:
            raise RuntimeError("worn out")
        return super().step(actions)


class Hopeless(Crossing):
    """Raises on every step."""

    def step(self, actions: Any) -> Any:
        raise RuntimeError("never")


class Climb:
    """``first`` and ``second`` count their steps without end; ``second`` sees every other one.

    Rewards are the step's number for ``first``, and 1.0 for ``second``.
    """

    possible_agents = ("first", "second")
    observation_spaces: ClassVar[Any] = dict.fromkeys(
        possible_agents, spaces.Box(0.0, np.inf, (1,), np.float32)
    )
    action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def __init__(self) -> None:
        self.rung = 0
        self._steps = 0

    def set_rung(self, rung: int) -> int:
        former, self.rung = self.rung, rung
        return former

    def get_observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def get_action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._steps = 0
        return self._look(self.possible_agents), {"first": {"rung": self.rung}}

    def step(self, actions: Any) -> Any:
        self._steps += 1
        seen = self.possible_agents if self._steps % 2 == 0 else ("first",)
        rewards = {"first": float(self._steps), "second": 1.0}
        goes_on = {"__all__": False}
        return self._look(seen), rewards, goes_on, goes_on, {"first": {"rung": self.rung}}

    def _look(self, agents: Any) -> Any:
        return {agent: np.full(1, self._steps, np.float32) for agent in agents}

    def close(self) -> None:
        pass


class Precipice(Climb):
    """The first agent's reward is infinite in every third step of an episode."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        if self._steps % 3 == 0:
            rewards = {**rewards, "first": np.inf}
        return observations, rewards, *rest


class Hunt:
    """PettingZoo's interface: two hunters look for a prey on a line, which may get away.

    A hunter that finds the prey leaves with a reward; the episode is over when both have left, or
    after eight steps, which truncate it.
    """

    metadata: ClassVar[Any] = {"name": "hunt", "render_modes": []}
    render_mode = None
    possible_agents = ("hunter_0", "hunter_1")

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._random = np.random.default_rng(0)
        self._places: dict[str, int] = {}
        self._steps = 0
        self._observation_spaces: dict[str, Any] = {
            agent: spaces.Box(-8.0, 8.0, (number,), np.float32)
            for number, agent in enumerate(self.possible_agents, 1)
        }
        self._action_spaces: dict[str, Any] = {
            agent: spaces.Discrete(number) for number, agent in enumerate(self.possible_agents, 2)
        }

    def observation_space(self, agent: str) -> Any:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._places = {agent: int(self._random.integers(-4, 5)) for agent in self.agents}
        self._steps = 0
        return self._look(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert sorted(actions) == self.agents
        self._steps += 1
        for agent, action in actions.items():
            move = int(action) * 2 - 1 if agent == "hunter_0" else int(action) - 1
            self._places[agent] = max(-8, min(8, self._places[agent] + move))
        observations = self._look()
        is_late = self._steps >= 8
        terminated = {agent: self._places[agent] == 0 and not is_late for agent in self.agents}
        truncated = dict.fromkeys(self.agents, is_late)
        rewards = {agent: 1.0 if terminated[agent] else -0.1 for agent in self.agents}
        infos = {agent: {"place": self._places[agent]} for agent in self.agents}
        self.agents = [
            agent for agent in self.agents if not (terminated[agent] or truncated[agent])
        ]
        return observations, rewards, terminated, truncated, infos

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _look(self) -> Any:
        return {
            agent: np.full(self.observation_space(agent).shape, self._places[agent], np.float32)
            for agent in self.agents
        }


class Impostor(gymnasium.Env[Any, Any]):
    """Says that it has several agents, and has not."""

    metadata = {capabilities.MULTI_AGENT: {"agents": ["a", "b"]}}  # noqa: RUF012
    observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def step(self, action: Any) -> Any:
        raise NotImplementedError  # it is refused before
