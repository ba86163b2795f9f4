"""Queue of the chunks of episodes that simulators have sent, for the next samples."""

import time
from dataclasses import dataclass, field

from rlmesh_ray.dialects.rllink.wire import messages as m


@dataclass(slots=True, eq=False, weakref_slot=True)
class EpisodeProgress:
    """An episode that goes on in a simulator."""

    num_steps: int = 0
    """All that have arrived, of whichever weights."""
    return_: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    last_obs: m.Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedChunk:
    """A chunk, and where it belongs."""

    chunk: m.Chunk
    progress: EpisodeProgress
    first_step: int
    """Of the episode: how many have arrived before."""
    seq_no: int
    """Of the weights that have acted."""


class ChunkQueue:
    """Chunks in the order in which they have come; one thread at a time."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_bytes = 0
        self._received: list[ReceivedChunk] = []

    @property
    def num_ends(self) -> int:
        """How many of the chunks end their episode."""
        return sum(each.chunk.is_done for each in self._received)

    def put(self, received: ReceivedChunk) -> None:
        """Add a chunk."""
        self._received.append(received)
        self.num_steps += len(received.chunk)
        self.num_bytes += _num_bytes(received.chunk)

    def take(self, num_steps: int | None = None) -> list[ReceivedChunk]:
        """Take so many steps out, or as many as there are; None: all. A chunk may be cut in two."""
        taken, kept = self._received, list[ReceivedChunk]()
        if num_steps is not None:
            taken, kept = _parted(taken, num_steps)
        self._received, self.num_steps, self.num_bytes = [], 0, 0
        for each in kept:
            self.put(each)
        return taken


def _num_bytes(chunk: m.Chunk) -> int:
    arrays = (chunk.obs, chunk.actions, chunk.rewards, *chunk.model_outputs.values())
    return sum(array.nbytes for array in arrays)


def _parted(
    received: list[ReceivedChunk], num_steps: int
) -> tuple[list[ReceivedChunk], list[ReceivedChunk]]:
    """Return the first ``num_steps``, and the rest."""
    for number, each in enumerate(received):
        if len(each.chunk) > num_steps:
            if num_steps:
                begin, end = _cut(each, num_steps)
                return [*received[:number], begin], [end, *received[number + 1 :]]
            return received[:number], received[number:]
        num_steps -= len(each.chunk)
    return received, []


def _cut(received: ReceivedChunk, at: int) -> tuple[ReceivedChunk, ReceivedChunk]:
    chunk = received.chunk
    begin = m.Chunk(
        chunk.obs[: at + 1],
        chunk.actions[:at],
        chunk.rewards[:at],
        False,
        False,
        chunk.episode_id,
        {name: values[:at] for name, values in chunk.model_outputs.items()},
    )
    end = m.Chunk(
        chunk.obs[at:],
        chunk.actions[at:],
        chunk.rewards[at:],
        chunk.is_terminated,
        chunk.is_truncated,
        chunk.episode_id,
        {name: values[at:] for name, values in chunk.model_outputs.items()},
    )
    return (
        ReceivedChunk(begin, received.progress, received.first_step, received.seq_no),
        ReceivedChunk(end, received.progress, received.first_step + at, received.seq_no),
    )
