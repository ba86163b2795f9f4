"""MultiAgentLane: RLlib's MultiAgentEnv and PettingZoo's ParallelEnv as a single environment.

Both are recognized by their attributes, so that neither library is needed. ``spaces.multi_agent``
has the lane's spaces.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeGuard

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, UnsupportedSpaceError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces import multi_agent
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.multi_agent import ALL_AGENTS, AgentId
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec

ByAgent = Mapping[AgentId, Any]
"""Values by agent id; agents without a value are missing."""
ByKey = Mapping[str, Any]
"""Values by the agents' keys (``spaces.multi_agent.agent_keys``)."""


class MultiAgentEnv(Protocol):
    """The common interface of both kinds of environment.

    RLlib's also has ``get_observation_space(agent)`` and ``get_action_space(agent)``, or dicts
    ``observation_spaces`` and ``action_spaces``, and reports the end of the whole episode under
    ``"__all__"``. PettingZoo's also has ``observation_space(agent)``, ``action_space(agent)``, and
    ``agents``, the agents that still take part. ``possible_agents`` are the ids of all agents that
    may appear; without it they are taken from the spaces by agent, or ``get_agent_ids()``.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Start an episode; return observations and infos by agent."""

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, Any]:
        """Return observations, rewards, terminations, truncations and infos by agent."""


class MultiAgentLane(gymnasium.Env[dict[str, Any], ByKey]):
    """Wraps an environment with several agents as a single-agent environment.

    The reward is the sum of the agents' rewards; the episode ends with that of the whole
    environment. An agent acts if it had an observation in the last step and has not ended; the
    actions of other agents are ignored. Spaces, values and infos use the agents' keys instead of
    their ids.

    Raises:
        ConfigurationError: ``env`` does not list its agents, has agent ids of other types than
            ``spaces.multi_agent.AgentId``, or is a turn-based (AEC) environment of PettingZoo.
        UnsupportedSpaceError: A contract cannot express an agent's space.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._keys = multi_agent.agent_keys(_agent_ids(env))
        self._is_pettingzoo = callable(getattr(_inner(env), "observation_space", None))
        observations = _specs(env, self._keys, "observation")
        self._fillers = {key: multi_agent.filler(spec) for key, spec in observations.items}
        self._acting: list[AgentId] = []
        self._rewards = np.zeros(len(self._keys))
        self.observation_space = to_gymnasium(multi_agent.lane_observation_space(observations))
        self.action_space = to_gymnasium(_specs(env, self._keys, "action"))
        own_metadata = getattr(env, "metadata", None) or {}
        agents = multi_agent.describe_agents(self._keys)
        self.metadata = {**own_metadata, capabilities.MULTI_AGENT: agents}
        self.spec = getattr(env, "spec", None)
        self.render_mode = getattr(env, "render_mode", None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observations, infos = self._env.reset(seed=seed, options=options)
        self._require_known(observations)
        return self._observed(observations, {}, {}, {}), self._by_key(infos or {})

    def step(self, action: ByKey) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self._env.step(
            {agent: action[self._keys[agent]] for agent in self._acting}
        )
        for by_agent in (observations, rewards, terminated, truncated):
            self._require_known(by_agent)
        is_terminated, is_truncated = self._ending(terminated, truncated)
        observed = self._observed(observations, rewards, terminated, truncated)
        with np.errstate(invalid="ignore"):  # infinities of both signs
            reward = float(self._rewards.sum())
        return observed, reward, is_terminated, is_truncated, self._by_key(infos or {})

    @property
    def agents_without_reward(self) -> str:
        """The agents whose last reward is not finite, as in ``agent 'a'``; empty without any."""
        pairs = zip(self._keys, np.isfinite(self._rewards), strict=True)
        agents = [repr(agent) for agent, is_finite in pairs if not is_finite]
        return f"agent{'s' * (len(agents) > 1)} {', '.join(agents)}" if agents else ""

    def get_wrapper_attr(self, name: str) -> Any:
        if isinstance(self._env, gymnasium.Env):
            return self._env.get_wrapper_attr(name)
        return getattr(self._env, name)

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()

    def _observed(
        self, observations: ByAgent, rewards: ByAgent, terminated: ByAgent, truncated: ByAgent
    ) -> dict[str, Any]:
        self._rewards = np.array([_reward(rewards, agent) for agent in self._keys])
        self._acting = [
            agent for agent in observations if not (terminated.get(agent) or truncated.get(agent))
        ]
        return {
            multi_agent.OBSERVATIONS: {**self._fillers, **self._by_key(observations)},
            multi_agent.PRESENT: self._flags(dict.fromkeys(observations, True)),
            # NaN in an observation would end the session; the lane's reward shows it anyway.
            multi_agent.REWARDS: np.nan_to_num(self._rewards, posinf=np.inf, neginf=-np.inf),
            multi_agent.TERMINATED: self._flags(terminated),
            multi_agent.TRUNCATED: self._flags(truncated),
        }

    def _by_key(self, by_agent: ByAgent) -> dict[Any, Any]:
        """Return the values by key; infos under other keys than agent ids stay unchanged."""
        return {self._keys.get(agent, agent): value for agent, value in by_agent.items()}

    def _flags(self, by_agent: ByAgent) -> NDArray[np.int8]:
        return np.array([bool(by_agent.get(agent)) for agent in self._keys], np.int8)

    def _ending(self, terminated: ByAgent, truncated: ByAgent) -> tuple[bool, bool]:
        if ALL_AGENTS in terminated:
            return bool(terminated[ALL_AGENTS]), bool(truncated.get(ALL_AGENTS))
        if not self._is_pettingzoo:
            raise ConfigurationError(
                f"the terminateds that {self._env} returned, {dict(terminated)}, have no "
                f"{ALL_AGENTS!r}, the flag for the end of the whole environment's episode; add it"
            )
        if not all(terminated.get(key) or truncated.get(key) for key in self._env.agents):
            return False, False
        # With some agents terminated and others truncated, RLlib calls the episode terminated.
        is_truncated = bool(truncated) and all(truncated.values())
        return not is_truncated or all(terminated.values()), is_truncated

    def _require_known(self, by_agent: object) -> None:
        if not isinstance(by_agent, Mapping):
            raise ConfigurationError(
                f"{self._env} returned {type(by_agent).__name__} where a dict by agent is needed"
            )
        unknown = by_agent.keys() - self._keys.keys() - {ALL_AGENTS}
        if unknown:
            raise ConfigurationError(
                f"{self._env} returned values of the agents {sorted(map(repr, unknown))}, "
                f"which are none of {list(self._keys)}; list all that may appear in possible_agents"
            )


def _reward(rewards: ByAgent, agent: AgentId) -> float:
    reward = rewards.get(agent, 0.0)
    if reward is None:
        raise TypeError(f"step() returned None as the reward of agent {agent!r}; return a number")
    return float(reward)


def is_multi_agent(env: object) -> TypeGuard[MultiAgentEnv]:
    inner = _inner(env)
    return not isinstance(env, type) and (
        hasattr(inner, "possible_agents")
        or hasattr(inner, "agent_iter")
        or callable(getattr(inner, "observation_space", None))
        or _has_spaces_by_agent_only(inner)
    )


def _has_spaces_by_agent_only(env: Any) -> bool:
    return not isinstance(getattr(env, "observation_space", None), gymnasium.Space) and (
        callable(getattr(env, "get_observation_space", None))
        or isinstance(getattr(env, "observation_spaces", None), Mapping)
    )


def _inner(env: object) -> Any:
    # Gymnasium's wrappers do not forward attributes; PettingZoo's do.
    return env.unwrapped if isinstance(env, gymnasium.Env) else env


def _agent_ids(env: object) -> tuple[AgentId, ...]:
    if hasattr(env, "agent_iter"):
        raise ConfigurationError(
            f"{env} is a PettingZoo AEC environment, which is turn-based; give a parallel one "
            "(its module's parallel_env(), or pettingzoo.utils.aec_to_parallel where turns do not "
            "matter), or wrap it in ray.rllib.env.wrappers.pettingzoo_env.PettingZooEnv"
        )
    agent_ids = _listed_agents(_inner(env))
    if not agent_ids:
        raise ConfigurationError(
            f"{env} does not list its agents: it has no possible_agents, and no observation_spaces "
            "and action_spaces by agent; set possible_agents to a list of all agents that may "
            "appear"
        )
    for agent_id in agent_ids:
        if not multi_agent.is_agent_id(agent_id):
            raise ConfigurationError(
                f"{env} has an agent {agent_id!r}; agent ids are "
                f"{multi_agent.AGENT_ID_KINDS}, and {ALL_AGENTS!r} stands for all agents"
            )
    if len(set(agent_ids)) < len(agent_ids):
        raise ConfigurationError(f"{env} lists an agent twice: {agent_ids}")
    return agent_ids


def _listed_agents(env: Any) -> tuple[AgentId, ...]:
    if listed := getattr(env, "possible_agents", None):
        return _in_order(listed)
    names = ("observation_spaces", "action_spaces"), ("observation_space", "action_space")
    for observation, action in names:
        first, second = getattr(env, observation, None), getattr(env, action, None)
        # If only one of them is a mapping, it is the Dict space of a single agent.
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            return tuple(dict.fromkeys((*first, *second)))
    get_agent_ids = getattr(env, "get_agent_ids", None)
    return _in_order(get_agent_ids() if callable(get_agent_ids) else ())


def _in_order(agent_ids: Iterable[AgentId]) -> tuple[AgentId, ...]:
    if not isinstance(agent_ids, (set, frozenset)):
        return tuple(agent_ids)
    try:
        return tuple(sorted(agent_ids))
    except TypeError:  # strings beside integers
        return tuple(sorted(agent_ids, key=repr))


def _specs(env: object, keys: Mapping[AgentId, str], kind: str) -> DictSpec:
    return DictSpec(tuple((key, _spec(env, agent_id, kind)) for agent_id, key in keys.items()))


def _spec(env: object, agent_id: AgentId, kind: str) -> SpaceSpec:
    space = _space(_inner(env), agent_id, kind)
    if not isinstance(space, gymnasium.Space):
        raise ConfigurationError(
            f"{env} has no {kind} space for agent {agent_id!r} (it gives {space!r}); set "
            f"{kind}_spaces to a dict with a space for each of its possible_agents"
        )
    try:
        return from_gymnasium(space)
    except UnsupportedSpaceError as error:
        raise UnsupportedSpaceError(
            f"agent {agent_id!r}, {kind}: {error}; give it another space, such as a Box or a Dict"
        ) from error


def _space(env: Any, agent_id: AgentId, kind: str) -> object:
    for name in (f"get_{kind}_space", f"{kind}_space"):
        method = getattr(env, name, None)
        if callable(method):
            try:
                return method(agent_id)
            except (KeyError, AttributeError):  # raised by the default implementations
                return None
    spaces = getattr(env, f"{kind}_spaces", None)
    return spaces.get(agent_id) if isinstance(spaces, Mapping) else None
