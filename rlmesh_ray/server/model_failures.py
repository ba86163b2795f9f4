"""How a model session says in band what went wrong."""

import logging
import traceback
from collections.abc import Mapping

from rlmesh_ray.errors import CapacityError, CodecError, ContractMismatchError, RlmeshError
from rlmesh_ray.protocol.messages import ModelErrorCode, ModelFailed, RouteRequest
from rlmesh_ray.server.error_text import clipped, text_of

_LOG = logging.getLogger(__name__)

_MOST_TRACE_CHARACTERS = 2**16

_CODES: Mapping[type[RlmeshError], ModelErrorCode] = {
    CodecError: ModelErrorCode.INVALID_REQUEST,
    ContractMismatchError: ModelErrorCode.INVALID_REQUEST,
    CapacityError: ModelErrorCode.BUSY,
}
"""Whatever is not here is the policy's fault."""


def failed(request: RouteRequest, error: RlmeshError) -> ModelFailed:
    """Return the answer to a request that ``error`` kept from being done; the session goes on.

    What is the policy's fault is logged, and told with its traceback.
    """
    code = _CODES.get(type(error), ModelErrorCode.INTERNAL)
    trace = ""
    if code is ModelErrorCode.INTERNAL:
        trace = clipped("".join(traceback.format_exception(error)), _MOST_TRACE_CHARACTERS)
        _LOG.warning("the policy failed: %s", text_of(error))
    return ModelFailed(
        request.request_id, code, text_of(error), is_recoverable=True, debug_info=trace
    )
