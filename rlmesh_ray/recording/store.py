"""The files of a recording, written and read back.

``DIR/recording.json`` names the environment, ``DIR/index.jsonl`` has a line for each finished
episode, ``DIR/episodes/`` has ``ID.parquet`` and, where there are pictures, ``ID.mp4``. The footer
of a Parquet file has the line of the index, too: the index is a cache, to which lines are appended
and in which each may be missing. Several processes may write one recording: an empty file claims
an id, and is replaced by the episode's, which is complete then.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError, ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.files import list_folder, open_file, read_file
from rlmesh_ray.recording.options import require_folder
from rlmesh_ray.spaces.batch import leaves, unflatten
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, SpaceSpec
from rlmesh_ray.wire.rlmesh_v1.specs import spec_from_json, spec_to_json

FORMAT = 1
SUMMARY_KEY = "rlmesh_ray.episode"
"""Key of the summary in the metadata of a Parquet file."""
_INFO, _INDEX, _EPISODES = "recording.json", "index.jsonl", "episodes"
_LEFT_OVER_S = 86_400.0
"""Age of a temporary file to which no living writer writes any more."""
_LONGEST_ID = 18
_KINDS: Mapping[str, Any] = {
    "id": str,
    "endpoint": str,
    "length": int,
    "lane": int,
    "ended_at": float | int,
    "terminated": bool,
    "truncated": bool,
    "video": bool,
    "seed": int | None,
    "policy_version": int | None,
    "return": float | int | None,
}
"""Types of the values of a line in the index."""
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
"""Errors, besides ValueError, of parsing JSON that others have written and of using its values."""
_INDEX_BYTES = 2**28
_REWARD = BoxSpec((), "float64", np.float64(-np.inf).tobytes(), np.float64(np.inf).tobytes())
_FLAG = BoxSpec((), "bool", b"\0", b"\1")


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """A finished episode, as its line in the index describes it."""

    id: str
    """Six digits and more; a higher number was finished later."""
    length: int
    """Number of steps."""
    return_: float
    seed: int | None
    """Seed of the reset, if it had one."""
    lane: int
    endpoint: str
    """Address or id of the endpoint, or the env runner."""
    policy_version: int | None
    """Number of the weights that chose the last action; None where it is not known."""
    ended_at: float
    """Unix time in seconds."""
    terminated: bool
    truncated: bool
    video: Path | None
    """The MP4 file; None: there is none."""

    def to_json(self) -> str:
        """Return one line of JSON; a return that is not finite becomes null."""
        values = {name: getattr(self, name) for name in _KINDS if name != "return"}
        values["return"] = self.return_ if math.isfinite(self.return_) else None
        return json.dumps(values | {"video": self.video is not None})

    @classmethod
    def from_json(cls, line: str | bytes, videos: Path) -> Self:
        """Return the summary in a line; raises ValueError where there is none.

        Args:
            line: One line.
            videos: Folder of the videos.
        """
        try:
            values = json.loads(line)
            number, id_ = values.pop("return"), values["id"]
            if not _is_id(id_):
                raise ValueError(f"{id_!r:.40} is no id")
            for name, value in {**values, "return": number}.items():
                if not isinstance(value, _KINDS[name]):
                    raise ValueError(f"{name}={value!r:.40}")
            video = videos / f"{id_}.mp4" if values.pop("video") else None
            values["return_"] = math.nan if number is None else float(number)
            values["ended_at"] = float(values["ended_at"])
            return cls(video=video, **values)
        except _MALFORMED as error:
            raise ValueError(f"no summary of an episode: {error}") from error


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """What ``recording.json`` says of all episodes."""

    env_id: str
    observation_space: SpaceSpec
    action_space: SpaceSpec
    fps: float
    """Frames of the videos a second."""

    @property
    def row_space(self) -> DictSpec:
        """Space of a row of a Parquet file; the paths of its leaves are the columns' names."""
        return DictSpec(
            (
                ("observation", self.observation_space),
                ("action", self.action_space),
                ("reward", _REWARD),
                ("terminated", _FLAG),
                ("truncated", _FLAG),
            )
        )


class Store:
    """The folder of a recording, which need not exist.

    Args:
        folder: The folder.
        root: A folder above it: no symbolic link below that is followed. None: ``folder``.
    """

    def __init__(self, folder: str | Path, root: Path | None = None) -> None:
        self.folder = Path(folder)
        self._root = self.folder if root is None else root
        self._index = self.folder / _INDEX
        self._episodes = self.folder / _EPISODES

    def path(self, id_: str, suffix: str = ".parquet") -> Path:
        return self._episodes / f"{id_}{suffix}"

    def open(self, id_: str, suffix: str = ".parquet") -> BinaryIO:
        """Open a file of an episode for reading.

        Raises:
            OSError: It cannot be opened, is not a regular file, or a link leads to it.
        """
        return open_file(self.path(id_, suffix), self._root)

    def temporary_path(self) -> Path:
        return self._episodes / f".{os.getpid()}-{os.urandom(8).hex()}.tmp"

    def info(self) -> RecordingInfo:
        """Read ``recording.json``.

        Raises:
            ConfigurationError: It is missing, damaged, or of another format.
        """
        path = self.folder / _INFO
        try:
            values = json.loads(read_file(path, below=self._root))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']} instead of {FORMAT}")
            spaces = (values["observation_space"], values["action_space"])
            observation, action = (spec_from_json(json.dumps(space)) for space in spaces)
            return RecordingInfo(str(values["env_id"]), observation, action, float(values["fps"]))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigurationError(
                f"{self.folder} holds no recording: {_INFO} is missing; name a folder that was "
                "given to --record"
            ) from None
        except (OSError, ValueError, CodecError, *_MALFORMED) as error:
            raise ConfigurationError(
                f"{path} cannot be read ({error}); restore it, or use the rlmesh-ray that wrote it"
            ) from error

    def prepare(self, info: RecordingInfo) -> None:
        """Create the folder, for episodes whose observations may have another space than ``info``.

        Raises:
            ConfigurationError: The folder cannot be written, or it is of another environment.
        """
        with self._refused():
            self._episodes.mkdir(parents=True, exist_ok=True)
            trial = self.temporary_path()
            trial.touch()
            trial.unlink()
        if (self.folder / _INFO).exists():
            own = self.info()
            self._require_same(replace(own, observation_space=info.observation_space), info)

    def require(self, info: RecordingInfo) -> None:
        """Check that episodes of such an environment can be written; create the folder.

        Raises:
            ConfigurationError: The folder cannot be written, or it is of another environment.
        """
        with self._refused():
            own = self.create(info)
        self._require_same(own, info)

    def _require_same(self, own: RecordingInfo, info: RecordingInfo) -> None:
        if replace(own, fps=0.0) != replace(info, fps=0.0):
            raise ConfigurationError(
                f"{self.folder} has episodes of {own.env_id} with other spaces; name another "
                "folder (--record)"
                if own.env_id == info.env_id
                else f"{self.folder} has episodes of {own.env_id}, and these are of "
                f"{info.env_id}; name another folder (--record)"
            )

    def create(self, info: RecordingInfo) -> RecordingInfo:
        """Write ``recording.json`` unless it is there; return what it says.

        Raises:
            ConfigurationError: See ``info``.
            OSError: The folder cannot be written.
        """
        self._episodes.mkdir(parents=True, exist_ok=True)
        spaces = {
            "observation_space": json.loads(spec_to_json(info.observation_space)),
            "action_space": json.loads(spec_to_json(info.action_space)),
        }
        values = {"format": FORMAT, "env_id": info.env_id, "fps": info.fps, **spaces}
        path, temporary = self.folder / _INFO, self.temporary_path()
        with removed_on_error(temporary):
            temporary.write_text(json.dumps(values, indent=1))  # also shows whether there is room
            if path.exists():
                temporary.unlink()
            else:
                # Where two environments come at the same time the last one stays: each writer
                # looks once more before its first episode.
                temporary.replace(path)
        return self.info()

    def publish(self, parquet: Path, video: Path | None, number: int) -> int:
        """Give complete files the first free id from ``number`` on; return its number."""
        while True:
            path = self.path(f"{number:06}")
            try:
                path.touch(exist_ok=False)
                break
            except FileExistsError:
                number += 1
        with removed_on_error(path):
            if video is not None:
                video.replace(path.with_suffix(".mp4"))
            parquet.replace(path)
        return number

    def append(self, summary: EpisodeSummary) -> None:
        with open_file(self._index, self._root, "ab") as file:
            file.write(f"{summary.to_json()}\n".encode())

    def summaries(self) -> list[EpisodeSummary]:
        """Return the finished episodes: those of the index, and those that only files tell of."""
        known = self._indexed()
        known |= {each.id: each for each in self._missing_in(known)}
        return [known[id_] for id_ in sorted(known, key=int)]

    def begin_writing(self) -> int:
        """Append to the index what it lacks, and delete what writers that died have left.

        Returns:
            The highest number of an episode.
        """
        for left_over in self._episodes.glob(".*.tmp"):
            with contextlib.suppress(OSError):  # it is gone, or a folder
                if time.time() - left_over.stat().st_mtime > _LEFT_OVER_S:
                    left_over.unlink()
        known = self._indexed()
        for summary in self._missing_in(known):
            self.append(summary)
        return max(map(int, [*known, *self._ids()]), default=0)

    def size_bytes(self) -> int:
        """Return the size of the episodes' files, also of those that are being written."""
        num_bytes = 0
        with os.scandir(self._episodes) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # its writer has just ended it
                    num_bytes += entry.stat(follow_symlinks=False).st_size
        return num_bytes

    def _indexed(self) -> dict[str, EpisodeSummary]:
        try:
            lines = read_file(self._index, _INDEX_BYTES, self._root).split(b"\n")
        except OSError:  # the episodes' own files have all that it says
            return {}
        found: dict[str, EpisodeSummary] = {}
        for line in lines:
            with contextlib.suppress(ValueError):
                summary = EpisodeSummary.from_json(line, self._episodes)
                found[summary.id] = summary
        return found

    def _missing_in(self, known: Mapping[str, EpisodeSummary]) -> Iterator[EpisodeSummary]:
        missing = set(self._ids()).difference(known)
        if missing:
            with require_pyarrow():
                from pyarrow import parquet
        for id_ in missing:
            with contextlib.suppress(Exception):  # a file may be damaged in any way
                with self.open(id_) as file:
                    metadata = parquet.read_metadata(file).metadata
                yield self._summary_in(metadata[SUMMARY_KEY.encode()], id_)

    def _summary_in(self, text: bytes, id_: str) -> EpisodeSummary:
        own = {"id": id_, "video": self.path(id_, ".mp4").exists()}
        return EpisodeSummary.from_json(json.dumps(json.loads(text) | own), self._episodes)

    def _ids(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in list_folder(self._episodes, self._root)[1]:
                stem, suffix = os.path.splitext(name)
                if suffix == ".parquet" and _is_id(stem):
                    yield stem

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"{self.folder} cannot be written ({error}); name another folder (--record)"
            ) from error


@contextlib.contextmanager
def removed_on_error(path: Path) -> Iterator[None]:
    """Delete a file whose writing fails, as on a full disk, where its empty rest would stay."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _is_id(text: str) -> bool:
    """Return whether ``text`` is an id, which becomes the name of a file and a number."""
    return text.isascii() and text.isdecimal() and len(text) <= _LONGEST_ID


@contextlib.contextmanager
def require_pyarrow() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"recordings need pyarrow: {install_command('recording')}"
        ) from error


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """The arrays of an episode of N steps."""

    summary: EpisodeSummary
    observations: Any
    """N + 1 of them, that of the reset first: an array ``(N + 1, *shape)`` for each leaf of the
    space, nested as the space is; a tuple of strings for Text."""
    actions: Any
    """N, in the same form; action ``i`` leads from observation ``i`` to ``i + 1``."""
    rewards: NDArray[np.float64]
    """``(N,)``"""
    infos: list[dict[str, Any]]
    """N + 1 of them, that of the reset first, as far as they were recorded."""


class Recording:
    """A recording, as it was when ``load`` opened it.

    Args:
        folder: The folder of the recording.
        root: A folder above it: no symbolic link below that is followed. None: ``folder``.
    """

    def __init__(self, folder: str | Path, root: Path | None = None) -> None:
        self._store = Store(folder, root)
        self.info: RecordingInfo = self._store.info()
        """Id of the environment, its spaces as specs, and the videos' frame rate."""
        try:
            self.episodes: Sequence[EpisodeSummary] = self._store.summaries()
        except OSError as error:
            raise ConfigurationError(
                f"the episodes of {folder} cannot be read ({error}); allow reading them"
            ) from error
        """The finished episodes, in the order of their ends."""
        self._by_id = {summary.id: summary for summary in self.episodes}

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self._store.folder

    @property
    def observation_space(self) -> "gymnasium.Space[Any]":
        """Observation space of one lane."""
        return to_gymnasium(self.info.observation_space)

    @property
    def action_space(self) -> "gymnasium.Space[Any]":
        """Action space of one lane."""
        return to_gymnasium(self.info.action_space)

    def summary(self, id_: str) -> EpisodeSummary:
        """Return the summary of an episode.

        Raises:
            ConfigurationError: The recording has no such episode.
        """
        if id_ not in self._by_id:
            raise ConfigurationError(
                f"{self.folder} has no episode {id_!r:.40}; episodes have the ids of its summaries"
            )
        return self._by_id[id_]

    def episode(self, id_: str) -> RecordedEpisode:
        """Read the arrays of an episode.

        Raises:
            ConfigurationError: The recording has no such episode, or its file cannot be read.
            MissingPackageError: pyarrow is not installed.
        """
        with require_pyarrow():
            from rlmesh_ray.recording.episode_table import read_columns
        summary = self.summary(id_)
        with self._opened(id_) as file:
            columns, texts = read_columns(file, leaves(self.info.row_space))
            row = unflatten(self.info.row_space, columns)
            infos = [json.loads(text) if text else {} for text in texts]
        return RecordedEpisode(summary, row["observation"], row["action"], row["reward"], infos)

    def rewards(self, id_: str) -> NDArray[np.float64]:
        """Read the rewards of an episode, ``(num_steps,)``, without its other arrays.

        Raises:
            ConfigurationError: As ``episode``.
        """
        with require_pyarrow():
            from rlmesh_ray.recording.episode_table import read_rewards
        summary = self.summary(id_)
        with self._opened(id_) as file:
            return read_rewards(file, summary.length)

    @contextlib.contextmanager
    def _opened(self, id_: str) -> Iterator[BinaryIO]:
        try:
            with self._store.open(id_) as file:
                yield file
        except Exception as error:
            raise ConfigurationError(
                f"episode {id_} of {self.folder} cannot be read ({error}); restore its file"
            ) from error


def load(folder: str | Path) -> Recording:
    """Open a recording; reads ``recording.json`` and ``index.jsonl``, and no episode.

    An index that is damaged or missing is put together from the Parquet files, which takes longer.

    Raises:
        ConfigurationError: The folder holds no recording, or one of another format; or its name is
            no path.
    """
    require_folder("folder", folder)
    return Recording(folder)


def to_minari(recording: Recording, dataset_id: str) -> Any:
    """Write the episodes into a local dataset of Minari, without loss; infos are left out.

    All episodes are in memory at once, as Minari takes them.

    Args:
        recording: The recording.
        dataset_id: Name of the new dataset, such as ``"cartpole/expert-v0"``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        ConfigurationError: The recording has no episode.
        MissingPackageError: Minari is not installed.
    """
    try:
        from minari.data_collector import EpisodeBuffer
        from minari.utils import create_dataset_from_buffers
    except ImportError as error:
        raise MissingPackageError("to_minari needs Minari: pip install minari") from error
    if not recording.episodes:
        raise ConfigurationError(f"{recording.folder} has no episode yet; record some first")
    buffers = []
    for number, summary in enumerate(recording.episodes):
        episode = recording.episode(summary.id)
        ends = [False] * (summary.length - 1)
        buffers.append(
            EpisodeBuffer(
                id=number,
                seed=summary.seed,
                observations=episode.observations,
                actions=episode.actions,
                rewards=list(episode.rewards),
                terminations=[*ends, summary.terminated],
                truncations=[*ends, summary.truncated],
            )
        )
    return create_dataset_from_buffers(
        dataset_id,
        buffers,
        observation_space=recording.observation_space,
        action_space=recording.action_space,
        description=f"{recording.info.env_id}, recorded by rlmesh-ray",
        data_format="arrow",  # of pyarrow, which is there; Minari's default needs h5py
        jpeg_encoding=False,
    )
