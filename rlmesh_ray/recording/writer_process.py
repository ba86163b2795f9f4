"""The writer of a recording: a process of its own, which gets blocks of steps and writes files.

``WriterHandle`` starts it as ``python -m rlmesh_ray.recording.writer_process FOLDER MAX_GB`` and
sends ``(key of a stream, message)`` on its standard input. What it cannot do it logs once, with the
cause, on standard error; it goes on with what it can do.
"""

import contextlib
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.recording.episode_table import arrow_array, schema
from rlmesh_ray.recording.options import has_channels_first, picture_position
from rlmesh_ray.recording.recorder import Abandoned, Message, Segment, Stream, segments
from rlmesh_ray.recording.store import SUMMARY_KEY, EpisodeSummary, Store, removed_on_error
from rlmesh_ray.spaces.spec import Leaf, leaves

_LOG = logging.getLogger("rlmesh_ray.recording")
_LONGEST_INFO, _LARGEST_ARRAY = 4096, 256
_RESCAN_SHARE = 0.01
"""Of the room that is left: so many writers would have to write into one folder unseen to fill it.
"""
_ROW_GROUP_BYTES = 2**12
_NICENESS = 19  # a fiftieth of a processor that a simulator or a learner wants


_VIDEO_OPTIONS = {"preset": "veryfast", "tune": "zerolatency", "threads": "1"}


def as_rgb(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return frames ``(count, height, width, 3)`` with even sides, as H.264 wants them.

    Args:
        images: ``(count, *shape)``, with the channels last or first. Three are colours; of any
            other number the last one is shown in grey, which is the newest of stacked frames.
    """
    if has_channels_first(images.shape[1:]):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.shape[-1] != 3:
        images = np.repeat(images[..., -1:], 3, axis=-1)
    odd = images.shape[1] % 2, images.shape[2] % 2
    if not any(odd):
        return images  # np.pad would copy them
    return np.pad(images, ((0, 0), (0, odd[0]), (0, odd[1]), (0, 0)), mode="edge")


class VideoFile:
    """An MP4 file that is being written; any of its methods may raise errors of PyAV.

    Args:
        path: Its path.
        fps: Frames a second.

    Raises:
        MissingPackageError: PyAV is not installed, or has no encoder for H.264.
    """

    def __init__(self, path: Path, fps: float) -> None:
        try:
            import av
        except ImportError as error:
            needed = f"videos need PyAV: {install_command('recording')} ({error})"
            raise MissingPackageError(needed) from error
        self.path = path
        self._frame_from = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w", format="mp4")
        rate = Fraction(fps).limit_denominator(1000)
        try:
            self._stream: Any = self._container.add_stream(
                "libx264", rate=rate, options=_VIDEO_OPTIONS
            )
        except av.codec.codec.UnknownCodecError as error:
            raise MissingPackageError(
                "this PyAV has no libx264 (H.264), which PyAV's wheels have: pip install "
                "--force-reinstall --only-binary av av"
            ) from error
        self._stream.pix_fmt = "yuv420p"
        self._num_frames = 0

    def add(self, images: NDArray[np.uint8]) -> None:
        for image in as_rgb(images):
            if not self._num_frames:
                self._stream.height, self._stream.width = image.shape[:2]
            frame = self._frame_from(image, format="rgb24")
            frame.pts = self._num_frames
            self._num_frames += 1
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._num_frames:
            self._container.mux(self._stream.encode(None))
        self._container.close()


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How the episodes of a stream are written."""

    endpoint: str
    leaves: tuple[Leaf, ...]
    """Of a row."""
    schema: pa.Schema
    picture: int | None
    """Position of the leaf that the videos show; None: they show what ``render`` returned."""
    fps: float


class EpisodeFiles:
    """The files of one episode that is being written.

    Args:
        store: The recording.
        stream: Where the episode runs.
        first: Its first segment.
    """

    def __init__(self, store: Store, stream: StreamFormat, first: Segment) -> None:
        self._store = store
        self._stream = stream
        self._first = first
        self._path = store.temporary_path()
        # Small episodes are many: to open the file by its path, dictionaries and statistics would
        # take as long again.
        with removed_on_error(self._path):
            self._file = pa.OSFile(str(self._path), "wb")
            self._parquet = pq.ParquetWriter(
                self._file,
                stream.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
                write_statistics=False,
            )
        self.video: VideoFile | None = None
        self.counted_bytes = 0
        """What the writer has counted of them."""
        self._waiting: list[pa.RecordBatch] = []
        """Rows that are not in the file yet: blocks with pictures of ``render`` have few, and each
        group of rows in a file takes as much time and room as many rows."""
        self._waiting_bytes = 0
        self._num_rows = 0
        self._return = 0.0

    def add(self, segment: Segment, infos: list[str | None]) -> None:
        stream = self._stream
        arrays = map(arrow_array, stream.leaves, stream.schema.types, segment.columns)
        batch = pa.record_batch([*arrays, pa.array(infos, pa.string())], stream.schema)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > _ROW_GROUP_BYTES:
            self._write_rows()
        self._num_rows += batch.num_rows
        self._return += float(segment.columns[-3][int(segment.begins) :].sum())

    def _write_rows(self) -> None:
        rows = pa.Table.from_batches(self._waiting, self._stream.schema).combine_chunks()
        self._parquet.write_table(rows)
        self._waiting, self._waiting_bytes = [], 0

    @property
    def size_bytes(self) -> int:
        video = 0 if self.video is None else self.video.path.stat().st_size
        return int(self._file.tell()) + self._waiting_bytes + video

    def finish(self, last: Segment, number: int) -> EpisodeSummary:
        summary = EpisodeSummary(
            id=str(number),
            length=self._num_rows - 1,
            return_=self._return,
            seed=self._first.seed,
            lane=last.episode if isinstance(last.episode, int) else 0,
            endpoint=self._stream.endpoint,
            policy_version=last.policy_version,
            ended_at=time.time(),
            terminated=bool(last.columns[-2][-1]),
            truncated=bool(last.columns[-1][-1]),
            video=None,
        )
        if self._waiting:
            self._write_rows()
        self._parquet.add_key_value_metadata({SUMMARY_KEY: summary.to_json()})
        self._parquet.close()
        self._file.close()
        former = None if self.video is None else self.video.path
        number = self._store.publish(self._path, former, number)
        id_ = f"{number:06}"
        video = None if former is None else self._store.path(id_, ".mp4")
        return replace(summary, id=id_, video=video)

    def discard(self) -> None:
        self.discard_video()
        for end in (self._parquet.close, self._file.close, self._path.unlink):
            with contextlib.suppress(Exception):  # a full disk fails in any of its ways
                end()

    def discard_video(self) -> None:
        video, self.video = self.video, None
        for end in () if video is None else (video.close, video.path.unlink):
            with contextlib.suppress(Exception):
                end()


class EpisodeWriter:
    """Writes the episodes of any number of streams into one recording.

    Args:
        folder: Folder of the recording.
        max_gb: See ``RecordOptions``.
    """

    def __init__(self, folder: str | Path, max_gb: float) -> None:
        self._store = Store(folder)
        self._max_bytes = max_gb * 1e9
        self._streams: dict[str, StreamFormat] = {}
        self._open: dict[tuple[str, int | str], EpisodeFiles] = {}
        self._logged: set[str] = set()
        self._number = 0
        self._known_bytes = self._new_bytes = 0
        """Size of the folder when it was last looked at, and how much has come since."""
        self._is_stopped = False

    def handle(self, key: str, message: Message) -> None:
        """Process a message; what the disk, a codec or the recording lacks is logged."""
        if isinstance(message, Stream):
            self._begin(key, message)
        elif key not in self._streams:
            return
        elif isinstance(message, Segment):
            self._add(key, message)
        elif isinstance(message, Abandoned):
            self._drop((key, message.episode))
        else:
            if message.follows_gap:
                self._discard(key)
            for segment in segments(message):
                self._add(key, segment)

    def close(self) -> None:
        for key in self._streams:
            self._discard(key)

    def _begin(self, key: str, stream: Stream) -> None:
        try:
            picture = picture_position(stream.video, stream.info.observation_space)
            self._store.require(stream.info)
            self._number = max(self._number, self._store.begin_writing() + 1)
            self._scan()
        except (ConfigurationError, OSError) as error:
            self._log_once("stream", "nothing is recorded: %s", error)
            return
        row_leaves = leaves(stream.info.row_space)
        self._streams[key] = StreamFormat(
            stream.endpoint, row_leaves, schema(row_leaves), picture, stream.info.fps
        )

    def _add(self, key: str, segment: Segment) -> None:
        stream = self._streams[key]
        episode = key, segment.episode
        try:
            if segment.begins:
                self._drop(episode)
            if segment.begins and not self._is_stopped:
                self._open[episode] = EpisodeFiles(self._store, stream, segment)
            files = self._open.get(episode)
            if files is None:  # the episode's beginning is missing
                return
            if self._is_full():
                self._drop(episode)
                return
            files.add(segment, [self._info_text(info) for info in segment.infos])
            self._film(key, files, segment)
            self._count(files, files.size_bytes)
            if segment.ends:
                self._finish(files, segment)
                del self._open[episode]
        except Exception as error:  # noqa: BLE001  # what a disk or a library may raise is open
            self._drop(episode)
            self._log_once(
                "episode",
                "episodes are not recorded, though each further one is tried: %s: %s",
                type(error).__name__,
                error,
            )

    def _finish(self, files: EpisodeFiles, last: Segment) -> None:
        summary = files.finish(last, self._number)
        self._number = int(summary.id) + 1
        self._store.append(summary)
        paths = filter(None, (self._store.path(summary.id), summary.video))
        self._count(files, sum(path.stat().st_size for path in paths))

    def _count(self, files: EpisodeFiles, num_bytes: int) -> None:
        self._new_bytes += num_bytes - files.counted_bytes
        files.counted_bytes = num_bytes

    def _film(self, key: str, files: EpisodeFiles, segment: Segment) -> None:
        stream = self._streams[key]
        frames = segment.frames if stream.picture is None else segment.columns[stream.picture]
        try:
            if frames is None:  # ``render`` has failed: a video would end early
                files.discard_video()
            else:
                if segment.begins:
                    path = self._store.temporary_path()
                    with removed_on_error(path):
                        files.video = VideoFile(path, stream.fps)
                if files.video is not None:
                    files.video.add(frames)
            if segment.ends and files.video is not None:
                files.video.close()  # which tells whether the disk had room for the last frames
        except Exception as error:  # noqa: BLE001  # PyAV raises errors of many kinds
            files.discard_video()
            kind = type(error).__name__
            self._log_once("video", "videos are not recorded: %s: %s", kind, error)

    def _info_text(self, info: Mapping[str, object]) -> str | None:
        """Return the JSON of an info, without values that JSON cannot hold or that are large."""
        if not info:
            return None
        texts = {}
        for key, value in info.items():
            try:
                texts[str(key)] = json.dumps(value, default=_plain, allow_nan=False)
                if len(texts[str(key)]) > _LONGEST_INFO:
                    raise ValueError(f"its JSON has {len(texts.pop(str(key)))} characters")
            except (TypeError, ValueError, RecursionError) as error:
                self._log_once(f"info {key}", "the info %r is not recorded: %s", key, error)
        parts = [f"{json.dumps(key)}: {text}" for key, text in texts.items()]
        return f"{{{', '.join(parts)}}}" if parts else None

    def _scan(self) -> None:
        self._known_bytes, self._new_bytes = self._store.size_bytes(), 0

    def _is_full(self) -> bool:
        if self._new_bytes > _RESCAN_SHARE * (self._max_bytes - self._known_bytes):
            self._scan()  # other processes may write, too
        if self._known_bytes + self._new_bytes < self._max_bytes:
            return False
        self._is_stopped = True
        self._log_once(
            "full",
            "recording stops: %s has reached %g GB (--record-max-gb); nothing is deleted",
            self._store.folder,
            self._max_bytes / 1e9,
        )
        return True

    def _discard(self, key: str) -> None:
        for episode in [episode for episode in self._open if episode[0] == key]:
            self._drop(episode)

    def _drop(self, episode: tuple[str, int | str]) -> None:
        files = self._open.pop(episode, None)
        if files is not None:
            files.discard()
            self._count(files, 0)

    def _log_once(self, about: str, message: str, *arguments: object) -> None:
        if about not in self._logged:
            self._logged.add(about)
            _LOG.warning(message, *arguments)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size <= _LARGEST_ARRAY:
        return value.tolist()
    raise TypeError(f"it is a {type(value).__name__}, or holds one")


def main() -> None:
    """Write until the pipe ends."""
    folder, max_gb = sys.argv[1:]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    os.nice(_NICENESS)
    pa.set_cpu_count(1)
    writer = EpisodeWriter(folder, float(max_gb))
    gone = (EOFError, OSError, pickle.UnpicklingError)  # the last: in the middle of a message
    with contextlib.suppress(*gone), os.fdopen(0, "rb") as pipe:
        while True:
            writer.handle(*pickle.load(pipe))
    writer.close()


if __name__ == "__main__":
    main()
