"""The model of the text must object; that real sessions satisfy it is shown elsewhere."""

from typing import Any

import pytest

from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EpisodeRecord,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from tests.reference_session import EnvFailure, ReferenceSession, SimulatedStep

GOES_ON = SimulatedStep((1.0, 2.0), (False, False), (False, False))
ENDS = SimulatedStep((1.0, 2.0), (True, False), (False, False))
LOST = EnvFailure.LOST
LEFT = EpisodeRecord("b", 1, 0, 0.0, False, False, 1, 2, seed=6)


def started() -> ReferenceSession:
    reference = ReferenceSession(2)
    reference.judge(Reset("0", (5, 6)), ResetDone("0", b"", {}, ("a", "b")), None)
    return reference


def stepped(
    effect: SimulatedStep, *records: EpisodeRecord, ids: tuple[str, ...] = ("a", "b")
) -> StepDone:
    masks = bytes(effect.terminated), bytes(effect.truncated)
    return StepDone("1", b"", effect.rewards, *masks, {}, records, ids)


def ended(**changes: Any) -> EpisodeRecord:
    facts = {"step_count": 1, "cumulative_reward": 1.0, "terminated": True, "seed": 5, **changes}
    fields: dict[str, Any] = {
        "episode_id": "a",
        "env_index": 0,
        "truncated": False,
        "start_timestamp_ns": 1,
        "end_timestamp_ns": 2,
        **facts,
    }
    return EpisodeRecord(**fields)


def failed(*, is_recoverable: bool = True, records: tuple[EpisodeRecord, ...] = ()) -> EnvFailed:
    return EnvFailed("1", EnvErrorCode.INTERNAL, "why", is_recoverable, "", records)


CUT_OFF = tuple(
    ended(episode_id=name, env_index=lane, step_count=0, cumulative_reward=0.0, terminated=False,
          seed=5 + lane)
    for lane, name in enumerate("ab")
)  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "response", "effect"),
    [
        (Step("1", b""), stepped(GOES_ON), GOES_ON),
        (Step("1", b""), stepped(ENDS, ended(), ids=("", "b")), ENDS),
        (Step("1", b""), failed(records=CUT_OFF), LOST),
        (Step("1", b""), failed(is_recoverable=False, records=CUT_OFF), EnvFailure.NON_CONFORMING),
        (Reset("1", env_indices=(1,)), ResetDone("1", b"", {}, ("a", "c")), None),
        (Reset("1", env_indices=(2,)), failed(), None),
        (Render("1"), Rendered("1", None), None),
        (Close("1"), Closed("1", CUT_OFF), None),
    ],
)
def test_what_the_text_says_passes(request_: Any, response: Any, effect: Any) -> None:
    started().judge(request_, response, effect)


@pytest.mark.parametrize(
    ("request_", "response", "effect"),
    [
        (Step("2", b""), stepped(GOES_ON), GOES_ON),
        (Step("1", b""), Rendered("1", None), GOES_ON),
        (Step("1", b""), stepped(GOES_ON, ids=("a", "")), GOES_ON),
        (Step("1", b""), stepped(GOES_ON, ended()), GOES_ON),
        (Step("1", b""), stepped(ENDS, ids=("", "b")), ENDS),
        (Step("1", b""), stepped(ENDS, ended()), ENDS),
        (Step("1", b""), stepped(ENDS, ended(), ended(), ids=("", "b")), ENDS),
        (Step("1", b""), stepped(ENDS, ended(step_count=2), ids=("", "b")), ENDS),
        (Step("1", b""), stepped(ENDS, ended(seed=None), ids=("", "b")), ENDS),
        (Step("1", b""), stepped(ENDS, ended(terminated=False), ids=("", "b")), ENDS),
        (Step("1", b""), stepped(ENDS, ended(cumulative_reward=0.0), ids=("", "b")), ENDS),
        (Step("1", b""), failed(), LOST),
        (Step("1", b""), failed(is_recoverable=False, records=CUT_OFF), LOST),
        (Step("1", b""), failed(records=CUT_OFF), EnvFailure.NON_CONFORMING),
        (Step("1", b"", env_indices=(0,)), stepped(GOES_ON), GOES_ON),
        (Reset("1"), ResetDone("1", b"", {}, ("a", "c")), None),
        (Reset("1", env_indices=(1,)), ResetDone("1", b"", {}, ("c", "d")), None),
        (Reset("1"), ResetDone("1", b"", {}, ("c", "")), None),
        (Reset("1", env_indices=(2,)), failed(is_recoverable=False), None),
        (Reset("1", env_indices=(2,)), failed(records=(LEFT,)), None),
        (Close("1"), Closed("1"), None),
    ],
)
def test_what_the_text_does_not_say_is_objected_to(
    request_: Any, response: Any, effect: Any
) -> None:
    with pytest.raises(AssertionError):
        started().judge(request_, response, effect)


def test_a_step_before_the_first_reset_must_be_not_ready() -> None:
    with pytest.raises(AssertionError, match="Step before Reset"):
        ReferenceSession(2).judge(Step("1", b""), failed(), None)
