"""Explores every order of the events of a modelled system.

A world lists what can happen next (``moves``) and can be copied (``fork``). ``explore`` tries all
of it, everywhere; ``wander`` follows one random path, for worlds that are too large for that.
"""

import random
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

from rlmesh_ray.errors import RlmeshError

ObjectT = TypeVar("ObjectT")


class ViolatedError(AssertionError):
    """A promise that was broken, with the moves that led there."""


class Move(NamedTuple):
    """What can happen next."""

    description: str
    part: str
    """Attribute of the world whose method does it; empty: the world itself."""
    method: str
    arguments: tuple[object, ...] = ()


class World(Protocol):
    """What is explored."""

    @property
    def key(self) -> Hashable:
        """Equal for worlds that have the same future."""

    @property
    def is_over(self) -> bool:
        """Whether it may stop here."""

    def moves(self) -> Iterable[Move]:
        """Return what can happen now."""

    def fork(self) -> Self:
        """Return a copy that goes its own way."""

    def discard(self) -> None:
        """Let go of its parts, which know it: else they would wait for the garbage collector."""


@dataclass
class Explored:
    """What an exploration has seen."""

    num_states: int = 0
    num_moves: int = 0
    longest_path: int = 0

    def __str__(self) -> str:
        return (
            f"{self.num_states:,} states, {self.num_moves:,} moves, the longest of the shortest "
            f"ways has {self.longest_path}"
        )


def shallow_copy(original: ObjectT) -> ObjectT:
    """Return what ``copy.copy`` returns, in a tenth of the time."""
    other = object.__new__(type(original))
    vars(other).update(vars(original))
    return other


_Way = tuple[str, "_Way"] | None


def explore(world: World, most_states: int = 1_000_000) -> Explored:
    """Try every order of all moves.

    Raises:
        ViolatedError: A promise is broken; the message has the shortest way there.
    """
    seen = {hash(world.key)}  # 64 bits: what they miss is nothing to worry about
    waiting: deque[tuple[World, int, _Way]] = deque([(world, 0, None)])
    explored = Explored()
    while waiting:
        here, depth, way = waiting.popleft()
        explored.num_states += 1
        explored.longest_path = max(explored.longest_path, depth)
        assert explored.num_states < most_states, "the bound is too small for this world"
        moves = list(here.moves())
        if not moves and not here.is_over:
            raise ViolatedError(f"no move is left, and a client waits:\n{_steps(way)}")
        for move in moves:
            explored.num_moves += 1
            other = here.fork()
            path = (move.description, way)
            _make(other, move, path)
            key = hash(other.key)
            if key in seen:
                other.discard()
            else:
                seen.add(key)
                waiting.append((other, depth + 1, path))
        here.discard()
    return explored


def wander(world: World, draw: random.Random, most_moves: int = 3_000) -> int:
    """Follow one random path to its end; return how many moves it had.

    Raises:
        ViolatedError: A promise is broken.
    """
    way: _Way = None
    for count in range(most_moves):
        moves = list(world.moves())
        if not moves:
            if world.is_over:
                return count
            raise ViolatedError(f"no move is left, and a client waits:\n{_steps(way)}")
        move = draw.choice(moves)
        way = (move.description, way)
        _make(world, move, way)
    raise ViolatedError(f"the sessions do not come to an end:\n{_steps(way)}")


def _make(world: World, move: Move, way: _Way) -> None:
    actor = getattr(world, move.part) if move.part else world
    try:
        getattr(actor, move.method)(*move.arguments)
    except (AssertionError, RlmeshError) as error:
        raise ViolatedError(f"{error}:\n{_steps(way)}") from error


def _steps(way: _Way) -> str:
    names = []
    while way is not None:
        name, way = way
        names.append(name)
    return "\n".join(reversed(names))
