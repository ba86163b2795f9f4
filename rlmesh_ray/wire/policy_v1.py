"""Facts about a served policy, as JSON in a capability of the ModelService's handshake."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

_MOST_LINES = 64
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Description of a policy for display; unknown facts are empty."""

    kind: str = ""
    """Such as ``"RLlib checkpoint"``, ``"TorchScript"`` or ``"function"``."""
    algorithm: str = ""
    """Algorithm of an RLlib checkpoint, such as ``"PPO"``."""
    version: int = 0
    """Version of the present weights; 0 for those that the policy was loaded with."""
    observation_space: tuple[str, ...] = ()
    """The only space that the policy acts on, with one line for each leaf."""
    action_space: tuple[str, ...] = ()
    """The space of its actions, with one line for each leaf."""
    observation_map: tuple[str, ...] = ()
    """Its ``ObservationMap``, with one line for each key; empty: none."""
    horizon: int = 1
    """How many actions it chooses at once."""
    chunk_replay: str = ""
    """What clients that take one action get of a chunk; see ``ModelServer``. Empty: the horizon is
    1."""
    image_sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Height and width of the images in its observation space, by the leaf's name."""


def pack(facts: PolicyFacts) -> str:
    shortened = {
        name: _shortened(value) if isinstance(value, tuple) else value
        for name, value in asdict(facts).items()
    }
    return json.dumps(shortened)


def parse(text: str) -> PolicyFacts:
    """Return the facts in a server's capability; invalid ones are left out."""
    try:
        return facts_in(json.loads(text))
    except (ValueError, RecursionError):
        return PolicyFacts()


def facts_in(facts: object) -> PolicyFacts:
    """Return the facts in what a server has sent, by their names; invalid ones are left out."""
    if not isinstance(facts, dict):
        return PolicyFacts()
    version, horizon = facts.get("version"), facts.get("horizon")
    return PolicyFacts(
        kind=_text(facts.get("kind")),
        algorithm=_text(facts.get("algorithm")),
        version=version if type(version) is int else 0,
        observation_space=_lines(facts.get("observation_space")),
        action_space=_lines(facts.get("action_space")),
        observation_map=_lines(facts.get("observation_map")),
        horizon=horizon if type(horizon) is int else 1,
        chunk_replay=_text(facts.get("chunk_replay")),
        image_sizes=_sizes(facts.get("image_sizes")),
    )


def _shortened(lines: Sequence[str]) -> tuple[str, ...]:
    first = tuple(line[:_MOST_CHARACTERS] for line in lines[:_MOST_LINES])
    rest = len(lines) - len(first)
    return (*first, f"and {rest} more") if rest else first


def _text(value: object) -> str:
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else ""


def _lines(value: object) -> tuple[str, ...]:
    return tuple(map(_text, value[: _MOST_LINES + 1])) if isinstance(value, list) else ()


def _sizes(value: object) -> dict[str, tuple[int, int]]:
    entries = list(value.items())[:_MOST_LINES] if isinstance(value, dict) else []
    return {
        _text(name): (size[0], size[1])
        for name, size in entries
        if isinstance(size, list) and [*map(type, size)] == [int, int]
    }
