"""Algorithm configs by name, and setting their hyperparameters by name, with checks."""

import dataclasses
import difflib
import inspect
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.from_config import NotProvided

from rlmesh_ray.compat.rllib import model_config_of
from rlmesh_ray.errors import ConfigurationError

METHODS = ("training", "rl_module", "env_runners", "learners", "reporting")
"""Methods of AlgorithmConfig whose arguments can be set; of equal names the first counts."""
_MODEL_CONFIG = "model_config"
_INSTEAD = {
    "num_env_runners": "--num-env-runners",
    "model": "model_config, which RLlib's new API stack reads",
    "train_batch_size": "train_batch_size_per_learner, which RLlib's new API stack reads",
}
_ELSEWHERE = (
    "names are those of the arguments of AlgorithmConfig.training(), such as lr, gamma and "
    "train_batch_size_per_learner, and of model_config, such as model_config.fcnet_hiddens"
)
_COUNTS = frozenset(
    (
        "capacity",
        "fcnet_hiddens",
        "head_fcnet_hiddens",
        "lstm_cell_size",
        "max_seq_len",
        "metrics_num_episodes_for_smoothing",
        "minibatch_size",
        "n_step",
        "num_atoms",
        "num_epochs",
        "train_batch_size_per_learner",
    )
)
"""Counts for which RLlib accepts 0 and less, and fails later or learns nothing."""
_RATES = frozenset(("lr", "actor_lr", "alpha_lr", "critic_lr"))
_UNLIMITED = frozenset(("log_std_clip_param",))
"""Limits that RLlib documents to be infinite where there is none."""
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


_CONFIGS: dict[str, type[AlgorithmConfig]] = {
    "APPO": APPOConfig,
    "DQN": DQNConfig,
    "IMPALA": IMPALAConfig,
    "PPO": PPOConfig,
    "SAC": SACConfig,
}
_STEPS_A_CALL = 8
_LANES = 8


def algorithm_config(name: str) -> AlgorithmConfig:
    """Return a config of an algorithm: RLlib's default, with this package's preset if it has one.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if name.upper() not in _CONFIGS:
        raise ConfigurationError(
            f"algorithm {name!r} is not one of {', '.join(sorted(_CONFIGS))}; other RLlib "
            "algorithms work through rlmesh_ray.rllib.configure in a script of your own"
        )
    config = _CONFIGS[name.upper()]()
    if isinstance(config, PPOConfig):
        # For small control tasks on few cores: the local runner samples (the endpoints do the
        # stepping), the short horizon suits such tasks, which it learns fast, and the falling
        # learning rate keeps the policy stable later.
        config.training(
            gamma=0.99,
            lambda_=0.9,
            lr=[[0, 1e-3], [150_000, 1e-4]],
            clip_param=0.2,
            use_kl_loss=False,
            vf_loss_coeff=0.5,
            vf_clip_param=10_000.0,
            grad_clip=0.5,
            train_batch_size_per_learner=2048,
            minibatch_size=256,
            num_epochs=10,
        )
        config.env_runners(num_env_runners=0)
        config.learners(num_learners=0)
    elif isinstance(config, DQNConfig | SACConfig):
        # Several steps in each call of ``sample``, which costs more than a step. RLlib's defaults
        # make one vector step and one update in each call, that is, the fewer updates for each
        # step, the more lanes there are. Here, for any number of lanes, the ratio of updates to
        # steps is that of RLlib's defaults with 8 lanes.
        config.env_runners(rollout_fragment_length=_STEPS_A_CALL)
        config.training(training_intensity=config.train_batch_size_per_learner / _LANES)
    return config


def set_hyperparameters(config: AlgorithmConfig, settings: Mapping[str, object]) -> None:
    """Set arguments of AlgorithmConfig's methods by their names.

    Args:
        config: The config to change.
        settings: Numbers, texts, lists and dicts by name. A name is that of an argument (``"lr"``),
            may be prefixed by its method (``"training.lr"``), and may be a path into a dict
            (``"model_config.fcnet_hiddens"``). The value of a method's name is a dict of its
            arguments.

    Raises:
        ConfigurationError: There is no such argument, or it has another type, or RLlib refuses the
            value, alone or with the others, or it is a count below 1, a learning rate below 0 or
            not finite, which RLlib accepts.
    """
    flat = list(_flat(settings))
    for name, value in flat:
        _require_sense(name, value)
        _set(config, name, value)
    if flat:
        _require_valid(config, dict(flat))


def _require_valid(config: AlgorithmConfig, settings: Mapping[str, object]) -> None:
    """Have RLlib validate all settings together, as it does when the algorithm is built.

    Raises:
        ConfigurationError: It refuses them.
    """
    try:
        config.copy(copy_frozen=False).validate()
    except (AssertionError, TypeError, ValueError) as error:
        # Without RLlib's advice, which is how to skip the validation.
        text = " ".join(str(error).partition("To suppress all validation errors")[0].split())
        named = [name for name in settings if f"`{name.rpartition('.')[2]}`" in text]
        refused = ", ".join(f"{name}={settings[name]!r:.80}" for name in named or settings)
        raise ConfigurationError(f"RLlib refuses {refused}: {text}") from error


def _require_sense(name: str, value: object) -> None:
    """Refuse values that JSON cannot hold, and numbers with which RLlib fails later.

    A training keeps its settings as JSON.

    Raises:
        ConfigurationError: The value, or a part of it, is such a value.
    """
    for path, part, whole in _parts(name, value):
        last = path.rpartition(".")[2]
        if not isinstance(part, (str, int, float, type(None))):
            raise ConfigurationError(
                f"{path}={part!r:.80} is a {type(part).__name__}; give a number, a text, a list, a "
                "dict or null (in quotes a date is a text)"
            )
        if not isinstance(part, (int, float)):
            continue
        if not (math.isfinite(part) or (last in _UNLIMITED and part == math.inf)):
            raise ConfigurationError(f"{path}={part!r} is not finite; give a finite number")
        if last in _COUNTS and part < 1:
            raise ConfigurationError(f"{path}={whole!r:.80} must be 1 or more")
        # A schedule is a list of pairs: a time step, and the rate from there on.
        if last in _RATES and part < 0:
            raise ConfigurationError(f"{path}={whole!r:.80} is no learning rate; give 0 or more")


def _parts(name: str, value: object, whole: object = None) -> Iterator[tuple[str, object, object]]:
    """Yield the path of each part of a value, the part, and the list that it belongs to."""
    whole = value if whole is None else whole
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigurationError(f"{name}: the key {key!r:.40} is no text; quote it")
            yield from _parts(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _parts(name, inner, whole)
    else:
        yield name, value, whole


def _flat(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if name in METHODS and isinstance(value, Mapping):
            yield from ((f"{name}.{argument}", inner) for argument, inner in value.items())
        else:
            yield name, value


def _set(config: AlgorithmConfig, name: str, value: object) -> None:
    first, *path = name.split(".")
    methods: tuple[str, ...] = METHODS
    if first in METHODS and path:
        methods, (first, *path) = (first,), path
    method = next((each for each in methods if first in _arguments(config, each)), None)
    if method is None:
        names = [each for one in methods for each in _arguments(config, one)]
        known = [each for each in names if each not in _INSTEAD and not each.startswith("_")]
        raise _unknown(name, first, known)
    if first in _INSTEAD:
        raise ConfigurationError(f"{name} is not set here; use {_INSTEAD[first]}")
    if first == _MODEL_CONFIG:
        value = _model_config(config, name, path, value)
    else:
        present = getattr(config, first, None)
        if path and not isinstance(present, Mapping):
            raise ConfigurationError(f"{name}: {name.rpartition('.')[0]} is no dict")
        value = _nested(present, path, value)
        value = _typed(name, value, _arguments(config, method)[first], present)
    try:
        getattr(config, method)(**{first: value})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"RLlib refuses {name}={value!r:.80}: {error}") from error


def _arguments(config: AlgorithmConfig, method: str) -> dict[str, Any]:
    """Return the arguments of a method, including those that it passes to its base class."""
    found: dict[str, Any] = {}
    for owner in type(config).__mro__:
        function = vars(owner).get(method)
        if function is None:
            continue
        for name, parameter in inspect.signature(function).parameters.items():
            # Deprecated arguments have another default.
            if parameter.default is NotProvided:
                hint = parameter.annotation
                is_known = hint is not parameter.empty and not isinstance(hint, str)
                found.setdefault(name, hint if is_known else None)
    return found


def _unknown(name: str, wanted: str, known: list[str]) -> ConfigurationError:
    near = difflib.get_close_matches(wanted, known, n=3)
    meant = f"did you mean {' or '.join(near)}?" if near else _ELSEWHERE
    return ConfigurationError(f"there is no hyperparameter {name}; {meant}")


def _nested(whole: object, path: list[str], value: object) -> object:
    """Return a copy of a dict, with ``value`` at the entry that ``path`` names."""
    if not path:
        return value
    first, *rest = path
    entries = whole if isinstance(whole, Mapping) else {}
    return {**entries, first: _nested(entries.get(first), rest, value)}


def _model_config(
    config: AlgorithmConfig, name: str, path: list[str], value: object
) -> DefaultModelConfig:
    given = {".".join(path): value} if path else value
    if not isinstance(given, Mapping):
        raise _mistyped(name, value, "a dict")
    hints = typing.get_type_hints(DefaultModelConfig)
    for key, entry in given.items():
        if key not in hints:
            raise _unknown(f"{_MODEL_CONFIG}.{key}", str(key), list(hints))
        _typed(f"{_MODEL_CONFIG}.{key}", entry, hints[key], None)
    former = model_config_of(config)
    is_default = isinstance(former, DefaultModelConfig)
    kept = dataclasses.asdict(former) if is_default else dict(former or {})
    return DefaultModelConfig(**{**kept, **given})


def _typed(name: str, value: object, hint: Any, present: object) -> object:
    """Return the value in the type of the argument.

    Raises:
        ConfigurationError: It has another type.
    """
    if hint is None:  # RLlib declares no type: take that of the present value, unless it is None
        hint = Any if present is None else type(present)
    try:
        # As JSON, which has no tuples: a list is one where RLlib wants one.
        return TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value))
    except (PydanticUserError, ValidationError) as error:
        # The former for classes that RLlib names for type checkers alone; null leaves them out.
        if value is None and isinstance(error, PydanticUserError):
            return None
        raise _mistyped(name, value, _hint_text(hint)) from error


def _hint_text(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_hint_text(each) for each in get_args(hint) if each is not type(None))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _mistyped(name: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}={value!r:.80} is a {type(value).__name__}; give {wanted.replace('typing.', '')}"
    )
