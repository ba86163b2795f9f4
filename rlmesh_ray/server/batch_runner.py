"""One batch of predictions, from bytes to bytes; runs in the policy's thread.

Those who share a batch need not speak alike: each part is read and answered in its own language.

Those who share a batch do not share what is wrong with one of them: a batch that fails is run
again request by request, as far as the policy allows that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.server.batch_schema import BatchPart
from rlmesh_ray.server.error_text import text_of

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class BatchRunner:
    """Runs batches, and measures where the time goes."""

    policy: Policy
    forward_ns: int = 0
    """Time within ``Policy.predict`` in the latest batch."""
    decode_ns: int = 0
    """Time in which its observations were read, and looked at."""
    encode_ns: int = 0
    """Time in which its actions were looked at, and written."""

    def run(self, parts: Sequence[BatchPart]) -> Sequence[bytes | RlmeshError]:
        """Return each part's actions for the wire, or why there are none. Never raises.

        Args:
            parts: At least one, all of one group.
        """
        self.forward_ns = self.decode_ns = self.encode_ns = 0
        try:
            return self._run(parts)
        except BaseException as error:  # noqa: BLE001  # whoever waits gets an answer
            name = type(error).__name__
            failure = PolicyError(f"the batch could not be run, {name}: {text_of(error)}")
            return [failure] * len(parts)

    def _run(self, parts: Sequence[BatchPart]) -> Sequence[bytes | RlmeshError]:
        schema = parts[0].schema
        codecs = schema.codecs(parts)
        counts = [len(part.slots) for part in parts]
        begun_ns = time.perf_counter_ns()
        rows = result_or_error(schema.rows, codecs, parts, counts)
        read_ns = time.perf_counter_ns()
        self.decode_ns += read_ns - begun_ns
        if isinstance(rows, RlmeshError):
            return self._one_by_one(parts, rows)
        actions = result_or_error(self.policy.predict, schema.contract, rows)
        chosen_ns = time.perf_counter_ns()
        self.forward_ns += chosen_ns - read_ns
        if isinstance(actions, RlmeshError):
            if traits_of(self.policy).is_repeatable:
                return self._one_by_one(parts, actions)
            return [actions] * len(parts)
        # What the policy returned may be anything, and raise when it is looked at.
        answers = result_or_error(schema.answers, codecs, actions, counts)
        self.encode_ns += time.perf_counter_ns() - chosen_ns
        return [answers] * len(parts) if isinstance(answers, RlmeshError) else answers

    def _one_by_one(
        self, parts: Sequence[BatchPart], error: RlmeshError
    ) -> Sequence[bytes | RlmeshError]:
        if len(parts) == 1:
            return [error]
        return [result for part in parts for result in self._run([part])]


def result_or_error(function: Callable[..., ResultT], *arguments: object) -> ResultT | RlmeshError:
    """Call what belongs to the policy; return why it failed: the thread must go on.

    Returns:
        What the function returned; an RlmeshError as it was raised, or a PolicyError in place of
        anything else.
    """
    try:
        return function(*arguments)
    except RlmeshError as error:
        return error
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the policy's
        failure = PolicyError(f"the policy raised {type(error).__name__}: {text_of(error)}")
        failure.__cause__ = error  # with its trace
        return failure
