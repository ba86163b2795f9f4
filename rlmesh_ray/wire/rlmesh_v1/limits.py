"""Size limits of a session's messages, computed from its spaces.

Receivers refuse larger messages, so that a peer cannot exhaust their memory, and accept smaller
ones, however large the environment is. Options, infos and frames have no bound in the contract, and
get a fixed allowance.
"""

import math

from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import DictSpec, DiscreteSpec, SpaceSpec, TextSpec, TupleSpec, leaves

DEFAULT_MESSAGE_BYTES = 2**28
"""Limit where no contract is known."""
MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message of protobuf, and largest limit of gRPC."""

_OPTIONS_BYTES = 2**20
# A gRPC server's default limit, for handshakes, contracts with metadata, and long episode ids.
_MODEL_REST_BYTES = 2**22
_INFOS_BYTES = 2**26
# Seed, index and episode id; reward, flags, episode id and its record without infos.
_LANE_REQUEST_BYTES = 64
_LANE_RESPONSE_BYTES = 512
_PREFIX_BYTES = 6  # a field's number below 16, and a length below 2 GiB
_INTEGER_BYTES = 11
_BOUNDS_BYTES = 16  # of an element: two doubles
# Too long a text is a range violation: it must arrive to be delivered with a warning.
_TEXT_SLACK = 4
_TEXT_SLACK_BYTES = 2**12
_UTF8_BYTES = 4  # of the longest character


def max_request_bytes(contract: EnvContract) -> int:
    """Return the size limit of requests: an action batch, and 1 MiB for the rest."""
    action = max_batch_bytes(contract.action_space, contract.num_envs)
    return _capped(action + contract.num_envs * _LANE_REQUEST_BYTES + _OPTIONS_BYTES)


def max_response_bytes(contract: EnvContract) -> int:
    """Return the size limit of responses.

    It allows an observation batch, twice as much again in the infos (where vectors keep the
    observations of ended episodes), and 64 MiB of other infos, or for a frame.
    """
    observation = max_batch_bytes(contract.observation_space, contract.num_envs)
    return _capped(3 * observation + contract.num_envs * _LANE_RESPONSE_BYTES + _INFOS_BYTES)


def max_predict_bytes(observation_space: SpaceSpec, num_rows: int) -> int:
    """Return the size limit of messages to a policy of one observation space, in both generations.

    It allows an observation batch and its slots, or a contract with elementwise bounds; and 4 MiB
    for the rest.
    """
    num_elements = sum(math.prod(leaf.shape) for leaf in leaves(observation_space))
    batch = max_batch_bytes(observation_space, num_rows) + num_rows * _LANE_REQUEST_BYTES
    return _capped(batch + num_elements * _BOUNDS_BYTES + _MODEL_REST_BYTES)


def max_batch_bytes(spec: SpaceSpec, num_lanes: int) -> int:
    if isinstance(spec, (DictSpec, TupleSpec, TextSpec)):
        return num_lanes * _field(_node(spec))
    return num_lanes * leaves(spec)[0].lane_bytes


def _node(spec: SpaceSpec) -> int:
    match spec:
        case DictSpec(items):
            entries = (_field(len(key.encode())) + _field(_node(part)) for key, part in items)
            return _field(sum(map(_field, entries)))
        case TupleSpec(parts):
            return _field(sum(_field(_node(part)) for part in parts))
        case TextSpec():
            return _field(spec.max_length * _UTF8_BYTES * _TEXT_SLACK + _TEXT_SLACK_BYTES)
        case DiscreteSpec():
            return _INTEGER_BYTES
    return _field(leaves(spec)[0].lane_bytes)


def _field(size_bytes: int) -> int:
    return size_bytes + _PREFIX_BYTES


def _capped(size_bytes: int) -> int:
    return min(size_bytes, MAX_MESSAGE_BYTES)
