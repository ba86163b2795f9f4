"""Recorder: what steps hands its arrays to; and the handle of the process that writes them.

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
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from rlmesh_ray.recording.options import AUTO, RENDER, RecordOptions
from rlmesh_ray.recording.store import RecordingInfo, Store
from rlmesh_ray.recording.vector_steps import Abandoned, Frames, Message, StepCollector, Stream
from rlmesh_ray.recording.video import picture_position
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

_LOG = logging.getLogger("rlmesh_ray.recording")
_QUEUE_BYTES = 2**26
_FLUSH_S = 1.0
_DEFAULT_FPS = 30.0
_WORKER_CLOSE_S = 3.0

Render = Callable[[], Sequence[Any] | None]
"""Returns a frame of each lane."""


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
        with self._lock:  # however full the queue is
            self._append(key, Stream(info_of(contract), endpoint, self.options.video), 0)
        return key

    def put(self, key: str, message: Message, num_bytes: int) -> bool:
        """Queue a message of a stream; False: there is no room, and it is dropped.

        After one was dropped the queue takes none until three quarters of it are free, so that
        what it then takes holds whole episodes.
        """
        with self._lock:
            most = _QUEUE_BYTES // 4 if self._is_refusing else _QUEUE_BYTES - num_bytes
            if not self._is_refusing:
                self._changed.wait_for(
                    lambda: self._queued_bytes <= most or not (self._queue and self._is_open),
                    self._patience_s,
                )
            self._is_refusing = bool(self._queue) and self._queued_bytes > most
            if self._is_refusing or not self._is_open:
                return False
            self._append(key, message, num_bytes)
            return True

    def abandon(self, key: str, episode: str) -> None:
        """Have the files of a running episode deleted, of which no further segment comes."""
        with self._lock:  # however full the queue is: it makes room
            if self._is_open:
                self._append(key, Abandoned(episode), 0)

    def lose(self, num_episodes: int) -> None:
        if num_episodes and not self.num_lost and self._is_open:
            _LOG.warning(
                "the writer of %s does not keep up: %d episodes are not recorded; at the end the "
                "log tells the number of all",
                self.options.folder,
                num_episodes,
            )
        self.num_lost += num_episodes

    def hand_over(self, timeout_s: float) -> None:
        """Wait until the process has all that is queued: it outlives this one."""
        with self._lock:
            self._changed.wait_for(lambda: not (self._is_open and self._queue), timeout_s)

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

    def _append(self, key: str, message: Message, num_bytes: int) -> None:
        self._queue.append((key, message, num_bytes))
        self._queued_bytes += num_bytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, daemon=True)
            self._thread.start()
        self._changed.notify_all()

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

    def hand_over(self) -> None:
        """Give the writer's process what has been collected, which may be ended any time."""
        self.flush()
        self._own_writer.hand_over(_WORKER_CLOSE_S)

    def close(self) -> None:
        """Hand over what has been collected; the worker has little time to end."""
        self.flush()
        self._own_writer.close(_WORKER_CLOSE_S)
