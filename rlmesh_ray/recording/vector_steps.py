"""The steps of a session as blocks of whole arrays, and the episodes of its lanes in such blocks.

Without I/O. Collecting a step costs a copy of its arrays, whatever they hold; ``segments``, which
takes the lanes apart, runs in the writer's process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.envs.worker_channel import decode, encode
from rlmesh_ray.recording.store import RecordingInfo
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.vector_infos import lane_info

IGNORED, STEP, FIRST = range(3)
"""What a row of a block is for a lane: nothing, a step, or the reset of a new episode."""

_BLOCK_BYTES, _MOST_ROWS = 2**21, 512
_MOST_INFO_BYTES = 2**18

Frames = Sequence[NDArray[np.uint8]]
"""One frame of ``render`` for each lane, ``(height, width, 3)``; empty: there are none. All rows of
a block have frames of one shape, or none has."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A session or an env runner whose steps follow."""

    info: RecordingInfo
    endpoint: str
    video: str
    """See ``RecordOptions``."""


@dataclass(slots=True)
class StepBlock:
    """T rows of N lanes: one row for each vector step, and for each reset."""

    kinds: NDArray[np.uint8]
    """``(T, N)``"""
    columns: list[Any]
    """For each leaf of a row ``(T, N, *shape)``, or for Text a list of T tuples of N strings."""
    frames: NDArray[np.uint8] | None
    """``(T, N, height, width, 3)``"""
    follows_gap: bool
    """Whether rows before this block are missing."""
    infos: dict[int, bytes] = field(default_factory=dict)
    """Encoded infos of the vector, by row."""
    seeds: dict[tuple[int, int], int] = field(default_factory=dict)
    """By row and lane."""
    policy_version: int | None = None

    @property
    def num_bytes(self) -> int:
        arrays = [*self.columns, self.frames]
        sizes = [array.nbytes for array in arrays if isinstance(array, np.ndarray)]
        texts = [row for column in self.columns if isinstance(column, list) for row in column]
        return sum(sizes) + sum(map(len, self.infos.values())) + sum(map(len, chain(*texts)))


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one episode."""

    episode: int | str
    """Its lane; or its id, where lanes are not known."""
    columns: list[Any]
    """One for each leaf of a row."""
    infos: Sequence[Mapping[str, object]]
    begins: bool
    """Whether the first row is the reset; action, reward and flags say nothing there."""
    ends: bool
    seed: int | None = None
    frames: NDArray[np.uint8] | None = None
    """``(rows, height, width, 3)``"""
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An episode of whose segments no further one comes."""

    episode: str


Message = Stream | StepBlock | Segment | Abandoned
"""What the writer gets of a stream, in this order."""


class StepCollector:
    """Collects the rows of one session.

    Args:
        info: Of the recording.
        num_lanes: Width of the session.
        autoresets: Whether a lane resets on the step after its end (autoreset mode NEXT_STEP).
    """

    def __init__(self, info: RecordingInfo, num_lanes: int, *, autoresets: bool) -> None:
        self._leaves = leaves(info.row_space)
        self._num_lanes = num_lanes
        self._autoresets = autoresets
        self._next = np.full(num_lanes, IGNORED, np.uint8)
        """What the next row is for each lane: STEP while an episode runs, FIRST where it resets."""
        self._block: StepBlock | None = None
        self._num_rows = self._num_taken = self._info_bytes = 0
        self._follows_gap = False
        self.num_ended = 0
        """Episodes that have ended in the present block."""

    @property
    def is_full(self) -> bool:
        return self._block is not None and (
            self._num_rows == len(self._block.kinds) or self._info_bytes > _BLOCK_BYTES
        )

    def add_reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int | None],
        observations: Sequence[Column],
        infos: Mapping[str, object],
        frames: Frames = (),
    ) -> None:
        """Add the reset of some lanes, whose running episodes are forgotten.

        Args:
            lanes: The lanes.
            seeds: Empty, or one for each of ``lanes``.
            observations: One column for each leaf, over all lanes.
            infos: Infos of the vector.
            frames: Frames of all lanes.
        """
        kinds = np.full(self._num_lanes, IGNORED, np.uint8)
        kinds[list(lanes)] = FIRST
        self._next[list(lanes)] = STEP
        block, row = self._add(kinds, observations, infos, frames)
        for lane, seed in zip(lanes, seeds, strict=False):
            if seed is not None:
                block.seeds[row, lane] = int(seed)

    def add_step(
        self,
        columns: Sequence[Column],
        infos: Mapping[str, object],
        frames: Frames = (),
        lanes: Sequence[int] = (),
    ) -> None:
        """Add a step.

        Args:
            columns: One for each leaf of a row, over all lanes.
            infos: Infos of the vector.
            frames: Frames of all lanes.
            lanes: The stepped lanes; empty: all.
        """
        kinds = self._next
        ended: Any = columns[-2] | columns[-1]  # type: ignore[operator]  # no text
        if lanes:
            stepped = np.zeros(self._num_lanes, np.bool_)
            stepped[list(lanes)] = True
            kinds = np.where(stepped, kinds, np.uint8(IGNORED))
            ended &= stepped
        self._add(kinds, columns, infos, frames)
        self._next[kinds == FIRST] = STEP
        self.num_ended += int(np.count_nonzero(self._next[ended]))
        self._next[ended] = FIRST if self._autoresets else IGNORED

    def take(self) -> StepBlock | None:
        block, self._block = self._block, None
        self._num_taken, self.num_ended = self.num_ended, 0
        self._follows_gap = False
        if block is not None:
            block.kinds = block.kinds[: self._num_rows]
            block.columns = [column[: self._num_rows] for column in block.columns]
            block.frames = None if block.frames is None else block.frames[: self._num_rows]
        return block

    def lose(self) -> int:
        running = self._next == STEP
        self._next[running] = IGNORED
        num_lost = self._num_taken + int(np.count_nonzero(running))
        self._follows_gap = True
        return num_lost

    def _add(
        self,
        kinds: NDArray[np.uint8],
        columns: Sequence[Column],
        infos: Mapping[str, object],
        frames: Frames,
    ) -> tuple[StepBlock, int]:
        block = self._block
        if block is None:
            block, self._num_rows, self._info_bytes = self._new_block(frames), 0, 0
            self._block = block
        row = self._num_rows
        self._num_rows += 1
        block.kinds[row] = kinds
        for target, column in zip(block.columns, columns, strict=False):
            target[row] = column
        if block.frames is not None:
            for lane, frame in enumerate(frames):  # together they would be copied twice
                block.frames[row, lane] = frame
        if infos:
            block.infos[row] = _encoded(infos)
            self._info_bytes += len(block.infos[row])
        return block, row

    def _new_block(self, frames: Frames) -> StepBlock:
        lanes = self._num_lanes
        shape = (lanes, *frames[0].shape) if len(frames) else (0,)
        lane_bytes = sum(leaf.lane_bytes for leaf in self._leaves)
        row_bytes = lanes * lane_bytes + int(np.prod(shape))
        size = max(1, min(_MOST_ROWS, _BLOCK_BYTES // row_bytes))
        columns: list[Any] = [
            [("",) * lanes] * size
            if leaf.dtype is None
            else np.zeros((size, lanes, *leaf.shape), leaf.dtype)
            for leaf in self._leaves
        ]
        pictures = np.zeros((size, *shape), np.uint8) if len(frames) else None
        kinds = np.zeros((size, lanes), np.uint8)
        return StepBlock(kinds, columns, pictures, self._follows_gap)


def _encoded(infos: Mapping[str, object]) -> bytes:
    """Return the encoded infos of a vector; the largest are left out where all are too large."""
    encoded = encode(infos)
    if len(encoded) <= _MOST_INFO_BYTES:
        return encoded
    sizes = {key: len(encode(infos[key])) for key in infos if not _is_mask(infos, key)}
    kept: dict[str, object] = {}
    num_bytes = 0
    for key in sorted(sizes, key=sizes.__getitem__):
        num_bytes += sizes[key]
        if num_bytes > _MOST_INFO_BYTES:
            break
        kept |= {name: infos[name] for name in (key, f"_{key}") if name in infos}
    left_out = ", ".join(sorted(sizes.keys() - kept.keys()))
    return encode({**kept, "rlmesh_ray.recording": f"too large and left out: {left_out:.200}"})


def _is_mask(infos: Mapping[str, object], key: str) -> bool:
    return key.startswith("_") and key[1:] in infos


def segments(block: StepBlock) -> Iterator[Segment]:
    """Yield the segments of a block, lane by lane, each lane's in their order."""
    infos = {row: decode(data) for row, data in block.infos.items()}
    ended = block.columns[-2] | block.columns[-1]
    for lane in range(block.kinds.shape[1]):
        rows = np.flatnonzero(block.kinds[:, lane])
        for part in np.split(rows, np.flatnonzero(block.kinds[rows, lane] == FIRST)):
            if not len(part):
                continue
            first, last = int(part[0]), int(part[-1])
            is_whole = last - first + 1 == len(part)  # pictures of consecutive rows are not copied
            rows_of_frames = slice(first, last + 1) if is_whole else part
            yield Segment(
                lane,
                [_rows(column, part, lane) for column in block.columns],
                [lane_info(infos[row], lane) if row in infos else {} for row in part.tolist()],
                begins=bool(block.kinds[first, lane] == FIRST),
                ends=bool(ended[last, lane] and block.kinds[last, lane] == STEP),
                seed=block.seeds.get((first, lane)),
                frames=None if block.frames is None else block.frames[rows_of_frames, lane],
                policy_version=block.policy_version,
            )


def _rows(column: Any, rows: NDArray[np.int64], lane: int) -> Any:
    if isinstance(column, list):
        return tuple(column[row][lane] for row in rows.tolist())
    return column[rows, lane]
