"""Facts about a policy: JSON, as the value of a capability in a ModelService's handshake."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_MOST_LINES = 64
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a policy is, for people; empty where it is not known."""

    kind: str = ""
    """Such as ``"RLlib checkpoint"``, ``"TorchScript"`` or ``"function"``."""
    algorithm: str = ""
    """Of an RLlib checkpoint, such as ``"PPO"``."""
    version: int = 0
    """Of the weights that act now; 0 for those that the policy came with."""
    observation_space: tuple[str, ...] = ()
    """One line a leaf, of the only space that it acts on."""
    action_space: tuple[str, ...] = ()
    """Likewise, of its actions."""


def pack(facts: PolicyFacts) -> str:
    """Return the value of the capability."""
    shortened = {
        name: _shortened(value) if isinstance(value, tuple) else value
        for name, value in asdict(facts).items()
    }
    return json.dumps(shortened)


def parse(text: str) -> PolicyFacts:
    """Return what a server tells; what makes no sense is left out."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return PolicyFacts()
    if not isinstance(told, dict):
        return PolicyFacts()
    version = told.get("version")
    return PolicyFacts(
        kind=_text(told.get("kind")),
        algorithm=_text(told.get("algorithm")),
        version=version if type(version) is int else 0,
        observation_space=_lines(told.get("observation_space")),
        action_space=_lines(told.get("action_space")),
    )


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    first = tuple(line[:_MOST_CHARACTERS] for line in lines[:_MOST_LINES])
    rest = len(lines) - len(first)
    return (*first, f"and {rest} more") if rest else first


def _text(value: object) -> str:
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else ""


def _lines(value: object) -> tuple[str, ...]:
    return tuple(map(_text, value[: _MOST_LINES + 1])) if isinstance(value, list) else ()
