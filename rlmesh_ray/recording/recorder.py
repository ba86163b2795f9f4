"""Recorder: what steps hands its arrays to; and the handle of the process that writes them.

Steps travel as blocks of whole arrays: collecting one costs a copy of its arrays, whatever they
hold. ``segments``, which takes the lanes apart, runs in the writer's process.

Nothing here raises into what steps. Where the queue has no room for a block of steps, it is dropped
with all episodes that it is part of, or waited for, as the ``WriterHandle`` says.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.envs.commands import ResetReply
from rlmesh_ray.envs.worker_channel import decode, encode_reply
from rlmesh_ray.recording.options import AUTO, RENDER, RecordOptions, picture_position
from rlmesh_ray.recording.store import RecordingInfo, Store
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.vector_infos import lane_info

_LOG = logging.getLogger("rlmesh_ray.recording")
_BLOCK_BYTES, _MOST_ROWS = 2**21, 512
_MOST_INFO_BYTES = 2**18
_QUEUE_BYTES = 2**26
_FLUSH_S = 1.0
_DEFAULT_FPS = 30.0
_WORKER_CLOSE_S = 3.0

Render = Callable[[], Sequence[Any] | None]
"""Returns a frame of each lane."""


IGNORED, STEP, FIRST = range(3)
"""What a row of a block is for a lane: nothing, a step, or the reset of a new episode."""

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
    """Infos of the vector, by row; encoded, and limited as those of replies are."""
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
            block.infos[row] = encode_reply(ResetReply(dict(infos)), _MOST_INFO_BYTES)
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


def segments(block: StepBlock) -> Iterator[Segment]:
    """Yield the segments of a block, lane by lane, each lane's in their order."""
    infos = {row: decode(data).infos for row, data in block.infos.items()}
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


class WriterHandle:
    """The writer process of a recording, fed by a thread from a bounded queue. Thread-safe.

    The process starts with the first message.

    Args:
        options: Where to record.
        patience_s: How long what steps waits for room in the queue.
    """

    def __init__(self, options: RecordOptions, patience_s: float = 0.0) -> None:
        self.options = options
        self._patience_s = patience_s
        self.num_lost = 0
        """Episodes that were dropped for want of room."""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._queue: deque[tuple[str, Message, int]] = deque()
        self._queued_bytes = 0
        # Locked by itself: Ctrl-C may come in a Condition's __enter__, and leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_open = True
        self._is_refusing = False
        self._keys = count()

    def new_stream(self, contract: EnvContract, endpoint: str) -> str:
        key = str(next(self._keys))
        self.put(key, Stream(info_of(contract), endpoint, self.options.video))
        return key

    def put(self, key: str, message: Message, num_bytes: int = 0) -> bool:
        """Queue a message of a stream; False: there is no room, and it is dropped.

        After one was dropped the queue takes none until three quarters of it are free, so that
        what it then takes holds whole episodes. A message of no bytes is taken however full the
        queue is.
        """
        with self._lock:
            if num_bytes:
                most = _QUEUE_BYTES // 4 if self._is_refusing else _QUEUE_BYTES - num_bytes
                if not self._is_refusing:
                    self._changed.wait_for(
                        lambda: self._queued_bytes <= most or not (self._queue and self._is_open),
                        self._patience_s,
                    )
                self._is_refusing = bool(self._queue) and self._queued_bytes > most
            if (num_bytes and self._is_refusing) or not self._is_open:
                return False
            self._queue.append((key, message, num_bytes))
            self._queued_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._feed, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def lose(self, num_episodes: int) -> None:
        if num_episodes and not self.num_lost and self._is_open:
            _LOG.warning(
                "the writer of %s does not keep up: %d episodes are not recorded; at the end the "
                "log tells the number of all",
                self.options.folder,
                num_episodes,
            )
        self.num_lost += num_episodes

    def close(self, timeout_s: float) -> None:
        """Have the rest written; what the process has not taken by ``timeout_s`` is lost."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_open = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            with self._lock:
                if self._queue:
                    self._queue.clear()
                    _LOG.warning(
                        "the last steps are not recorded to %s: its writer does not keep up",
                        self.options.folder,
                    )
        if self._process is not None:
            try:
                self._process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                _LOG.warning(
                    "the last episodes are still being written to %s, by process %d",
                    self.options.folder,
                    self._process.pid,
                )
        if self.num_lost:
            _LOG.warning("%d episodes were not recorded to %s", self.num_lost, self.options.folder)

    def _feed(self) -> None:
        try:
            self._process = process = _start(self.options)
            assert process.stdin is not None
            with process.stdin as pipe:
                while (message := self._first()) is not None:
                    # Large arrays go into the pipe as they are: protocol 5 does not copy them.
                    pickle.dump(message, pipe, 5)
                    pipe.flush()
                    self._remove_first()
        except OSError as error:
            with self._lock:
                self._is_open = False
                self._queue.clear()
                self._changed.notify_all()
            _LOG.warning("nothing more is recorded to %s: %s", self.options.folder, error)

    def _first(self) -> tuple[str, Message] | None:
        """Wait for a message, which stays queued until it is sent; None: no more will come."""
        with self._lock:
            self._changed.wait_for(lambda: self._queue or not self._is_open)
            return self._queue[0][:2] if self._queue else None

    def _remove_first(self) -> None:
        with self._lock:
            if self._queue:  # not after ``close`` has given up waiting
                self._queued_bytes -= self._queue.popleft()[2]
            self._changed.notify_all()


def _start(options: RecordOptions) -> "subprocess.Popen[bytes]":
    module = ("-m", "rlmesh_ray.recording.writer_process")
    return subprocess.Popen(
        [sys.executable, "-P", *module, str(options.folder), str(options.max_gb)],
        stdin=subprocess.PIPE,
        stdout=2,
        # It outlives a worker that is killed, and Ctrl-C is not for it.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )


def info_of(contract: EnvContract) -> RecordingInfo:
    fps = contract.metadata.get("render_fps")
    if not (isinstance(fps, (int, float)) and 1 <= fps <= 1000):
        fps = _DEFAULT_FPS
    spaces = contract.observation_space, contract.action_space
    return RecordingInfo(contract.id, *spaces, float(fps))


class Recorder:
    """Records the episodes of one session.

    Args:
        writer: The writer process.
        contract: The environment's contract.
        endpoint: Address or id of the endpoint.
        autoresets: Whether lanes reset on the step after an end; None: as the contract says.
        policy_version: Returns the number of the policy's weights, where it is known.

    Raises:
        ConfigurationError: The folder cannot be written, or it is of another environment, or the
            environment has no such image.
    """

    def __init__(
        self,
        writer: WriterHandle,
        contract: EnvContract,
        endpoint: str,
        *,
        autoresets: bool | None = None,
        policy_version: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._policy_version = policy_version
        self._version: int | None = None
        self._writer = writer
        self._contract = contract
        self._endpoint = endpoint
        mode = contract.autoreset_mode
        if autoresets is None:
            autoresets = mode is AutoresetMode.NEXT_STEP
        self._collector = StepCollector(info_of(contract), contract.num_envs, autoresets=autoresets)
        video, space = writer.options.video, contract.observation_space
        is_auto = picture_position(video, space) is None and video == AUTO
        self._renders = (is_auto and contract.render_mode == "rgb_array") or video == RENDER
        if video == RENDER and contract.render_mode in ("", "human"):
            _LOG.warning(
                "no videos are recorded: %s has no pictures; make it with render_mode='rgb_array'",
                contract.id,
            )
            self._renders = False
        self._frame_shapes: set[tuple[int, ...]] = set()
        self._key: str | None = None
        self._flushed_s = time.monotonic()
        self._is_on = mode is not AutoresetMode.SAME_STEP
        if self._is_on:
            Store(writer.options.folder).require(info_of(contract))
        else:
            _LOG.warning(
                "%s is not recorded: in autoreset mode same_step an ending step has no last "
                "observation of its own; make it with another mode",
                contract.id,
            )

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int | None],
        observations: Sequence[Column],
        infos: Mapping[str, object],
        render: Render,
    ) -> None:
        add = self._collector.add_reset
        self._record(lambda frames: add(lanes, seeds, observations, infos, frames), render)

    def step(
        self,
        columns: Sequence[Column],
        infos: Mapping[str, object],
        render: Render,
        lanes: Sequence[int] = (),
    ) -> None:
        version = self._policy_version()
        if version != self._version:  # a block has one
            self.flush()
            self._version = version
        add = self._collector.add_step
        self._record(lambda frames: add(columns, infos, frames, lanes), render)

    def flush(self) -> None:
        self._flushed_s = time.monotonic()
        block = self._collector.take()
        if block is None:
            return
        block.policy_version = self._version
        assert self._key is not None, "set before the first row"
        if not self._writer.put(self._key, block, block.num_bytes):
            self._writer.lose(self._collector.lose())

    def _record(self, add: Callable[[Frames], None], render: Render) -> None:
        if not self._is_on:
            return
        try:
            if self._key is None:
                self._key = self._writer.new_stream(self._contract, self._endpoint)
            if self._collector.is_full:
                self.flush()
            add(self._frames(render) if self._renders else ())
            if self._collector.num_ended and time.monotonic() - self._flushed_s > _FLUSH_S:
                self.flush()
        except Exception as error:  # noqa: BLE001  # what steps must not notice
            self._is_on = False
            name = type(error).__name__
            _LOG.warning("%s is not recorded any more: %s: %s", self._contract.id, name, error)

    def _frames(self, render: Render) -> Frames:
        try:
            frames = [np.asarray(frame, np.uint8) for frame in render() or ()]
            shapes = self._frame_shapes = self._frame_shapes.union(frame.shape for frame in frames)
            if len(frames) != self._contract.num_envs or len(shapes) != 1 or frames[0].ndim != 3:
                raise ValueError(f"render gave {len(frames)} frames of the shapes {shapes}")
        except Exception as error:  # noqa: BLE001  # user code, whose failure must not fail a step
            self._renders = False
            self.flush()  # the rows of a block have frames, or none has: running videos end
            _LOG.warning("videos are not recorded: %s: %s", type(error).__name__, error)
            return ()
        return [frame[..., :3] for frame in frames]  # of RGBA the colours


class SessionObserver(Recorder):
    """The recorder of an env worker, with a writer of its own.

    Args:
        options: Where and what to record.
        endpoint: Id of the endpoint.
        contract: The environment's contract.
    """

    def __init__(self, options: RecordOptions, endpoint: str, contract: EnvContract) -> None:
        self._own_writer = WriterHandle(options)
        super().__init__(self._own_writer, contract, endpoint)

    def close(self) -> None:
        """Hand over what has been collected; the worker has little time to end."""
        self.flush()
        self._own_writer.close(_WORKER_CLOSE_S)
