"""A recording as a data set of Minari."""

import warnings
from pathlib import Path

import minari
import numpy as np
import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import load, to_minari
from rlmesh_ray.testing.equality import assert_identical
from tests.unit.recording.recordings import INFO, cart_poles, written


def test_a_dataset_of_minari_has_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    parts = cart_poles(tmp_path / "recording", num_episodes=3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an author, and the like
        to_minari(load(tmp_path / "recording"), "cartpole/random-v0")
        dataset = minari.load_dataset("cartpole/random-v0")

    assert dataset.total_episodes == 3
    for part, episode in zip(parts, dataset.iterate_episodes(), strict=True):
        assert_identical(np.asarray(episode.observations), part.columns[0])
        assert_identical(np.asarray(episode.actions), part.columns[1][1:])
        assert list(episode.terminations) == [False] * (len(part.infos) - 2) + [True]


def test_a_recording_without_an_episode_is_refused(tmp_path: Path) -> None:
    written(tmp_path, INFO)

    with pytest.raises(ConfigurationError, match="no episode yet"):
        to_minari(load(tmp_path), "cartpole/none-v0")
