"""EnvSource: an environment argument (id, factory or instance), serialized for a worker process."""

import importlib
import inspect
import pickle
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

import cloudpickle
import gymnasium
from gymnasium import error as gymnasium_error
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import VectorEnv

from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv, TruncateOnBadValue
from rlmesh_ray.envs.multi_agent import MultiAgentEnv, MultiAgentLane, is_multi_agent
from rlmesh_ray.envs.vector_adapter import autoreset_mode, id_of
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.options import as_int
from rlmesh_ray.protocol.address import looks_like_host
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.validation import ValidationMode


def explain_start_error(error: BaseException) -> str:
    """Return cause and remedy of an error while an environment was created, as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigurationError):
        return text
    if isinstance(error, (gymnasium_error.UnregisteredEnv, gymnasium_error.DeprecatedEnv)):
        return (
            f"{text} (write Name-v0 or namespace/Name-v0 for an id, module:Env-v0 for one that a "
            "package registers, or module:factory for your own code)"
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{text} (check its spelling; start in the module's folder, or put its folder on "
            f"PYTHONPATH, or install it for {sys.executable})"
        )
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return cause + _raised_at(error)


def _raised_at(error: BaseException) -> str:
    """Return where the user's own code raised an error, or called what raised it; else nothing."""
    installed = {Path(path) for path in sysconfig.get_paths().values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and _PACKAGE not in path.parents and not installed & set(path.parents):
            return f", in {frame.name} ({path}:{frame.lineno})"
    return ""


_PACKAGE = Path(__file__).parents[1]
AnyEnv = gymnasium.Env[Any, Any]
AnyVectorEnv = VectorEnv[Any, Any, Any]
EnvInstance = AnyEnv | AnyVectorEnv | MultiAgentEnv
"""An environment, with one lane or several, with one agent or several."""
EnvLike = str | Callable[..., EnvInstance] | EnvInstance
"""A Gymnasium id or ``module:factory``, a factory, or an instance."""


_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
OWN_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""Pattern of ``module:factory``; a Gymnasium id without version may look the same."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class EnvSource:
    payload: bytes
    """The pickled environment as it was given, and its keyword arguments."""
    num_envs: int
    """Number of lanes; 1 also for a factory that returns a VectorEnv of any width."""
    max_sessions: int | None
    """Most workers that may run it at once; None: any number."""
    description: str
    """Name for messages."""
    autoresets: bool = True
    """Whether several lanes of single environments have autoreset."""
    truncates_on_bad_value: bool = False
    """See ``TruncateOnBadValue``."""
    reset_threads: int = 1
    """How many lanes are reset at the same time."""
    observer: bytes | None = None
    """A pickled callable that makes a ``StepObserver`` of the contract."""

    @property
    def can_recreate(self) -> bool:
        """Whether the environment can be created again; an instance cannot."""
        return self.max_sessions is None


def make_source(
    env: EnvLike,
    num_envs: int = 1,
    env_kwargs: Mapping[str, object] | None = None,
    *,
    autoresets: bool = True,
) -> EnvSource:
    """Serialize an environment for a worker process; see ``EnvServer`` for the arguments.

    Raises ConfigurationError where they do not fit each other, or ``env`` cannot be pickled.
    """
    num_envs = as_int("num_envs", num_envs)
    if num_envs < 1:
        raise ConfigurationError(f"num_envs is {num_envs}; an environment has at least one lane")
    kwargs = _keywords(env_kwargs)
    if _is_instance(env):
        return _instance_source(env, num_envs, kwargs, autoresets)
    if isinstance(env, str):
        require_env_name(env)
    elif not callable(env):
        raise ConfigurationError(
            f"cannot host {env!r}; give a Gymnasium id, a factory, a gymnasium.Env, a "
            "gymnasium.vector.VectorEnv, an RLlib MultiAgentEnv or a PettingZoo ParallelEnv"
        )
    name = env if isinstance(env, str) else str(getattr(env, "__qualname__", None) or repr(env))
    return EnvSource(_pickle(env, kwargs, name), num_envs, None, name, autoresets)


def _keywords(env_kwargs: object) -> dict[str, Any]:
    if env_kwargs is None:
        return {}
    if not isinstance(env_kwargs, Mapping) or not all(isinstance(key, str) for key in env_kwargs):
        raise ConfigurationError(
            f"env_kwargs={env_kwargs!r:.80} must be a mapping from names to values, or None"
        )
    return dict(env_kwargs)


def require_env_name(name: str) -> None:
    """Require the form of an environment's name; whether it exists is found out later.

    Raises:
        AddressError: It is a host without a port, and no registered id.
        ConfigurationError: It is neither a Gymnasium id nor ``module:factory``.
    """
    if looks_like_host(name) and all(name != spec.name for spec in gymnasium.registry.values()):
        raise AddressError(
            f"{name!r} is an address without a port, and no registered environment; for a running "
            f"endpoint write HOST:PORT (such as {name}:50051), for own code module:factory"
        )
    module, colon, rest = name.partition(":")
    is_named = bool(rest) and ":" not in rest and not module.endswith(".py")
    if not name or (colon and not (is_named and _MODULE.fullmatch(module))):
        raise ConfigurationError(
            f"{name!r} names no environment; write module:factory, without folder and without .py, "
            "or a Gymnasium id, such as CartPole-v1 or module:Env-v0"
        )


def build(source: EnvSource, validation: ValidationMode = ValidationMode.WARN) -> AnyVectorEnv:
    """Create the environment of a source, in the worker.

    ``validation`` says at which values episodes are truncated. Raises ConfigurationError where the
    result is not an environment, or contradicts the options of the source.
    """
    env, kwargs = pickle.loads(source.payload)
    first = _made(env, kwargs)
    if isinstance(first, VectorEnv):
        _check_vector(first, source.num_envs)
        _check_mode(first, source.autoresets)
        if source.truncates_on_bad_value:
            raise ConfigurationError(
                f'on_bad_value="truncate" ends single lanes, and {first} resets its lanes itself; '
                "give a factory of single environments and num_envs"
            )
        if source.reset_threads > 1:
            raise ConfigurationError(
                f"reset_threads is for single environments, and {first} resets its lanes itself; "
                "leave it out, or give a factory of single environments and num_envs"
            )
        return first
    _check_single(first)
    envs = _lanes([first, *(_made(env, kwargs) for _ in range(source.num_envs - 1))])
    if source.truncates_on_bad_value and len(set(map(id, envs))) == len(envs):
        envs = [TruncateOnBadValue(env, validation, lane) for lane, env in enumerate(envs)]
    return LaneVectorEnv(envs, autoresets=source.autoresets, reset_threads=source.reset_threads)


def _made(env: Any, kwargs: dict[str, Any]) -> object:
    if _is_instance(env):
        return env
    return _from_id(env, kwargs) if isinstance(env, str) else _from_factory(env, kwargs)


def _is_instance(env: object) -> TypeGuard[EnvInstance]:
    return isinstance(env, (gymnasium.Env, VectorEnv)) or is_multi_agent(env)


def _check_vector(vector: AnyVectorEnv, num_envs: int) -> None:
    if num_envs not in (1, vector.num_envs):
        raise ConfigurationError(
            f"the factory's VectorEnv has {vector.num_envs} lanes, num_envs is {num_envs}; "
            "leave num_envs out"
        )
    if getattr(vector, "is_async", False):
        raise ConfigurationError(
            f"{vector} returns the results of some of its lanes at a time, as EnvPool does where "
            "batch_size is less than num_envs; leave batch_size out"
        )


def _check_single(env: object) -> None:
    if not isinstance(env, gymnasium.Env) and not is_multi_agent(env):
        raise ConfigurationError(
            f"the factory returned {env!r}; it must return a gymnasium.Env, a "
            "gymnasium.vector.VectorEnv, an RLlib MultiAgentEnv or a PettingZoo ParallelEnv (gym "
            "and other interfaces need a wrapper)"
        )
    if isinstance(env, gymnasium.Env) and not is_multi_agent(env):
        _check_interface(env)
    if hasattr(env, "all_env_ids"):
        raise ConfigurationError(
            f"{env} is an EnvPool whose environments are not yet gymnasium.vector.VectorEnvs; "
            "upgrade EnvPool: those of its version 1.2.5 are"
        )


def _check_interface(env: AnyEnv) -> None:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            has = "has no" if space is None else f"has {space!r:.60} as"
            raise ConfigurationError(f"{env} {has} {name}; set it to a gymnasium.Space")
    inner = env
    # Gymnasium's own wrappers pass both arguments on; a user's may adapt an old environment.
    while isinstance(inner, gymnasium.Wrapper) and _is_of_gymnasium(inner.reset):
        inner = inner.env
    if getattr(inner.step, "__func__", None) is gymnasium.Env.step:
        raise ConfigurationError(f"{inner} has no step(action); a gymnasium.Env defines it")
    try:
        inspect.signature(inner.reset).bind(seed=None, options=None)
    except TypeError:
        raise ConfigurationError(
            f"reset of {inner} does not take seed and options: define reset(self, *, seed=None, "
            "options=None), which returns an observation and an info dict (an environment for gym "
            "or an old Gymnasium needs a wrapper)"
        ) from None
    except ValueError:  # a function of C without a signature: its first call shows it
        pass


def _is_of_gymnasium(method: Callable[..., Any]) -> bool:
    return str(getattr(method, "__module__", "")).startswith("gymnasium.")


def _check_mode(vector: AnyVectorEnv, autoresets: bool) -> None:
    if not autoresets and autoreset_mode(vector) is not AutoresetMode.DISABLED:
        raise ConfigurationError(
            f"{vector} resets its lanes itself, and autoreset was to be disabled; make it with "
            "AutoresetMode.DISABLED, or give a factory of single environments and num_envs"
        )


def _lanes(envs: list[Any]) -> list[AnyEnv]:
    # By id, so that an environment that was returned twice stays one object.
    by_id = {id(env): MultiAgentLane(env) if is_multi_agent(env) else env for env in envs}
    return [by_id[id(env)] for env in envs]


def _from_id(env_id: str, kwargs: dict[str, Any]) -> object:
    module_name, _, name = env_id.rpartition(":")
    factory = _factory_named(module_name, name) if module_name else None
    if factory is not None:
        return _from_factory(factory, kwargs)
    try:
        return gymnasium.make(env_id, **kwargs)
    except (gymnasium_error.UnregisteredEnv, gymnasium_error.DeprecatedEnv) as error:
        if not OWN_CODE.fullmatch(env_id):
            raise ConfigurationError(explain_start_error(error)) from error
        raise ConfigurationError(
            f"module {module_name} has no function or class {name}, and registers no "
            "environment of that id"
        ) from error
    except TypeError as error:
        creator = getattr(gymnasium.registry.get(name), "entry_point", None)
        if isinstance(creator, str):
            creator = load_env_creator(creator)
        _refuse_unknown_keyword(error, kwargs, creator)
        raise


def _factory_named(module_name: str, attributes: str) -> Callable[..., object] | None:
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that it imports is missing
        raise ConfigurationError(explain_start_error(error)) from error
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    return found if callable(found) else None


def _from_factory(factory: Callable[..., object], kwargs: dict[str, Any]) -> object:
    try:
        return factory(**kwargs)
    except TypeError as error:
        _refuse_unknown_keyword(error, kwargs, factory)
        raise


def _refuse_unknown_keyword(error: TypeError, kwargs: Mapping[str, object], factory: Any) -> None:
    """Raise ConfigurationError if an argument that ``factory`` does not have caused ``error``."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return
    taken = [each.name for each in parameters if each.kind in _BY_NAME]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in kwargs:
        if not takes_any and name not in taken and f"argument {name!r}" in str(error):
            near = [f"; did you mean {each}?" for each in get_close_matches(name, taken, 1)]
            raise ConfigurationError(
                f"env_kwargs has {name!r}, and the environment takes "
                f"{', '.join(taken) or 'none'}{''.join(near)}"
            ) from error


def _instance_source(
    env: EnvInstance, num_envs: int, kwargs: dict[str, object], autoresets: bool
) -> EnvSource:
    width = 1
    if isinstance(env, VectorEnv):
        _check_mode(env, autoresets)
        width = env.num_envs
    if num_envs not in (1, width):
        raise ConfigurationError(
            f"{env} has {width} lane(s), num_envs is {num_envs}; leave num_envs out, or give a "
            "factory or id instead of an instance"
        )
    if kwargs:
        raise ConfigurationError(
            f"{env} exists already, so env_kwargs {sorted(kwargs)} come too late; give a factory "
            "or id instead of an instance"
        )
    name = id_of(env) or str(env)
    return EnvSource(_pickle(env, {}, name), width, 1, name, autoresets)


def _pickle(env: EnvLike, kwargs: dict[str, Any], name: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps((env, kwargs)))
    except Exception as error:
        # Any exception: pickling runs code of the objects inside.
        raise ConfigurationError(
            f"{name} cannot be sent to its worker process ({type(error).__name__}: {error}); "
            "give a factory that creates it there"
        ) from error
