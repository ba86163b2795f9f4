"""Replacing the weights of an RLlib policy: those of its module, and the states of its connectors.

The form is that of an EnvRunner's state (RLlib 2.60, ``SingleAgentEnvRunner.get_state``).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.torch.weights import Pairs, check_weights, replace, weights_of

_MODULE = "rl_module"
_MODULE_ID = "default_policy"
_ENV_STEPS = "num_env_steps_sampled_lifetime"


@dataclass(slots=True)
class RllibWeights:
    """The replaceable parts of an RLlib policy."""

    module: Any
    """The RLModule."""
    pipelines: Mapping[str, Any]
    """Connector pipelines, by their names in an EnvRunner's state."""
    env_steps: int
    """Environment steps of the training."""
    trial: Callable[[], object]
    """Acts once, so that connectors whose state does not fit raise before a client's request."""

    def get(self) -> dict[str, Any]:
        """Return a copy of all parts, in the form that ``set`` takes."""
        states = {name: self._state(pipeline) for name, pipeline in self.pipelines.items()}
        return {
            _MODULE: {_MODULE_ID: weights_of(self.module)},
            **states,
            _ENV_STEPS: self.env_steps,
        }

    def set(self, weights: object) -> None:
        """Replace the parts that ``weights`` has; other parts stay unchanged.

        Args:
            weights: ``rl_module`` (the module's state, or a dict with it as ``default_policy``;
                tensors for learning only may be missing), the pipelines' states and
                ``num_env_steps_sampled_lifetime``; other keys are ignored.

        Raises:
            PolicyError: It has none of these, or a part that does not fit; nothing has changed.
        """
        known = {_MODULE, *self.pipelines, _ENV_STEPS}
        if not isinstance(weights, Mapping) or not known & weights.keys():
            raise PolicyError(
                "weights of an RLlib policy are the state of an EnvRunner: a mapping with "
                f"{_MODULE} and the connectors' states"
            )
        env_steps = weights.get(_ENV_STEPS, self.env_steps)
        if not isinstance(env_steps, int | np.integer):
            raise PolicyError(f"{_ENV_STEPS} is a {type(env_steps).__name__}; it must be a count")
        pairs = self._module_pairs(weights[_MODULE]) if _MODULE in weights else []
        self._set_pipelines({n: weights[n] for n in self.pipelines.keys() & weights.keys()})
        replace(pairs)
        self.env_steps = int(env_steps)

    def try_out(self) -> None:
        """Act once; connectors keep their states.

        Raises:
            RlmeshError: It failed.
        """
        self._set_pipelines({name: self._state(each) for name, each in self.pipelines.items()})

    def _module_pairs(self, state: object) -> Pairs:
        if isinstance(state, Mapping) and _MODULE_ID in state:
            state = state[_MODULE_ID]
        own = self.module.state_dict().keys()
        for_learning = _for_learning(self.module)
        if isinstance(state, Mapping):
            # A module that was built for inference alone does not have the other tensors.
            state = {k: v for k, v in state.items() if k in own or not for_learning(str(k))}
        return check_weights(self.module, state, optional=[k for k in own if for_learning(k)])

    def _set_pipelines(self, states: Mapping[str, Any]) -> None:
        before = {name: self._state(self.pipelines[name]) for name in states}
        try:
            for name, state in states.items():
                _require_pieces(name, state, self.pipelines[name])
                self.pipelines[name].set_state(copy.deepcopy(state))
            if states:
                self.trial()
            for name, state in states.items():
                # Undo the changes that the trial has made.
                self.pipelines[name].set_state(copy.deepcopy(state))
        except Exception as error:
            # Custom connectors may raise any error.
            for name, state in before.items():
                self.pipelines[name].set_state(state)
            if isinstance(error, RlmeshError):
                raise
            raise PolicyError(
                f"the connectors cannot act with their new state ({type(error).__name__}: "
                f"{error}); nothing has changed"
            ) from error

    @staticmethod
    def _state(pipeline: Any) -> Any:
        return copy.deepcopy(pipeline.get_state())


def _for_learning(module: Any) -> Callable[[str], bool]:
    """Return a function: whether a name in a state is of a part that inference does not need."""
    attributes: list[str] = getattr(module, "get_non_inference_attributes", list)()
    prefixes = tuple(f"{attribute}." for attribute in attributes)
    return lambda name: name in attributes or name.startswith(prefixes)


def _require_pieces(name: str, state: Any, pipeline: Any) -> None:
    """Refuse states of connectors that the pipeline lacks; RLlib would ignore them silently."""
    pieces = [type(piece).__name__ for piece in pipeline.connectors]
    unknown = sorted(map(str, set(state) - set(pieces))) if isinstance(state, Mapping) else [name]
    if unknown:
        raise PolicyError(
            f"{name} has state of {', '.join(unknown)}, but the policy's pieces are "
            f"{', '.join(pieces)}; nothing has changed"
        )
