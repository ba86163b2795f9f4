"""One saboteur for each clause that binds an EnvService, under the clause's key.

The real server behind them hosts two lanes of the probe.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rlmesh_ray.compliance.probe import ACTION_SPACE, OBSERVATION_SPACE
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import GENERATION, HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EpisodeRecord,
    MalformedRequest,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import WARNING_KEY
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import value_pb2
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.handshake import ShutdownResponse
from tests.compliance.tampering import Abort, Sabotage

NUM_LANES = 2
OLD_EDITION = "2020.01"


# --- both services ---------------------------------------------------------------------


class TakesAnyGeneration(Sabotage):
    def offer(self, offer: HandshakeRequest) -> HandshakeRequest:
        return replace(offer, generation=GENERATION)


class TakesAnyEdition(Sabotage):
    def offer(self, offer: HandshakeRequest) -> HandshakeRequest:
        return replace(offer, editions=(*offer.editions, "2026.06"))


class SelectsTheOldest(Sabotage):
    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        selected = min((*offer.editions, "2026.06")) if OLD_EDITION in offer.editions else "2026.06"
        if not answer.compatible:
            selected = ""
        return replace(answer, editions=(OLD_EDITION, "2026.06"), selected_edition=selected)


class RefusesWithoutAReason(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return replace(answer, error_message="")


class InsistsOnACapability(Sabotage):
    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        if capabilities.SPACES_CORE in offer.capabilities:
            return answer
        return replace(answer, compatible=False, error_message="no capability", contract=None)


class TakesAnyText(Sabotage):
    def offer(self, offer: HandshakeRequest) -> HandshakeRequest:
        return replace(offer, spec_sha256="")


class EndsAfterRefusingShutdown(Sabotage):
    def shutdown(self, response: ShutdownResponse) -> ShutdownResponse:
        self.memory["is_gone"] = True
        return response

    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        if self.memory.get("is_gone"):
            raise Abort("gone")
        return answer


COMMON: dict[str, type[Sabotage]] = {
    "session.generation": TakesAnyGeneration,
    "session.mutual-edition": TakesAnyEdition,
    "session.highest-edition": SelectsTheOldest,
    "session.refusal": RefusesWithoutAReason,
    "session.capabilities": InsistsOnACapability,
    "shutdown.refusal": EndsAfterRefusingShutdown,
    "wire.pin": TakesAnyText,
}


# --- establishment ---------------------------------------------------------------------


class TellsTheContractToAnybody(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        if answer.contract is not None:
            self.memory["contract"] = answer.contract
        return replace(answer, contract=self.memory["contract"])


class ChangesTheContract(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        self.memory["count"] = self.memory.get("count", 0) + 1
        contract = answer.contract
        assert isinstance(contract, EnvContract)
        metadata = {**contract.metadata, "handshakes": self.memory["count"]}
        return replace(answer, contract=replace(contract, metadata=metadata))


# --- ordering --------------------------------------------------------------------------


class SwapsResponses(Sabotage):
    """Holds a response back behind the next one, while more are to come."""

    held: Any = None

    def response(self, response: Any) -> Iterable[Any]:
        if self.held is not None:
            swapped, self.held = [response, self.held], None
            return swapped
        if self.num_outstanding > 1:
            self.held = response
            return []
        return [response]


class RepeatsResponses(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [response, response] if isinstance(response, Rendered) else [response]


class BreaksOffInsteadOfAnError(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, EnvFailed) and "Reset" in response.message:
            raise Abort("no such lane")
        return [response]


# --- lanes -----------------------------------------------------------------------------


class TellsOneLaneLess(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, ResetDone):
            response = replace(response, episode_ids=response.episode_ids[:-1])
        return [response]


class GivesOneRewardLess(Sabotage):
    """In steps that end an episode."""

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone) and response.completed_episodes:
            response = replace(response, rewards=list(response.rewards)[:-1])
        return [response]


class MixesUpTheLanes(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            response = replace(response, terminated=response.terminated[::-1])
        return [response]


class ResetsOneLaneOnly(Sabotage):
    was_reset = False

    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Reset) and self.was_reset and not request.env_indices:
            request = replace(request, env_indices=(0,), seeds=request.seeds[:1])
        self.was_reset = self.was_reset or isinstance(request, Reset)
        return [request]


class CallsAnEarlyStepInternal(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, EnvFailed) and response.code is EnvErrorCode.NOT_READY:
            response = replace(response, code=EnvErrorCode.INTERNAL)
        return [response]


class CutsSeeds(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Reset) and len(request.seeds) > NUM_LANES:
            request = replace(request, seeds=request.seeds[:NUM_LANES])
        return [request]


class SeedsAllLanesAlike(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Reset) and len(request.seeds) == NUM_LANES:
            request = replace(request, seeds=(min(request.seeds), max(request.seeds)))
        return [request]


class GivesAllLanesOneId(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, ResetDone):
            response = replace(response, episode_ids=response.episode_ids[:1] * NUM_LANES)
        return [response]


class StepsOneLaneOnly(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            columns = _observed(response)
            columns[0][1] = 0  # the probe's count of steps
            response = replace(response, observation=_pack(OBSERVATION_SPACE, columns))
        return [response]


class DropsInfos(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            kept = {key: value for key, value in response.infos.items() if key == WARNING_KEY}
            response = replace(response, infos=kept)
        return [response]


# --- episodes --------------------------------------------------------------------------


class CountsOnAfterReset(Sabotage):
    num_resets = 0

    def response(self, response: Any) -> Iterable[Any]:
        self.num_resets += isinstance(response, ResetDone)
        if isinstance(response, Closed) and self.num_resets > 1:
            records = tuple(
                replace(record, step_count=record.step_count + 1)
                for record in response.final_episodes
            )
            response = replace(response, final_episodes=records)
        return [response]


class DoublesRewards(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [_with_records(response, _doubled)]


class TellsAnEndOneStepLate(Sabotage):
    late: tuple[EpisodeRecord, ...] = ()

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            late, self.late = self.late, response.completed_episodes
            response = replace(response, completed_episodes=late)
        return [response]


class ForgetsTheSeed(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [_with_records(response, lambda _one: {"seed": None})]


class EndsEpisodesInTheFuture(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [_with_records(response, lambda _one: {"end_timestamp_ns": 2**62})]


class KeepsLastInfosOfTruncatedEpisodes(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [_with_records(response, lambda one: {"final_info": {}} if one.truncated else {})]


class CountsOnAfterAnEnd(Sabotage):
    num_ended = 0

    def response(self, response: Any) -> Iterable[Any]:
        extra = self.num_ended
        self.num_ended += bool(getattr(response, "completed_episodes", ()))
        return [_with_records(response, lambda one: {"step_count": one.step_count + extra})]


class GivesTheIdBackLater(Sabotage):
    """An ended lane has an id again two steps after its end."""

    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__(memory)
        self.since: dict[int, int] = {}

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            self.since = {lane: count + 1 for lane, count in self.since.items()}
            self.since |= {one.env_index: 0 for one in response.completed_episodes}
            ids = list(response.episode_ids)
            for lane, count in self.since.items():
                ids[lane] = "anew" if count >= 2 else ids[lane]
            response = replace(response, episode_ids=tuple(ids))
        return [response]


class RenamesTheOtherLanes(Sabotage):
    """When a lane ends, the others' ids change."""

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone) and response.completed_episodes:
            ids = tuple(one and f"{one}-b" for one in response.episode_ids)
            response = replace(response, episode_ids=ids)
        return [response]


class TellsAllEpisodesAtClose(Sabotage):
    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__(memory)
        self.reported: list[EpisodeRecord] = []

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            self.reported += response.completed_episodes
        if isinstance(response, Closed):
            response = replace(response, final_episodes=(*response.final_episodes, *self.reported))
        return [response]


class KeepsTheIdOfAnEndedEpisode(Sabotage):
    """As rlmesh 0.1.0b3 does."""

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            ids = list(response.episode_ids)
            for record in response.completed_episodes:
                ids[record.env_index] = record.episode_id
            response = replace(response, episode_ids=tuple(ids))
        return [response]


class TracksWhatAnAutoresetStarts(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            known = {record.env_index for record in response.completed_episodes}
            ended = np.flatnonzero(_flags(response.terminated) | _flags(response.truncated))
            extra = tuple(
                EpisodeRecord(f"autoreset-{lane}", int(lane), 1, 0.0, True, False, 1, 2)
                for lane in ended
                if int(lane) not in known
            )
            response = replace(response, completed_episodes=(*response.completed_episodes, *extra))
        return [response]


class RewardsTheStepThatResets(Sabotage):
    has_ended = False

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            ended, self.has_ended = self.has_ended, any(response.terminated)
            if ended:
                response = replace(response, rewards=[1.0] * NUM_LANES)
        return [response]


# --- render, close, deadlines, errors, shutdown -------------------------------------------


class CutsPictures(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        is_picture = isinstance(response, Rendered) and response.png
        return [replace(response, png=response.png[:40]) if is_picture else response]


class DrawsNoPng(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [replace(response, png=b"GIF89a") if isinstance(response, Rendered) else response]


class ClosesWithoutRecords(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [replace(response, final_episodes=()) if isinstance(response, Closed) else response]


class ClosesWithWrongRewards(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Closed):
            records = tuple(
                replace(one, cumulative_reward=one.cumulative_reward + 1)
                for one in response.final_episodes
            )
            response = replace(response, final_episodes=records)
        return [response]


class AnswersBehindClose(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if not isinstance(response, Closed):
            return [response]
        return [response, EnvFailed("behind", EnvErrorCode.CLOSED, "closed", False)]


class IgnoresDeadlines(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        return [request if isinstance(request, Close) else _without_deadline(request)]


class IgnoresDeadlinesOfResets(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        return [_without_deadline(request) if isinstance(request, Reset) else request]


class DeliversTheLateResult(Sabotage):
    """The step after a TIMEOUT and a Reset is answered with what was late."""

    has_timed_out = False

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, EnvFailed) and response.code is EnvErrorCode.TIMEOUT:
            self.has_timed_out = True
        if isinstance(response, StepDone) and self.has_timed_out:
            response = replace(response, rewards=[0.0] * NUM_LANES)
        return [response]


class ForgetsInterruptedEpisodes(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, EnvFailed):
            response = replace(response, interrupted_episodes=())
        return [response]


class SaysNothingAboutErrors(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [replace(response, message="") if isinstance(response, EnvFailed) else response]


class GivesUpAfterAnError(Sabotage):
    has_failed = False

    def response(self, response: Any) -> Iterable[Any]:
        if self.has_failed and not isinstance(response, Closed):
            return [EnvFailed(response.request_id, EnvErrorCode.CLOSED, "gave up", False)]
        self.has_failed = isinstance(response, EnvFailed)
        return [response]


class EndsWithItsFirstSession(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        if "closed" in self.memory:
            raise Abort("gone")
        return answer

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Closed):
            self.memory["closed"] = True
        return [response]


# --- values ----------------------------------------------------------------------------


def lets_through(pattern: str) -> type[Sabotage]:
    """Return a saboteur that answers a rejection that says ``pattern`` with a step."""

    class LetsThrough(Sabotage):
        last: Any = None

        def response(self, response: Any) -> Iterable[Any]:
            if isinstance(response, EnvFailed) and re.search(pattern, response.message):
                return [_made_up_step(response.request_id, self.last)]
            if isinstance(response, ResetDone | StepDone):
                self.last = response
            return [response]

    LetsThrough.__name__ = f"lets_through({pattern!r})"
    return LetsThrough


class LetsNanThroughAtResets(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Reset):
            request = replace(request, options={})
        return [request]


class RoundsDeviantValues(Sabotage):
    """A value that is warned about is brought back into its bounds."""

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone) and _warnings(response):
            columns = _observed(response)
            columns[1] = np.clip(columns[1], 0.0, 1.0)
            response = replace(response, observation=_pack(OBSERVATION_SPACE, columns))
        return [response]


class CallsRejectionsRecoverable(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, EnvFailed):
            response = replace(response, is_recoverable=True)
        return [response]


def does_not_warn_about(pattern: str) -> type[Sabotage]:
    """Return a saboteur that leaves out the warnings that say ``pattern``."""

    class DoesNotWarn(Sabotage):
        def response(self, response: Any) -> Iterable[Any]:
            if isinstance(response, StepDone | ResetDone):
                reported = [text for text in _warnings(response) if not re.search(pattern, text)]
                response = _with_warnings(response, reported)
            return [response]

    DoesNotWarn.__name__ = f"does_not_warn_about({pattern!r})"
    return DoesNotWarn


class WarnsAboutInfinities(Sabotage):
    has_infinity = False

    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Step):
            with suppress(CodecError):
                ray = values.decode_batch(ACTION_SPACE, request.action, NUM_LANES)[2]
                self.has_infinity = bool(np.isinf(np.asarray(ray)).any())
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone) and self.has_infinity:
            response = _with_warnings(response, ["action.ray: is infinite"])
        return [response]


class ClipsActions(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Step):
            with suppress(CodecError):  # what does not decode is the server's to refuse
                columns = values.decode_batch(ACTION_SPACE, request.action, NUM_LANES)
                columns[1] = np.clip(np.asarray(columns[1]), -1.0, 1.0)
                request = replace(request, action=_pack(ACTION_SPACE, columns))
        return [request]


class SendsWideIntegers(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            batch = value_pb2.ValueList.FromString(response.observation)
            for node in batch.items:
                node.dict.entries["steps"].tensor += bytes(4)
            response = replace(response, observation=batch.SerializeToString())
        return [response]


class RoundsFloats(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            columns = _observed(response)
            columns[1] = columns[1].astype(np.float16).astype(np.float32)
            response = replace(response, observation=_pack(OBSERVATION_SPACE, columns))
        return [response]


class WarnsUnderAnotherKey(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone | ResetDone) and WARNING_KEY in response.infos:
            infos = dict(response.infos)
            infos["warning"] = infos.pop(WARNING_KEY)
            response = replace(response, infos=infos)
        return [response]


class WarnsAgainAndAgain(Sabotage):
    reported: list[str] = []  # noqa: RUF012  # replaced, never changed

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            self.reported = _warnings(response) or self.reported
            response = _with_warnings(response, self.reported)
        return [response]


class EndsTheSessionWithAWarning(Sabotage):
    has_warned = False

    def response(self, response: Any) -> Iterable[Any]:
        if self.has_warned and not isinstance(response, Closed):
            return [EnvFailed(response.request_id, EnvErrorCode.CLOSED, "was warned", False)]
        self.has_warned = isinstance(response, StepDone) and bool(_warnings(response))
        return [response]


# --- the wire --------------------------------------------------------------------------


class BreaksOffAtGarbage(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, MalformedRequest):
            raise Abort("cannot parse this")
        return [request]


class ServesNoStrangers(Sabotage):
    def joined(self, metadata: dict[str, str]) -> None:
        self.is_stranger = not metadata

    def request(self, request: Any) -> Iterable[Any]:
        if self.is_stranger:
            raise Abort("no session id")
        return [request]


class ForgetsTheOtherLanes(Sabotage):
    was_partial = False

    def request(self, request: Any) -> Iterable[Any]:
        self.was_partial |= isinstance(request, Reset) and bool(request.env_indices)
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Closed) and self.was_partial:
            records = tuple(replace(one, step_count=0) for one in response.final_episodes)
            response = replace(response, final_episodes=records)
        return [response]


class ResetsEverything(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Reset) and request.env_indices:
            request = replace(request, env_indices=(), seeds=())
        return [request]


class StepsEverything(Sabotage):
    def request(self, request: Any) -> Iterable[Any]:
        return [replace(request, env_indices=()) if isinstance(request, Step) else request]


SABOTEURS: dict[str, type[Sabotage]] = {
    **COMMON,
    "session.contract": TellsTheContractToAnybody,
    "session.contract-fixed": ChangesTheContract,
    "ordering.arrival": SwapsResponses,
    "ordering.one-response": RepeatsResponses,
    "ordering.in-band": BreaksOffInsteadOfAnError,
    "vector.width": TellsOneLaneLess,
    "vector.batches": lets_through("lanes, expected"),
    "vector.entries": GivesOneRewardLess,
    "vector.index-order": MixesUpTheLanes,
    "reset.all-lanes": ResetsOneLaneOnly,
    "reset.first": CallsAnEarlyStepInternal,
    "reset.seeds": CutsSeeds,
    "reset.response": GivesAllLanesOneId,
    "step.all-lanes": StepsOneLaneOnly,
    "step.response": DropsInfos,
    "episodes.begin": CountsOnAfterReset,
    "episodes.accrue": DoublesRewards,
    "episodes.complete": TellsAnEndOneStepLate,
    "episodes.metadata": ForgetsTheSeed,
    "episodes.once": TellsAllEpisodesAtClose,
    "episodes.empty-id": KeepsTheIdOfAnEndedEpisode,
    "episodes.no-restart": TracksWhatAnAutoresetStarts,
    "episodes.autoreset": RewardsTheStepThatResets,
    "render.frame": DrawsNoPng,
    "close.answer": ClosesWithoutRecords,
    "close.end": AnswersBehindClose,
    "timeout.in-band": IgnoresDeadlines,
    "errors.interrupted": ForgetsInterruptedEpisodes,
    "errors.content": SaysNothingAboutErrors,
    "errors.recoverable": GivesUpAfterAnError,
    "shutdown.distinct": EndsWithItsFirstSession,
    "structure.dict-keys": lets_through("no key"),
    "structure.box-shape": lets_through("box: (12|4) bytes"),
    "structure.multi-discrete-shape": lets_through("choices: .* bytes"),
    "structure.multi-binary-shape": lets_through("bits: .* bytes"),
    "structure.tuple-arity": lets_through("Tuple value"),
    "structure.discrete-domain": lets_through("command.* (above|below)"),
    "structure.multi-discrete-domain": lets_through("choices.* (above|below)"),
    "structure.nan": lets_through("box.* is NaN"),
    "structure.non-recoverable": CallsRejectionsRecoverable,
    "range.policy": does_not_warn_about("box:"),
    "range.infinite": WarnsAboutInfinities,
    "range.text": does_not_warn_about("text:"),
    "range.shared": does_not_warn_about("noise:"),
    "enforcement.observations": lets_through("observation"),
    "enforcement.actions": ClipsActions,
    "dtype.declared": SendsWideIntegers,
    "dtype.exact-bytes": lets_through("box: 16 bytes"),
    "dtype.integers": lets_through("0.5 cannot"),
    "dtype.floats": RoundsFloats,
    "warnings.place": WarnsUnderAnotherKey,
    "warnings.once": WarnsAgainAndAgain,
    "warnings.advisory": EndsTheSessionWithAWarning,
    "wire.unreadable": BreaksOffAtGarbage,
    "wire.bare-join": ServesNoStrangers,
    "wire.partial-reset": ResetsEverything,
    "wire.step-lanes": StepsEverything,
}


OTHERS: list[tuple[str, type[Sabotage]]] = [
    ("reset.seeds", SeedsAllLanesAlike),
    ("episodes.begin", CountsOnAfterAnEnd),
    ("episodes.metadata", EndsEpisodesInTheFuture),
    ("episodes.metadata", KeepsLastInfosOfTruncatedEpisodes),
    ("episodes.empty-id", GivesTheIdBackLater),
    ("episodes.empty-id", RenamesTheOtherLanes),
    ("render.frame", CutsPictures),
    ("close.answer", ClosesWithWrongRewards),
    ("timeout.in-band", IgnoresDeadlinesOfResets),
    ("timeout.in-band", DeliversTheLateResult),
    ("structure.discrete-domain", lets_through("command.* below")),
    ("structure.multi-discrete-domain", lets_through("choices.* below")),
    ("structure.box-shape", lets_through("box: 4 bytes")),
    ("structure.tuple-arity", lets_through("Tuple value has 3")),
    ("range.policy", does_not_warn_about("box: .* below")),
    ("range.policy", does_not_warn_about("box: inf")),
    ("range.text", does_not_warn_about("has 0 characters")),
    ("enforcement.observations", LetsNanThroughAtResets),
    ("dtype.integers", lets_through("1099511627776.* cannot")),
    ("warnings.advisory", RoundsDeviantValues),
    ("wire.partial-reset", ForgetsTheOtherLanes),
]
"""Other ways to break a clause."""


def _flags(mask: bytes) -> Any:
    return np.frombuffer(mask, np.uint8) != 0


def _without_deadline(request: Any) -> Any:
    return request if isinstance(request, MalformedRequest) else replace(request, timeout_ms=0)


def _observed(response: StepDone) -> list[Any]:
    columns = values.decode_batch(OBSERVATION_SPACE, response.observation, NUM_LANES)
    return [column if isinstance(column, tuple) else np.array(column) for column in columns]


def _pack(spec: SpaceSpec, columns: list[Column]) -> bytes:
    return values.encode_batch(spec, columns, NUM_LANES)


def _made_up_step(request_id: str, last: ResetDone | StepDone) -> StepDone:
    flags = bytes(NUM_LANES)
    return StepDone(
        request_id, last.observation, [0.0] * NUM_LANES, flags, flags, {}, (), last.episode_ids
    )


def _with_records(response: Any, changes: Callable[[EpisodeRecord], dict[str, Any]]) -> Any:
    if not isinstance(response, StepDone):
        return response
    records = tuple(replace(one, **changes(one)) for one in response.completed_episodes)
    return replace(response, completed_episodes=records)


def _warnings(response: StepDone | ResetDone) -> list[str]:
    by_lane: Any = response.infos.get(WARNING_KEY, [])
    return [text for texts in by_lane for text in texts or ()]


def _with_warnings(response: Any, reported: list[str]) -> Any:
    infos = {key: value for key, value in response.infos.items() if key != WARNING_KEY}
    return replace(response, infos={**infos, WARNING_KEY: reported} if reported else infos)


def _doubled(record: EpisodeRecord) -> dict[str, Any]:
    return {"cumulative_reward": 2 * record.cumulative_reward}
