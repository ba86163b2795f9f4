import math
import random
from pathlib import Path

import pytest
from PIL import Image

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.evaluation.plot import plot_comparison, plot_evaluation
from rlmesh_ray.evaluation.result import EpisodeResult, compare_episodes


def episodes(count: int, num_endpoints: int = 1, seed: int | None = 0) -> list[EpisodeResult]:
    random_numbers = random.Random(count)
    return [
        EpisodeResult(
            index,
            None if seed is None else seed + index,
            random_numbers.gauss(100.0, 20.0),
            random_numbers.randrange(500),
            True,
            endpoint=f"127.0.0.1:{5555 + index % num_endpoints}",
        )
        for index in range(count)
    ]


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        counted = picture.convert("RGB").getcolors(maxcolors=2**24)
    assert counted is not None
    return {colour for _, colour in counted if isinstance(colour, tuple)}


BLUE, ORANGE, GREEN, PURPLE = (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)


@pytest.mark.parametrize("count", [1, 500])
def test_two_policies_and_their_difference_have_colours_of_their_own(
    count: int, tmp_path: Path
) -> None:
    path = tmp_path / "plot.png"
    a, b = episodes(count), episodes(count, seed=0)

    plot_comparison(compare_episodes(a, b), a, b, path, names=("old", "new" * 50))

    assert {BLUE, ORANGE, GREEN} <= colours(path)


@pytest.mark.parametrize(
    ("num_endpoints", "shown"), [(4, {BLUE, ORANGE, GREEN, PURPLE}), (9, {BLUE})]
)
def test_each_endpoint_has_a_colour_and_many_share_one(
    num_endpoints: int, shown: set[tuple[int, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "plot.png"

    plot_evaluation(episodes(20, num_endpoints, seed=None), path, name="twenty")

    assert colours(path) & {BLUE, ORANGE, GREEN, PURPLE} == shown


def test_returns_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    finished = [
        EpisodeResult(index, index, each, 3, True, endpoint="127.0.0.1:5555")
        for index, each in enumerate((math.nan, math.inf, 2.0))
    ]

    plot_evaluation(finished, path, name="three")

    assert BLUE in colours(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "plot.png").symlink_to("/dev/full")

    with pytest.raises(RlmeshError, match=r"cannot write .*plot\.png: No space"):
        plot_evaluation(episodes(1), tmp_path / "plot.png", name="one")
