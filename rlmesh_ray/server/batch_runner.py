"""Runs one batch of predictions, from bytes to bytes, and measures it.

The requests of a batch may have different dialects: each is read and answered in its own. They do
not share their errors: a batch that fails is run again request by request, as far as the policy
allows that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.server.batch_schema import Actions, PredictionRequest
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.policy_executor import result_or_error


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class BatchResult:
    """The answers to a batch, and where its time went."""

    answers: Sequence[Actions | RlmeshError] = field(default_factory=list)
    """Each request's actions, or the error of that request."""
    decode_ns: int = 0
    """Time in which its observations were read and checked."""
    forward_ns: int = 0
    """Time within ``Policy.predict``."""
    encode_ns: int = 0
    """Time in which its actions were checked and written."""


def run_batch(policy: Policy, parts: Sequence[PredictionRequest]) -> BatchResult:
    """Have the policy choose actions for a batch. Never raises.

    Args:
        policy: Not in use by another thread.
        parts: At least one, all of one group.
    """
    result = BatchResult()
    try:
        result.answers = _answers(policy, parts, result)
    except BaseException as error:  # noqa: BLE001  # each request gets an answer
        name = type(error).__name__
        failure = PolicyError(f"the batch could not be run, {name}: {text_of(error)}")
        result.answers = [failure] * len(parts)
    return result


def _answers(
    policy: Policy, parts: Sequence[PredictionRequest], result: BatchResult
) -> Sequence[Actions | RlmeshError]:
    """Return the answers; the times are added to ``result``."""
    schema = parts[0].schema
    codecs = schema.codecs(parts)
    counts = [len(part.slots) for part in parts]
    begun_ns = time.perf_counter_ns()
    rows = result_or_error(schema.rows, codecs, parts, counts)
    read_ns = time.perf_counter_ns()
    result.decode_ns += read_ns - begun_ns
    if isinstance(rows, RlmeshError):
        return _one_by_one(policy, parts, result, rows)
    actions = result_or_error(policy.predict, schema.contract, rows)
    chosen_ns = time.perf_counter_ns()
    result.forward_ns += chosen_ns - read_ns
    answers: Sequence[Actions | RlmeshError] | RlmeshError
    if isinstance(actions, RlmeshError):
        answers = actions
    else:
        # The policy's return value may be anything, and raise when it is read.
        answers = result_or_error(schema.answers, codecs, actions, parts, counts)
        result.encode_ns += time.perf_counter_ns() - chosen_ns
    if not isinstance(answers, RlmeshError):
        return answers
    if traits_of(policy).is_repeatable:
        return _one_by_one(policy, parts, result, answers)
    return [answers] * len(parts)


def _one_by_one(
    policy: Policy, parts: Sequence[PredictionRequest], result: BatchResult, error: RlmeshError
) -> Sequence[Actions | RlmeshError]:
    if len(parts) == 1:
        return [error]
    return [answer for part in parts for answer in _answers(policy, [part], result)]
