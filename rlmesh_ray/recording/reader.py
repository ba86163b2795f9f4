"""Recordings, read back: the list of their episodes from the index, and the arrays of each one."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, MissingPackageError
from rlmesh_ray.recording.options import require_folder
from rlmesh_ray.recording.store import EpisodeSummary, RecordingInfo, Store, require_pyarrow
from rlmesh_ray.spaces.batch import leaves, unflatten
from rlmesh_ray.spaces.gym_conversion import to_gymnasium


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
