import csv
import errno
import itertools
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from tensorboardX.proto.event_pb2 import Event, SessionLog

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress, newest_checkpoint, restore
from rlmesh_ray.rllib.config.hyperparameters import algorithm_config
from rlmesh_ray.rllib.training import (
    _RecentReturns,
    learning_curve,
    saved_progress,
    tracked,
    train,
)
from tests.odd_files import IRREGULAR, NONSENSE, put
from tests.unit.cli.full_disks import room_for

ODD = {kind: IRREGULAR[kind] for kind in ("pipe", "folder", "device")} | {
    kind: NONSENSE[kind] for kind in ("nothing", "bytes", "endless", "deep")
}


class CountingAlgorithm:
    """Stand-in for an Algorithm of RLlib, whose state is how often it was trained.

    Args:
        returns: The mean return of each iteration.
        evaluations: What RLlib reports as evaluation after each iteration: also the latest one.
        while_saving: Called while a checkpoint is written.
    """

    def __init__(
        self,
        returns: Sequence[float],
        evaluations: Sequence[float | None] = (),
        while_saving: Callable[[], None] = lambda: None,
    ) -> None:
        self._results = itertools.zip_longest(returns, evaluations)
        self._while_saving = while_saving
        self.num_trained = 0

    def train(self) -> dict[str, Any]:
        self.num_trained += 1
        return_mean, evaluation = next(self._results)
        sampled = {
            "num_env_steps_sampled_lifetime": 100 * self.num_trained,
            "num_episodes_lifetime": 40 * self.num_trained,
            "episode_return_mean": return_mean,
        }
        result = {"env_runners": sampled}
        if evaluation is not None:
            result["evaluation"] = {"env_runners": {"episode_return_mean": evaluation}}
        return result

    def save_to_path(self, path: str) -> None:
        (Path(path) / "state").write_text(str(self.num_trained))
        self._while_saving()

    def restore_from_path(self, path: str) -> None:
        self.num_trained = saved_in(Path(path))

    def stop(self) -> None:
        pass


def saved_in(checkpoint: Path) -> int:
    return int((checkpoint / "state").read_text())


def trained(
    algorithm: CountingAlgorithm, *, evaluate_every: int | None = None, **options: Any
) -> list[TrainingProgress]:
    config: Any = SimpleNamespace(build_algo=lambda: algorithm, evaluation_interval=evaluate_every)
    return list(train(config, **options))


def checkpoints(folder: Path) -> dict[str, int]:
    """Return the iterations of the checkpoints in a folder, by their names."""
    return {path.name: saved_in(path) for path in sorted(folder.iterdir())}


def test_the_mean_return_needs_more_than_a_lucky_episode() -> None:
    returns = _RecentReturns()

    assert math.isnan(returns.add(0, math.nan))
    assert returns.add(30, 100.0) == 100.0
    assert returns.add(1, 500.0) == pytest.approx((30 * 100 + 500) / 31)
    assert returns.add(0, math.nan) == pytest.approx((30 * 100 + 500) / 31)


def test_the_mean_return_of_a_resumed_training_counts_the_episodes_that_had_ended() -> None:
    assert _RecentReturns(10.0, 3).add(1, 50.0) == 20.0
    assert _RecentReturns(10.0, 500).add(32, 50.0) == 50.0


def test_the_mean_return_forgets_what_it_does_not_need() -> None:
    returns = _RecentReturns()
    returns.add(20, 10.0)
    returns.add(20, 20.0)

    assert returns.add(16, 30.0) == pytest.approx((20 * 20 + 16 * 30) / 36)
    assert returns.add(100, 50.0) == 50.0


def test_a_training_needs_a_goal() -> None:
    with pytest.raises(ConfigurationError, match="stop_return, stop_iters or stop_timesteps"):
        next(train(algorithm_config("PPO")))


@pytest.mark.parametrize("goal", ["stop_return", "stop_iters", "stop_timesteps"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_goal_that_is_never_reached_is_refused(goal: str, number: float) -> None:
    goals: dict[str, Any] = {"stop_iters": 1, goal: number}

    with pytest.raises(ConfigurationError, match=f"{goal}=(nan|inf) must be a finite number"):
        trained(CountingAlgorithm([1.0]), **goals)


def test_an_interrupted_training_ends_after_its_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    asked = iter([False, True])

    history = trained(
        CountingAlgorithm([1.0] * 9),
        stop_iters=9,
        checkpoint_dir=tmp_path / "checkpoint",
        is_interrupted=lambda: next(asked),
    )

    assert len(history) == 2
    assert checkpoints(tmp_path) == {"checkpoint": 2}


def test_an_interrupt_while_a_checkpoint_is_written_ends_the_training(tmp_path: Path) -> None:
    interrupts: list[str] = []
    algorithm = CountingAlgorithm([1.0] * 9, while_saving=lambda: interrupts.append("Ctrl-C"))

    history = trained(
        algorithm,
        stop_iters=9,
        checkpoint_dir=tmp_path / "checkpoint",
        checkpoint_every=3,
        is_interrupted=lambda: bool(interrupts),
    )

    assert len(history) == 3
    assert checkpoints(tmp_path)["checkpoint"] == 3


def test_checkpoints_are_written_every_n_iterations_and_the_newest_are_kept(tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "checkpoint_dir": tmp_path / "checkpoint",
        "checkpoint_every": 2,
        "keep": 3,
    }
    (tmp_path / "checkpoint-1-notes").mkdir()

    trained(CountingAlgorithm([1.0] * 9), stop_iters=9, **run)

    (tmp_path / "checkpoint-1-notes").rmdir()
    assert checkpoints(tmp_path) == {
        "checkpoint": 9,
        "checkpoint-000006": 6,
        "checkpoint-000008": 8,
        "checkpoint-best": 2,
    }


def test_the_best_checkpoint_is_that_of_the_highest_mean_return(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", "checkpoint_every": 1}

    trained(CountingAlgorithm([1.0, math.nan, 3.0, 2.0]), stop_iters=4, **run)

    assert checkpoints(tmp_path) == {"checkpoint": 4, "checkpoint-best": 3}


def test_the_best_checkpoint_is_that_of_the_best_evaluation_also_across_a_pause(
    tmp_path: Path,
) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", "evaluate_every": 2}
    first = CountingAlgorithm([9.0, 1.0, 1.0], [None, 5.0, 5.0])
    second = CountingAlgorithm([9.0] * 3, [4.0, 4.0, 6.0])

    history = trained(first, stop_iters=3, **run)
    before = checkpoints(tmp_path)
    history += trained(second, stop_iters=5, resume=tmp_path / "checkpoint", **run)
    between = checkpoints(tmp_path)
    history += trained(second, stop_iters=6, resume=tmp_path / "checkpoint", **run)

    evaluated = {each.iteration: each.evaluation_return_mean for each in history}
    assert {n: mean for n, mean in evaluated.items() if mean == mean} == {2: 5.0, 4: 4.0, 6: 6.0}
    assert before == {"checkpoint": 3, "checkpoint-best": 2}
    assert between == {"checkpoint": 5, "checkpoint-best": 2}
    assert checkpoints(tmp_path) == {"checkpoint": 6, "checkpoint-best": 6}


def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint"}

    first = trained(CountingAlgorithm([1.0, 2.0]), stop_iters=2, **run)
    second = trained(
        CountingAlgorithm([3.0, 4.0]), stop_iters=4, resume=tmp_path / "checkpoint", **run
    )

    whole = [*first, *second]
    assert [each.iteration for each in whole] == [1, 2, 3, 4]
    assert [each.env_steps for each in whole] == [100, 200, 300, 400]
    assert [each.return_mean for each in whole] == [1.0, 2.0, 3.0, 4.0]
    assert all(former.wall_s < later.wall_s for former, later in itertools.pairwise(whole))
    assert [each.iteration for each in saved_progress(tmp_path / "checkpoint")] == [1, 2, 3, 4]


def test_trainings_in_folders_of_similar_names_are_none_of_its_own(tmp_path: Path) -> None:
    for name in ("ppo-2", "ppo-20261127"):
        trained(CountingAlgorithm([1.0, 2.0]), stop_iters=2, checkpoint_dir=tmp_path / name)
    with pytest.raises(ConfigurationError, match="is no checkpoint that a training can go on from"):
        trained(CountingAlgorithm([3.0]), stop_iters=3, resume=tmp_path / "ppo")

    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "ppo", "checkpoint_every": 1, "keep": 1}
    trained(CountingAlgorithm([1.0, 2.0, 3.0]), stop_iters=3, **run)

    found = checkpoints(tmp_path)
    assert found.pop("ppo-best") == 3
    assert found == {"ppo": 3, "ppo-2": 2, "ppo-20261127": 2}


def test_a_new_training_leaves_the_checkpoints_of_a_former_one_alone(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "ppo", "checkpoint_every": 1, "keep": 3}
    trained(CountingAlgorithm([1.0, 9.0, 3.0]), stop_iters=3, **run)
    (tmp_path / "ppo").rename(tmp_path / "final")
    before = checkpoints(tmp_path)

    with pytest.raises(ConfigurationError, match=r"ppo-best.* beside .* are of another training"):
        trained(CountingAlgorithm([4.0]), stop_iters=1, checkpoint_dir=tmp_path / "ppo")

    assert (
        checkpoints(tmp_path)
        == before
        == {"final": 3, "ppo-000001": 1, "ppo-000002": 2, "ppo-best": 2}
    )


def test_a_training_goes_back_to_its_best_checkpoint(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "ppo", "checkpoint_every": 1}
    trained(CountingAlgorithm([1.0, 9.0, 3.0]), stop_iters=3, **run)
    shutil.rmtree(tmp_path / "ppo")

    again = trained(CountingAlgorithm([5.0]), stop_iters=3, resume=tmp_path / "ppo-best", **run)

    assert [each.iteration for each in again] == [3]
    assert checkpoints(tmp_path) == {"ppo": 3, "ppo-best": 2}


def kill() -> None:
    raise KeyboardInterrupt


def test_a_kill_while_a_checkpoint_is_written_leaves_the_former_one(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint"}
    trained(CountingAlgorithm([1.0]), stop_iters=1, **run)

    with pytest.raises(KeyboardInterrupt):
        trained(
            CountingAlgorithm([2.0], while_saving=kill),
            stop_iters=2,
            resume=tmp_path / "checkpoint",
            **run,
        )

    assert saved_in(tmp_path / "checkpoint") == 1
    again = trained(CountingAlgorithm([3.0]), stop_iters=2, resume=tmp_path / "checkpoint", **run)
    assert [each.iteration for each in again] == [2]
    assert checkpoints(tmp_path) == {"checkpoint": 2}


def test_a_full_disk_names_the_remedy_and_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    def fail_from_the_second_on() -> None:
        if (tmp_path / "checkpoint").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigurationError, match=r"No space left on device.*--resume"):
        trained(
            CountingAlgorithm([1.0, 2.0], while_saving=fail_from_the_second_on),
            stop_iters=2,
            checkpoint_dir=tmp_path / "checkpoint",
            checkpoint_every=1,
        )

    assert checkpoints(tmp_path)["checkpoint"] == 1
    assert not (tmp_path / "checkpoint.partial").exists()


def test_a_kill_between_two_renames_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint"}
    trained(CountingAlgorithm([1.0]), stop_iters=1, **run)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint-000001")

    again = trained(CountingAlgorithm([2.0]), stop_iters=2, resume=tmp_path / "checkpoint", **run)

    assert [each.iteration for each in again] == [2]
    assert checkpoints(tmp_path) == {"checkpoint": 2}


DAMAGED = ["", "[]", "5", "{", '[{"iteration": 3}]', '[{"iteration": 3, "colour": 1}]', "\0"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_checkpoint_is_moved_aside_and_a_former_one_goes_on(
    text: str, tmp_path: Path
) -> None:
    run: dict[str, Any] = {
        "checkpoint_dir": tmp_path / "checkpoint",
        "checkpoint_every": 2,
        "keep": 2,
    }
    trained(CountingAlgorithm([1.0] * 3), stop_iters=3, **run)
    (tmp_path / "checkpoint" / "training.json").write_text(text)

    again = trained(CountingAlgorithm([1.0]), stop_iters=3, resume=tmp_path / "checkpoint", **run)

    assert [each.iteration for each in again] == [3]
    assert checkpoints(tmp_path) == {
        "checkpoint": 3,
        "checkpoint-000002": 2,
        "checkpoint-best": 2,
        "checkpoint.replaced": 3,
    }


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_checkpoint_without_a_former_one_is_named(text: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint"}
    trained(CountingAlgorithm([1.0]), stop_iters=1, **run)
    (tmp_path / "checkpoint" / "training.json").write_text(text)

    with pytest.raises(ConfigurationError, match=r"json is damaged, .* name one that train has"):
        trained(CountingAlgorithm([1.0]), stop_iters=2, resume=tmp_path / "checkpoint", **run)


def test_a_checkpoint_without_its_progress_is_moved_aside(tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "checkpoint_dir": tmp_path / "checkpoint",
        "checkpoint_every": 2,
        "keep": 2,
    }
    trained(CountingAlgorithm([1.0] * 3), stop_iters=3, **run)
    (tmp_path / "checkpoint" / "training.json").unlink()

    trained(CountingAlgorithm([1.0] * 3), stop_iters=5, resume=tmp_path / "checkpoint", **run)

    assert checkpoints(tmp_path) == {
        "checkpoint": 5,
        "checkpoint-000004": 4,
        "checkpoint-best": 2,
        "checkpoint.replaced": 3,
    }


def test_a_kill_while_the_best_checkpoint_is_replaced_keeps_the_former_one(tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", "checkpoint_every": 1}
    trained(CountingAlgorithm([5.0, 1.0]), stop_iters=2, **run)
    # As it is between the two renames.
    (tmp_path / "checkpoint-best").rename(tmp_path / "checkpoint-best.replaced")

    trained(CountingAlgorithm([4.0]), stop_iters=3, resume=tmp_path / "checkpoint", **run)
    assert checkpoints(tmp_path) == {"checkpoint": 3, "checkpoint-best": 1}

    trained(CountingAlgorithm([9.0]), stop_iters=4, resume=tmp_path / "checkpoint", **run)
    assert checkpoints(tmp_path) == {"checkpoint": 4, "checkpoint-best": 4}


def test_the_newest_are_kept_across_pauses_also_where_each_is_written_at_an_end(
    tmp_path: Path,
) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", "keep": 2}
    trained(CountingAlgorithm([1.0]), stop_iters=1, **run)

    for goal in (2, 3):
        resumed = CountingAlgorithm([1.0])
        trained(resumed, stop_iters=goal, resume=tmp_path / "checkpoint", **run)

    assert checkpoints(tmp_path) == {"checkpoint": 3, "checkpoint-000002": 2}


def test_a_goal_that_was_reached_is_refused(tmp_path: Path) -> None:
    run: dict[str, Any] = {"stop_iters": 2, "checkpoint_dir": tmp_path / "checkpoint"}
    trained(CountingAlgorithm([1.0, 2.0]), **run)

    with pytest.raises(ConfigurationError, match=r"had 2 iterations, 200 env .* give a later goal"):
        trained(CountingAlgorithm([3.0]), resume=tmp_path / "checkpoint", **run)


def test_a_checkpoint_does_not_replace_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()

    with pytest.raises(ConfigurationError, match="has contents, which a checkpoint would replace"):
        trained(CountingAlgorithm([1.0]), stop_iters=1, checkpoint_dir=tmp_path)


@pytest.mark.parametrize("option", ["keep", "checkpoint_every"])
def test_a_number_below_one_is_refused(option: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", option: 0}

    with pytest.raises(ConfigurationError, match=f"{option}=0 must be a whole number"):
        trained(CountingAlgorithm([1.0]), stop_iters=1, **run)


def test_a_folder_that_is_no_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no training\.json; name one that train"):
        trained(CountingAlgorithm([1.0]), stop_iters=1, resume=tmp_path)


BOX: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (2,))


def learners(algorithm: AlgorithmConfig, **settings: Any) -> Any:
    config = algorithm.copy().learners(num_learners=0).training(**settings)
    return config.build_learner_group(spaces={DEFAULT_MODULE_ID: (BOX, BOX)})


def progressed(group: Any, checkpoint: Path, *, resume: bool) -> None:
    algorithm: Any = CountingAlgorithm([1.0])
    algorithm.learner_group = group
    goals = {"stop_iters": 2, "resume": checkpoint} if resume else {"stop_iters": 1}
    trained(algorithm, checkpoint_dir=checkpoint, **goals)


@pytest.mark.parametrize(
    ("algorithm", "coefficient"),
    [
        (PPOConfig(), "curr_kl_coeffs_per_module"),
        (SACConfig(), "curr_log_alpha"),
        (MARWILConfig(), "moving_avg_sqd_adv_norms_per_module"),
    ],
)
def test_a_training_goes_on_with_the_coefficients_that_rllib_leaves_out(
    algorithm: AlgorithmConfig, coefficient: str, tmp_path: Path
) -> None:
    def value(group: Any) -> Any:
        return getattr(group._learner, coefficient)[DEFAULT_MODULE_ID]

    first, second = learners(algorithm), learners(algorithm)
    value(first).data.fill_(0.0123)
    progressed(first, tmp_path / "checkpoint", resume=False)
    former = value(second)
    assert former.tolist() != value(first).tolist()
    progressed(second, tmp_path / "checkpoint", resume=True)

    assert value(second) is former  # its optimizer has this one
    assert former.tolist() == value(first).tolist()


def test_a_training_goes_on_where_the_schedule_of_its_entropy_was(tmp_path: Path) -> None:
    schedule = [[0, 0.5], [200, 0.0]]
    first, second = (learners(PPOConfig(), entropy_coeff=schedule) for _ in range(2))
    progressed(first, tmp_path / "checkpoint", resume=False)
    progressed(second, tmp_path / "checkpoint", resume=True)

    schedulers = second._learner.entropy_coeff_schedulers_per_module
    assert schedulers[DEFAULT_MODULE_ID].get_current_value() == pytest.approx(0.25)


def test_a_learner_that_cannot_take_its_coefficients_ends_the_training(tmp_path: Path) -> None:
    class Broken:
        def foreach_learner(self, function: Any) -> list[Any]:
            error = RuntimeError("no memory is left on the GPU")
            return [SimpleNamespace(get=lambda: error)]  # as Ray hands errors over

    progressed(learners(SACConfig()), tmp_path / "checkpoint", resume=False)
    with pytest.raises(RuntimeError, match="no memory is left"):
        progressed(Broken(), tmp_path / "checkpoint", resume=True)


def test_a_checkpoint_without_coefficients_goes_on_with_those_of_the_config(tmp_path: Path) -> None:
    progressed(learners(SACConfig()), tmp_path / "checkpoint", resume=False)
    (tmp_path / "checkpoint" / "coefficients.json").unlink()
    group = learners(SACConfig(), initial_alpha=0.5)
    progressed(group, tmp_path / "checkpoint", resume=True)

    alpha = group._learner.curr_log_alpha[DEFAULT_MODULE_ID]
    assert alpha.exp().tolist() == pytest.approx([0.5])


def points(*iterations: int) -> Iterator[TrainingProgress]:
    for n in iterations:
        yield TrainingProgress(n, 100 * n, 50.0, math.nan if n == 1 else float(n), n, n / 2, 0)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_coefficients_that_cannot_be_read_are_named_before_anything_is_restored(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    trained(CountingAlgorithm([1.0]), stop_iters=1, checkpoint_dir=tmp_path / "checkpoint")
    put(make, tmp_path / "checkpoint" / "coefficients.json")
    algorithm: Any = SimpleNamespace()

    with pytest.raises(ConfigurationError, match=r"checkpoint cannot be read .*another checkpoint"):
        restore(algorithm, tmp_path / "checkpoint", 100)


@pytest.mark.parametrize("make", (IRREGULAR | NONSENSE).values(), ids=IRREGULAR | NONSENSE)
def test_an_earlier_checkpoint_is_found_if_the_newest_one_cannot_be_read(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    run: dict[str, Any] = {"checkpoint_dir": tmp_path / "checkpoint", "checkpoint_every": 1}
    trained(CountingAlgorithm([1.0, 2.0]), stop_iters=2, keep=2, **run)
    put(make, tmp_path / "checkpoint" / "training.json")

    assert newest_checkpoint(tmp_path / "checkpoint")[0].name == "checkpoint-000001"


def test_a_link_is_not_taken_for_an_earlier_checkpoint(tmp_path: Path) -> None:
    trained(CountingAlgorithm([1.0]), stop_iters=1, checkpoint_dir=tmp_path / "private")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-000001").symlink_to(tmp_path / "private")

    with pytest.raises(ConfigurationError, match="is no checkpoint"):
        newest_checkpoint(tmp_path / "run" / "checkpoint")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_put_where_the_csv_file_begins_is_left_alone(kind: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("own")
    at = tmp_path / "run" / "progress.csv.partial"
    at.parent.mkdir()
    os.mkfifo(at) if kind == "pipe" else at.symlink_to(tmp_path / "own")

    run = trained(CountingAlgorithm([1.0]), stop_iters=1, checkpoint_dir=tmp_path / "checkpoint")
    assert len(list(tracked(iter(run), at.parent))) == 1

    assert (tmp_path / "own").read_text() == "own"
    assert (tmp_path / "run" / "progress.csv").read_text().count("\n") == 2


def test_each_iteration_is_in_the_csv_file_when_it_is_yielded(tmp_path: Path) -> None:
    seen = [rows(tmp_path)[-1] for _ in tracked(points(1, 2), tmp_path)]

    assert [row["iteration"] for row in seen] == ["1", "2"]
    assert seen[0].items() >= {"env_steps": "100", "return_mean": "nan", "wall_s": "0.5"}.items()
    assert seen[1].items() >= {"episodes": "2", "evaluation_return_mean": "nan"}.items()


def test_the_csv_file_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    list(tracked(points(1, 2, 3), tmp_path))

    list(tracked(points(3, 4), tmp_path, former=list(points(1, 2))))

    assert [row["iteration"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.csv"]


def test_a_training_that_fails_at_once_leaves_no_file(tmp_path: Path) -> None:
    list(tracked(points(), tmp_path, tensorboard=True))

    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with room_for(10):
        assert len(list(tracked(points(1, 2, 3), tmp_path))) == 3

    (record,) = caplog.records
    assert "progress.csv is not written any more" in record.getMessage()


def test_a_tracked_training_is_closed_with_what_reads_it(tmp_path: Path) -> None:
    run = points(1, 2)
    reader = tracked(run, tmp_path)
    next(reader)

    del reader

    assert list(run) == []


def events(folder: Path) -> Iterator[Any]:
    """Yield each event in the only event file of TensorBoard."""
    (file,) = folder.glob("events.out.tfevents.*")
    left = file.read_bytes()
    while left:  # a record: its length, a checksum, an event, a checksum
        (length,) = struct.unpack("<Q", left[:8])
        yield Event.FromString(left[12 : 12 + length])
        left = left[16 + length :]


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Return name, step and value of each scalar in the event file."""
    return [
        (value.tag, event.step, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


def test_tensorboard_has_what_is_known_over_env_steps_when_it_is_yielded(tmp_path: Path) -> None:
    seen = [scalars(tmp_path) for _ in tracked(points(1, 2), tmp_path, tensorboard=True)]

    assert ("wall_s", 100, 0.5) in seen[0]
    assert [each for each in seen[1] if each[0] == "return_mean"] == [("return_mean", 200, 2.0)]
    assert not [name for name, *_ in seen[1] if name in {"env_steps", "evaluation_return_mean"}]


def test_tensorboard_drops_later_steps_than_those_of_the_checkpoint(tmp_path: Path) -> None:
    list(tracked(points(3), tmp_path, former=list(points(1, 2)), tensorboard=True))

    starts = [each.step for each in events(tmp_path) if each.HasField("session_log")]
    assert starts == [201]
    assert [step for name, step, _ in scalars(tmp_path) if name == "wall_s"] == [300]
    assert SessionLog.START in {each.session_log.status for each in events(tmp_path)}


def test_a_full_disk_ends_the_event_file_and_not_the_training_whose_thread_writes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = threading.enumerate()

    with room_for(400):  # as a thread of its own died, the training would wait for it for ever
        run = tracked(points(*range(1, 7)), tmp_path, tensorboard=True)
        during = [threading.enumerate() for _ in run]

    (record,) = caplog.records
    assert "TensorBoard's event file is not written any more" in record.getMessage()
    assert len(rows(tmp_path)) == 6
    assert during == [before] * 6


def test_progress_has_the_first_failure_that_truncated_episodes_of_a_runner() -> None:
    asked = []

    def foreach_env_runner(ask: Any, **_: Any) -> list[Any]:
        asked.append(ask)
        other = SimpleNamespace(first_failure="")
        failing = SimpleNamespace(first_failure="lane 3: it gave nan")
        return [ask(runner) for runner in (SimpleNamespace(), other, failing)]

    cut = iter([0, 2, 4])
    algorithm = SimpleNamespace(
        train=lambda: {"env_runners": {"num_episodes_interrupted_lifetime": next(cut)}},
        env_runner_group=SimpleNamespace(foreach_env_runner=foreach_env_runner),
        stop=lambda: None,
    )
    config: Any = SimpleNamespace(build_algo=lambda: algorithm, evaluation_interval=None)

    history = list(train(config, stop_iters=3))

    reported = "lane 3: it gave nan"
    assert [progress.first_failure for progress in history] == ["", reported, reported]
    assert len(asked) == 1


def test_an_unknown_algorithm_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'A2C' is not one of APPO, DQN, IMPALA, PPO"):
        algorithm_config("A2C")


@pytest.mark.parametrize("name", ["APPO", "DQN", "IMPALA", "PPO", "SAC", "ppo"])
def test_algorithms_are_found_by_name(name: str) -> None:
    assert algorithm_config(name).algo_class.__name__ == name.upper()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_the_learning_curve_is_drawn_through_nothing_that_is_there(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("own")
    at = tmp_path / "curve.png"
    os.mkfifo(at) if kind == "pipe" else at.symlink_to(tmp_path / "own")

    learning_curve(list(points(1, 2)), at, title="PPO")

    assert (tmp_path / "own").read_text() == "own"
    assert at.read_bytes().startswith(b"\x89PNG")


def test_the_learning_curve_is_a_picture(tmp_path: Path) -> None:
    points = [TrainingProgress(n, 100 * n, 10.0, float(n), n, n / 2, 0) for n in range(1, 4)]

    learning_curve(points, tmp_path / "curve.png", title="a title", goal=2.0)

    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
