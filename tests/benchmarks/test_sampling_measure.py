import json

import pytest

from benchmarks.processes import Reading
from benchmarks.record import Record
from benchmarks.sampling.measure import GOALS, findings, our_side, task_line
from benchmarks.sampling.plan import TASKS, Rival, SamplingPlan, Task
from benchmarks.sampling.profile import spans_of
from benchmarks.sampling.run import RunnerTask

TASK = Task.CARTPOLE_64


def record(speeds: dict[str, float], task: Task = TASK) -> Record:
    made = Record(task, lambda _: None)
    for side, speed in speeds.items():
        made.add(task, side, 0, speed, "env-steps/s", Reading(speed, (), (), 0, (1,), 0))
    return made


def test_each_inference_and_rival_has_a_line() -> None:
    sides = {our_side("auto"): 90.0, our_side("torch"): 60.0, "RLlib": 20.0, "no policy": 180.0}
    sides |= {our_side("auto", 2): 120.0, our_side("torch", 2): 90.0}

    lines = findings(record(sides), SamplingPlan(), TASK)

    assert [(line.case, next(iter(line.comparisons.items()))[1].median) for line in lines] == [
        ("auto, against RLlib", 4.5),
        ("auto, against no policy", 0.5),
        ("auto in a shared worker, against RLlib", 6.0),
        ("auto in a shared worker, against no policy", pytest.approx(2 / 3)),
        ("torch, against RLlib", 3.0),
        ("torch, against no policy", pytest.approx(1 / 3)),
        ("torch in a shared worker, against RLlib", 4.5),
        ("torch in a shared worker, against no policy", 0.5),
    ]
    assert [line.is_met for line in lines] == [True, False, *[None] * 6]


def test_only_what_was_planned_has_a_line() -> None:
    plan = SamplingPlan(rivals=[Rival.BARE], inferences=["compiled"], sessions_per_worker=[1])

    (line,) = findings(record({our_side("compiled"): 90.0, "no policy": 180.0}), plan, TASK)

    assert line.goal is None


def test_a_peer_has_no_line_where_it_cannot_sample() -> None:
    plan = SamplingPlan([Rival.BARE, Rival.TORCHRL], inferences=["auto"], sessions_per_worker=[1])
    found = record({our_side("auto"): 90.0, "no policy": 180.0}, Task.FRAMES_8)

    (line,) = findings(found, plan, Task.FRAMES_8)

    assert (line.workload, line.case) == ("frames-8", "auto, against no policy")


def test_goals_are_of_tasks_and_defaults_that_exist() -> None:
    assert set(TASKS) == set(Task)
    assert {inference for _, inference, _, _ in GOALS} <= set(SamplingPlan().inferences)


@pytest.mark.parametrize("task", Task)
def test_a_task_is_sent_as_a_line(task: Task) -> None:
    sent = RunnerTask(**json.loads(task_line(task, "endpoint", "127.0.0.1:1", "torch")))

    assert (sent.address, sent.inference) == ("127.0.0.1:1", "torch")
    assert sent.num_envs % 2 == 0
    assert sent.timesteps / sent.num_envs > 8, "inference='auto' chooses after 8 batches"


def test_the_time_of_a_step_is_that_between_the_events_of_its_slot() -> None:
    events = [
        ("step", 0.0, 1.0, 7),
        ("step", 1.0, 2.0, 8),
        ("_process", 5.0, 6.0, 7),
        ("choose", 8.0, 12.0, 0),
        ("step", 13.0, 14.0, 7),
        ("_process", 20.0, 21.0, 8),
    ]

    assert spans_of(events) == {
        "step sent to answer taken": [4, 18],
        "answer taken to kept": [1, 1],
        "answer kept to forward pass": [2],
        "forward pass": [4],
        "forward pass to actions sent": [2],
    }
