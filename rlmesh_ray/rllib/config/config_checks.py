"""Checks of a config on the driver, and the runner class and spaces that follow from endpoints.

Settings with which runners would drop data or fail are refused; a sentence warns of settings that
work, but probably not as intended.
"""

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.spaces.space_utils import (
    get_base_struct_from_space,
    get_dummy_batch_for_space,
)
from ray.rllib.utils.torch_utils import convert_to_torch_tensor
from ray.tune.search.sample import Domain

from rlmesh_ray.compat.rllib import MODULE_SETTINGS, connector_of, module_spec_of
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.options import require_seconds
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, RolloutPlan
from rlmesh_ray.rllib.config.session_endpoints import max_sessions_per_endpoint
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner, RLMeshMultiAgentEnvRunner
from rlmesh_ray.rllib.runner.runner_env import SpacesOnlyMultiAgentEnv
from rlmesh_ray.server.env.env_options import DEFAULT_MAX_SESSIONS
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

_GYMNASIUM_ID = re.compile(r"[\w./-]+-v\d+")
_WITHOUT_ID = "UnknownEnv-v1"
"""The id of an environment without an id, from servers of the released rlmesh."""

_OF_FRAGMENTS = (
    "rollout_fragment_length",
    "train_batch_size",
    "_train_batch_size_per_learner",
    "num_learners",
    "n_step",
    "training_intensity",
)
_STANDARD_RUNNERS = (
    SingleAgentEnvRunner,
    MultiAgentEnvRunner,
    RLMeshEnvRunner,
    RLMeshMultiAgentEnvRunner,
)


def is_tune_param(config: AlgorithmConfig, *names: str) -> bool:
    """Return whether Tune has yet to choose a setting, which cannot be checked on the driver."""
    return any(_is_search(getattr(config, name, None)) for name in names)


def _is_search(value: object) -> bool:
    if isinstance(value, Domain):
        return True
    if isinstance(value, Mapping):
        return "grid_search" in value or any(map(_is_search, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_search, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(map(_is_search, vars(value).values()))
    return False


def require_config(config: object, env: object = None) -> None:
    """Check that ``configure`` was given an AlgorithmConfig.

    Args:
        config: Its first argument.
        env: Its second argument, which may be the config.

    Raises:
        ConfigurationError: It is none, one of RLlib's old API stack, or not one for torch.
    """
    if not isinstance(config, AlgorithmConfig):
        if isinstance(env, AlgorithmConfig):
            raise ConfigurationError("the arguments are swapped: write configure(config, env)")
        if isinstance(config, type) and issubclass(config, AlgorithmConfig):
            name = config.__name__
            raise ConfigurationError(f"{name} is a class, not a config; give {name}()")
        raise ConfigurationError(
            f"{config!r:.80} is not an AlgorithmConfig of RLlib; give one, such as PPOConfig()"
        )
    if not config.enable_env_runner_and_connector_v2:
        raise ConfigurationError(
            "this config uses RLlib's old API stack; leave api_stack() at its defaults"
        )
    if config.framework_str != "torch":
        raise ConfigurationError(
            f"framework({config.framework_str!r}): RLlib's new API stack trains with torch only; "
            "leave framework() out"
        )


def is_evaluated(config: AlgorithmConfig) -> bool:
    return bool(config.evaluation_interval) or config.evaluation_num_env_runners > 0


def sample_limits(
    config: AlgorithmConfig, reset_timeout_s: float = 0.0
) -> Iterator[tuple[str, float]]:
    """Yield the settings that limit how long RLlib waits for a runner's sample, and their seconds.

    It waits without end for local runners, and for those of IMPALA and APPO. A limit that has
    RLlib's default is raised to twice ``reset_timeout_s``: a runner whose lanes reset for longer
    than the limit would never deliver a sample, since RLlib drops it and asks for another one.
    """
    defaults = type(config)()
    settings = []
    if config.num_env_runners and not isinstance(config, IMPALAConfig):
        settings.append("sample_timeout_s")
    if config.evaluation_num_env_runners:
        settings.append("evaluation_sample_timeout_s")
    for setting in settings:
        limit_s = getattr(config, setting)
        if limit_s is not None:
            is_default = limit_s == getattr(defaults, setting)
            yield setting, float(max(limit_s, 2 * reset_timeout_s) if is_default else limit_s)


def require_deadlines(
    config: AlgorithmConfig, step_timeout_s: float, reset_timeout_s: float
) -> None:
    """Check that a runner gives up an endpoint that hangs before RLlib drops its sample.

    Raises:
        ConfigurationError: RLlib would drop the sample, and ask a runner that is stuck for another
            one.
    """
    require_seconds("step_timeout_s", step_timeout_s)
    require_seconds("reset_timeout_s", reset_timeout_s)
    for setting, limit_s in sample_limits(config, reset_timeout_s):
        if step_timeout_s >= limit_s:
            raise ConfigurationError(
                f"step_timeout_s={step_timeout_s:g} is not below {setting}={limit_s:g}, after "
                "which RLlib drops what a runner samples; lower step_timeout_s, or first set "
                f"{setting} to a multiple of it; docs/how_to/slow_simulators.md has all limits"
            )


def allow_resets(config: AlgorithmConfig, reset_timeout_s: float) -> None:
    for setting, limit_s in sample_limits(config, reset_timeout_s):
        setattr(config, setting, limit_s)


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """The parts of a config that follow from the environment of its endpoints."""

    runner_class: type[Any]
    observation_space: gymnasium.Space[Any]
    """Observation space of one lane; with several agents, a Dict by agent."""
    action_space: gymnasium.Space[Any]
    """Action space of one lane; with several agents, a Dict by agent."""
    is_multi_agent: bool = False


def choose_runner(config: AlgorithmConfig, contract: EnvContract) -> RunnerChoice:
    """Choose the runner class for the environment that the endpoints serve.

    Raises:
        ConfigurationError: The config names another EnvRunner, which is not made for endpoints, or
            it has policies for several agents where the environment has one.
        ContractMismatchError: The contract of several agents contradicts itself.
    """
    is_multi_agent = capabilities.MULTI_AGENT in contract.metadata
    if config.is_multi_agent and not is_multi_agent:
        raise ConfigurationError(
            f"multi_agent(policies=...) is set, but {contract.id} has one agent; leave it out"
        )
    ours = RLMeshMultiAgentEnvRunner if is_multi_agent else RLMeshEnvRunner
    wanted: type[Any] = config.env_runner_cls or ours
    if wanted in _STANDARD_RUNNERS:
        wanted = ours
    if not issubclass(wanted, ours):
        raise ConfigurationError(
            f"env_runner_cls={wanted.__name__} does not sample from endpoints; derive it from "
            f"rlmesh_ray.rllib.{ours.__name__}, or leave it out"
        )
    if is_multi_agent:
        lane = SpacesOnlyMultiAgentEnv(contract)
        observations: gymnasium.Space[Any] = gymnasium.spaces.Dict(lane.observation_spaces)
        actions = gymnasium.spaces.Dict(lane.action_spaces)
        return RunnerChoice(wanted, observations, actions, is_multi_agent=True)
    return RunnerChoice(
        wanted, to_gymnasium(contract.observation_space), to_gymnasium(contract.action_space)
    )


def require_spaces(config: AlgorithmConfig, choice: RunnerChoice) -> None:
    """Compare the spaces in the config with those of the endpoints.

    Raises:
        ContractMismatchError: They differ.
    """
    for name in ("observation_space", "action_space"):
        given, served = getattr(config, name), getattr(choice, name)
        if given is not None and given != served:
            raise ContractMismatchError(
                f"environment({name}={given}) is not what the endpoints serve: {served}; leave it "
                "out, configure takes it from the endpoints"
            )


def require_evaluation_at_endpoints(config: AlgorithmConfig) -> None:
    """Check that evaluation runners sample from the endpoints, too.

    Raises:
        ConfigurationError: ``evaluation_config`` names an environment or EnvRunner, or is a whole
            config, which does so.
    """
    for name in ("env", "env_runner_cls", "observation_space", "action_space"):
        if name in (config.evaluation_config or {}):
            raise ConfigurationError(
                f"evaluation_config sets {name}={config.evaluation_config[name]}, but evaluation "
                "runners sample from the endpoints; put only what differs there, as in "
                "evaluation_config=PPOConfig.overrides(explore=False)"
            )


def require_recordable(config: AlgorithmConfig, *, is_multi_agent: bool = False) -> None:
    """Check that runners can record as ``config.offline_data(output=...)`` asks for.

    Raises:
        ConfigurationError: They cannot.
    """
    if not config.output or is_tune_param(config, "output"):
        return
    if is_multi_agent:
        raise ConfigurationError(
            "offline_data(output=...) records episodes of one agent, as in RLlib, and this "
            "environment has several; leave output out"
        )
    if not isinstance(config.output, (str, Path)) or str(config.output) == "logdir":
        raise ConfigurationError(
            f"offline_data(output={config.output!r}) is of RLlib's old API stack; give a "
            "directory or URI where runners write files"
        )
    if config.output_write_episodes and importlib.util.find_spec("msgpack_numpy") is None:
        raise ConfigurationError(
            "offline_data(output=...) records whole episodes, for which RLlib needs the package "
            "msgpack-numpy; install it, or set output_write_episodes=False"
        )
    write = getattr(ray.data.Dataset, str(config.output_write_method), None)
    parameters = inspect.signature(write).parameters if callable(write) else {}
    if not {"path", "filesystem"} <= set(parameters):
        raise ConfigurationError(
            f"offline_data(output_write_method={config.output_write_method!r}) does not write "
            "files: it must be a method of ray.data.Dataset that takes a path and a filesystem, "
            "such as 'write_parquet'"
        )


# --- warnings -----------------------------------------------------------------------------


def config_warnings(
    config: AlgorithmConfig, plan: RolloutPlan, *, max_sessions: int = DEFAULT_MAX_SESSIONS
) -> Iterator[str]:
    """Yield a sentence for each setting of ``config`` that probably does not do what was intended.

    Args:
        config: A config for endpoints.
        plan: The plan for the same endpoints.
        max_sessions: The limit of sessions of an endpoint.
    """
    yield from _about_seeds(config, plan)
    yield from _about_fragments(config)
    yield from _about_sessions(config, plan, max_sessions)
    yield from _about_what_does_nothing(config)


def environment_warnings(config: AlgorithmConfig, contract: EnvContract) -> Iterator[str]:
    """Yield a sentence if the config names another environment than the endpoints serve.

    Only ids of Gymnasium are compared: environments registered with Ray, and classes, may have any
    name.

    Args:
        config: A config that is not yet configured for endpoints.
        contract: The contract of the endpoints.
    """
    named, served = (env_id.rpartition(":")[2] for env_id in (str(config.env or ""), contract.id))
    if served in (named, _WITHOUT_ID):
        return
    if _GYMNASIUM_ID.fullmatch(named) and _GYMNASIUM_ID.fullmatch(served):
        yield (
            f"environment({config.env!r}) is not what the endpoints serve, which is {contract.id}: "
            "training uses the latter; leave environment() out, or serve the former"
        )


def _about_seeds(config: AlgorithmConfig, plan: RolloutPlan) -> Iterator[str]:
    num_sessions = plan.training.sessions_per_runner
    goes_together = plan.lockstep or capabilities.MULTI_AGENT in plan.contract.metadata
    if config.seed is not None and num_sessions > 1 and not goes_together:
        yield (
            f"debugging(seed={config.seed}) does not make training repeatable while each of a "
            f"runner's {num_sessions} sessions goes at its own pace; pass lockstep=True to "
            "configure for that, or leave the seed out"
        )
    if config.seed is not None and config.batch_mode == "complete_episodes":
        yield (
            f"debugging(seed={config.seed}) with batch_mode='complete_episodes' begins every "
            "sample() with the same seeds, so that training repeats the same episodes; leave the "
            "seed out, or use batch_mode='truncate_episodes'"
        )
    if not is_evaluated(config) or config.custom_evaluation_function:
        return
    evaluation = config.get_evaluation_config_object()
    is_by_episode = (
        config.evaluation_duration_unit == "episodes" and config.evaluation_duration != "auto"
    )
    if evaluation.seed is not None and is_by_episode:
        yield (
            f"debugging(seed={evaluation.seed}) with evaluation_duration_unit='episodes' begins "
            "every evaluation with the same seeds, so that each one replays the same episodes; "
            "for new ones set evaluation(evaluation_config={'seed': None}) or "
            "evaluation_duration_unit='timesteps'"
        )


def _about_fragments(config: AlgorithmConfig) -> Iterator[str]:
    if is_tune_param(config, *_OF_FRAGMENTS):
        return
    if config.batch_mode != "truncate_episodes" or config.get_rollout_fragment_length() != 1:
        return
    num_lanes = config.num_envs_per_env_runner * max(config.num_env_runners, 1)
    if isinstance(config, DQNConfig | SACConfig):
        remedy = "set it to 8, for instance"
        if not config.training_intensity:
            # RLlib counts one runner more than there are.
            share = config.num_envs_per_env_runner * (config.num_env_runners + 1)
            intensity = config.total_train_batch_size / share
            remedy += f", with training_intensity={intensity:g} to learn as much a step as now"
    elif config.rollout_fragment_length == "auto":
        remedy = (
            f"{num_lanes} lanes share a train batch of {config.total_train_batch_size} steps; "
            "raise train_batch_size_per_learner, or use fewer lanes"
        )
    else:
        remedy = "raise it"
    yield (
        f"rollout_fragment_length={config.rollout_fragment_length!r} makes each sample() 1 step a "
        f"lane, so that the call costs more than the step: {remedy}"
    )


def _about_sessions(config: AlgorithmConfig, plan: RolloutPlan, max_sessions: int) -> Iterator[str]:
    for setting, limit_s in sample_limits(config):
        if plan.step_timeout_s > limit_s / 2:
            yield (
                f"step_timeout_s={plan.step_timeout_s:g} leaves a runner whose endpoint hangs less "
                f"than half of {setting}={limit_s:g} for a new session, and RLlib drops later "
                f"samples; set {setting} to twice step_timeout_s or more"
            )
    most = max_sessions_per_endpoint(plan.training, plan.evaluation)
    if most > max_sessions:
        yield (
            f"the runners open up to {most} sessions with one endpoint, "
            f"which allows {max_sessions} unless it was started with a larger max_sessions; start "
            "more endpoints, or wider ones (num_envs)"
        )


def _about_what_does_nothing(config: AlgorithmConfig) -> Iterator[str]:
    own = config.get_evaluation_config_object().env_config if is_evaluated(config) else {}
    keys = sorted({*config.env_config, *own} - {PLAN_KEY})
    if keys:
        yield (
            f"env_config ({', '.join(keys)}) does not reach environments behind endpoints; give "
            "it to them: EnvFleet(env_kwargs=...), EnvServer(env_kwargs=...) or a factory"
        )
    if gymnasium.VectorizeMode(config.gym_env_vectorize_mode) is not gymnasium.VectorizeMode.SYNC:
        yield (
            f"gym_env_vectorize_mode={config.gym_env_vectorize_mode} does nothing: an endpoint "
            "steps the lanes of a session one after the other, and sessions side by side; for "
            "more at a time set num_envs_per_env_runner to a multiple of num_envs"
        )


# --- RLlib's default modules -----------------------------------------------------------------

Space = gymnasium.Space[Any]
Spaces = tuple[Space, Space]
"""Of observations and of actions."""
Misfit = tuple[Exception | str, str]
"""RLlib's error, or the reason as a text, and what to do about it."""

_FROM_ZERO = "wrap the environment so that its Discrete spaces begin at 0"
_OWN_ACTIONS = "env_runners(module_to_env_connector=...)"
_OWN_MODULE = "rl_module(rl_module_spec=...)"
_OWN_OBSERVATIONS = "env_runners(env_to_module_connector=...)"
_AS_FLOATS = (
    f"before configure, set {_OWN_OBSERVATIONS} to RLlib's FlattenObservations, which makes floats "
    f"of integers, or to a connector of your own, or set {_OWN_MODULE}"
)
_FLOATS_OF_PIXELS = (
    f"before configure, set {_OWN_OBSERVATIONS} to a connector that makes floats of the pixels, so "
    f"that they still travel as bytes, or set {_OWN_MODULE}; docs/how_to/train_from_images.md has "
    "both"
)
_FILTERS = (
    "before configure, set rl_module(model_config=DefaultModelConfig(conv_filters=...)), as "
    f"docs/how_to/train_from_images.md does, or {_OWN_OBSERVATIONS} to RLlib's "
    "FlattenObservations, which needs no CNN"
)


def require_module(config: AlgorithmConfig, contract: EnvContract, choice: RunnerChoice) -> None:
    """Make RLlib's default modules for these spaces, as its runners will, to check that it works.

    Custom modules and connectors are not checked: their requirements are unknown. Neither are
    settings of the module that Tune has yet to choose.

    Raises:
        ConfigurationError: RLlib has no default module for these spaces, or one that would act
            outside the action space.
    """
    if choice.is_multi_agent and not config.is_multi_agent:
        return  # RLlib raises a clear error
    if not _uses_default_module(config) or connector_of(config, "module_to_env") is not None:
        return
    for owner, spaces, (reason, remedy) in _misfits(config, choice):
        observation, action = map(_short, spaces)
        cause = reason if isinstance(reason, Exception) else None
        if cause is not None:  # its first line
            reason = str(cause).splitlines()[0].rstrip(".") if str(cause) else type(cause).__name__
        raise ConfigurationError(
            f"RLlib's default module for {config.algo_class.__name__} does not fit "
            f"{contract.id}{owner and f' ({owner})'}, with observations {observation} and actions "
            f"{action}: {reason}; {remedy}"
        ) from cause


def _short(space: Space) -> str:
    text = str(space)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _uses_default_module(config: AlgorithmConfig) -> bool:
    name = "get_default_rl_module_spec"
    owner = next(kind for kind in type(config).__mro__ if name in vars(kind))
    if owner is AlgorithmConfig or not owner.__module__.startswith("ray.rllib."):
        return False
    if is_tune_param(config, *MODULE_SETTINGS):
        return False
    spec = module_spec_of(config)
    return spec is None or (
        isinstance(spec, RLModuleSpec)
        and spec.module_class is None
        and spec.catalog_class is None
        and spec.observation_space is None
        and spec.action_space is None
    )


def _misfits(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[tuple[str, Spaces, Misfit]]:
    """Yield the agent or policy that has the spaces (empty: there is one agent), and the spaces."""
    whole = choice.observation_space, choice.action_space
    by_agent: dict[str, Any] = {"": whole}
    if choice.is_multi_agent:
        observations, actions = map(get_base_struct_from_space, whole)
        by_agent = {f"agent {agent!r}": (observations[agent], actions[agent]) for agent in actions}
    for owner, spaces in by_agent.items():
        for misfit in _misfits_of_actions(config, spaces[1]):
            yield owner, spaces, misfit
    if connector_of(config, "env_to_module") is not None:
        return
    try:
        by_module = _by_module(config, choice)
        specs = config.get_multi_rl_module_spec(spaces=by_module, inference_only=True)
    except Exception as error:  # noqa: BLE001  # RLlib would raise the same error later
        yield "", whole, (error, "see to it in multi_agent(policies=..., policy_mapping_fn=...)")
        return
    for module_id, spec in specs.rl_module_specs.items():
        owner = f"policy {module_id!r}" if choice.is_multi_agent else ""
        for misfit in _misfits_of_module(spec):
            yield owner, (spec.observation_space, spec.action_space), misfit


def _misfits_of_actions(config: AlgorithmConfig, actions: Space) -> Iterator[Misfit]:
    if isinstance(config, DQNConfig) and not isinstance(actions, gymnasium.spaces.Discrete):
        remedy = f"wrap the environment, or, before configure, set {_OWN_MODULE}"
        yield "it takes Discrete actions only", remedy
    for leaf in _leaves(actions):
        if isinstance(leaf, gymnasium.spaces.Discrete) and leaf.start:
            first, count = int(leaf.start), int(leaf.n)
            reason = (
                f"it numbers actions from 0, not from {first}, and would send 0 to "
                f"{count - 1} where the environment takes {first} to {first + count - 1}"
            )
            remedy = f"{_FROM_ZERO}, or, before configure, set {_OWN_ACTIONS} or {_OWN_MODULE}"
            yield reason, remedy
        if isinstance(leaf, gymnasium.spaces.Text):
            yield "RLlib has no actions of Text", "wrap the environment so that it takes numbers"


def _misfits_of_module(spec: RLModuleSpec) -> Iterator[Misfit]:
    observation: Space = spec.observation_space
    is_image = isinstance(observation, gymnasium.spaces.Box) and len(observation.shape) == 3
    remedy = _FILTERS if is_image else _remedy(observation)
    try:
        # This check must not change the random numbers of the user's program.
        with torch.random.fork_rng(devices=[]):
            module: RLModule = spec.build()
        is_pixels = is_image and observation.dtype == np.uint8
        remedy = _FLOATS_OF_PIXELS if is_pixels else _AS_FLOATS
        if not module.is_stateful():
            zeros = get_dummy_batch_for_space(observation, fill_value=0, batch_size=1)
            with torch.inference_mode():
                module.forward_inference(convert_to_torch_tensor({Columns.OBS: zeros}))
    except Exception as error:  # noqa: BLE001  # RLlib would raise the same error later
        yield error, remedy


def _remedy(observation: Space) -> str:
    parts = _leaves(observation)
    if any(isinstance(part, gymnasium.spaces.Text) for part in parts):
        return (
            "RLlib has no encoder for Text: wrap the environment so that it gives numbers, or, "
            f"before configure, set {_OWN_OBSERVATIONS} to a connector that makes numbers of it"
        )
    if any(isinstance(part, gymnasium.spaces.Discrete) and part.start for part in parts):
        return (
            f"{_FROM_ZERO}, as RLlib's FlattenObservations takes them, or, before configure, set "
            f"{_OWN_OBSERVATIONS} to a connector that takes the start away"
        )
    return (
        f"wrap the environment, or, before configure, set {_OWN_MODULE} or {_OWN_OBSERVATIONS}, "
        "such as RLlib's FlattenObservations"
    )


def _by_module(config: AlgorithmConfig, choice: RunnerChoice) -> dict[str, Spaces]:
    """Return the spaces of each module, without custom connectors."""
    spaces = choice.observation_space, choice.action_space
    if not choice.is_multi_agent:
        return {DEFAULT_MODULE_ID: spaces}
    pipeline = config.build_env_to_module_connector(spaces={INPUT_ENV_SINGLE_SPACES: spaces})
    actions = pipeline.action_space
    return {
        module_id: (observation, actions[module_id])
        for module_id, observation in pipeline.observation_space.items()
    }


def _leaves(space: Space) -> list[Space]:
    found: list[Space] = tree.flatten(get_base_struct_from_space(space))
    return found
