"""to_minari: a recording as a dataset of Minari."""

from typing import Any

from rlmesh_ray.errors import ConfigurationError, MissingPackageError
from rlmesh_ray.recording.reader import Recording


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
