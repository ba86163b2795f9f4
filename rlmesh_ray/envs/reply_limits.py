"""Limits the size of a worker's replies, so that the endpoint decodes and forwards them quickly.

The endpoint does so in its serving loop, while all other sessions wait. Here, in the worker and
under the request's deadline, large infos delay their own session only: they become what a client
would decode, within the limits of ``wire.rlmesh_v1.meta``.
"""

import dataclasses

from rlmesh_ray.envs.commands import CallReply, Outcome, ResetReply, StepReply
from rlmesh_ray.envs.worker_channel import decode, encode
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.validation import WARNING_KEY, warnings_as_texts

SMALL_BYTES = 2**16
"""A frame up to this size is never slow to decode."""
MAX_BYTES = 2**26
"""Approximate byte limit for text, bytes and arrays in the infos, beyond twice an observation."""
MAX_RESULT_BYTES = 2**24
"""Approximate byte limit for text, bytes and arrays in the results of a call."""
MAX_TEXT = 2**16
"""Characters kept of an error's message, from its start, and of its traceback, from its end."""


def encode_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the frame of ``reply``, limited (``limit_reply``) if it would be large."""
    try:
        frame = encode(reply)
        if len(frame) <= SMALL_BYTES:
            return frame
        reply = decode(frame)  # its objects are text now
    except RecursionError:  # nested deeper than pickle can follow
        pass
    return encode(limit_reply(reply, max_bytes))


def limit_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> Outcome:
    """Return a copy of ``reply`` with infos as a client decodes them.

    Results of a call are returned whole, or as a Failure.

    Args:
        reply: The environment's reply; unchanged.
        max_bytes: Byte limit for text, bytes and arrays in its infos together.
    """
    if isinstance(reply, Failure):
        return dataclasses.replace(
            reply, message=reply.message[:MAX_TEXT], debug_info=reply.debug_info[-MAX_TEXT:]
        )
    if not isinstance(reply, (CallReply, ResetReply, StepReply)):
        return reply
    # Late: it imports protobuf, which most workers do not need.
    from rlmesh_ray.wire.rlmesh_v1 import meta

    if isinstance(reply, CallReply):
        # Twice, since one entry gets half of the budget.
        budget = meta.MetaBudget(2 * MAX_RESULT_BYTES)
        results = meta.as_decoded({"": list(reply.results)}, budget)[""]
        if budget.left_out.keys() - {meta.TOO_DEEP}:
            return Failure(
                FailureKind.BAD_REQUEST,
                f"it was called, but its result is larger than {MAX_RESULT_BYTES >> 20} MiB or "
                f"{meta.MAX_NODES // 2} values; return less, or arrays in place of lists",
            )
        return CallReply(tuple(results))
    budget = meta.MetaBudget(max_bytes)
    infos = meta.as_decoded(reply.infos, budget)
    if warnings_as_texts(reply.infos) is not reply.infos:
        # Warnings, which are few, have another form in each dialect.
        infos |= {key: reply.infos[key] for key in (WARNING_KEY, f"_{WARNING_KEY}")}
    if isinstance(reply, ResetReply):
        return dataclasses.replace(reply, infos=infos)
    final_infos = {lane: meta.as_decoded(own, budget) for lane, own in reply.final_infos.items()}
    return dataclasses.replace(reply, infos=infos, final_infos=final_infos)
