"""Specs and contracts to the messages of ``rlmesh_wire``, and back.

A spec from a peer is checked whole, as ``rlmesh_v1.specs`` does it.
"""

import math
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import (
    DTYPES,
    MAX_COUNTS,
    BoxSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
)
from rlmesh_ray.wire import validation
from rlmesh_ray.wire._pb.rlmesh_wire.core.v1 import env_contract_pb2 as contract_pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1 import spaces_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta
from rlmesh_ray.wire.rlmesh_v1.specs import SpecReader, fill_spec
from rlmesh_ray.wire.validation import named_space, require_width

_NUMBERS = {name: pb.DataType.Value(f"DATA_TYPE_{name.upper()}") for name in DTYPES}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def spec_to_proto(spec: SpaceSpec) -> pb.SpaceSpec:
    message = pb.SpaceSpec()
    fill_spec(message, spec, _fill_leaf)
    return message


def spec_from_proto(message: pb.SpaceSpec) -> SpaceSpec:
    """Return the spec that ``message`` describes.

    Raises:
        CodecError: It describes no space, one that NumPy cannot hold, or one whose values are
            larger than ``MAX_LANE_BYTES``.
    """
    return _SpecReader().spec(message, ())


def _fill_leaf(message: pb.SpaceSpec, spec: LeafSpec) -> None:
    match spec:
        case BoxSpec():
            _fill_array(message, spec.shape, spec.dtype)
            _fill_bounds(message.box, spec)
        case DiscreteSpec(n, start, dtype):
            _fill_array(message, (), dtype)
            message.discrete.n, message.discrete.start = n, start
        case MultiBinarySpec():
            _fill_array(message, spec.shape, "uint8")
            message.multi_binary.SetInParent()
        case MultiDiscreteSpec(nvec, shape, dtype):
            _fill_array(message, shape, dtype)
            message.multi_discrete.SetInParent()
            message.multi_discrete.nvec.extend(nvec)
        case TextSpec(min_length, max_length, charset):
            _fill_array(message, (), "uint8")
            message.text.min_length, message.text.max_length = min_length, max_length
            message.text.charset = charset
        case _:
            assert_never(spec)


def _fill_array(message: pb.SpaceSpec, shape: tuple[int, ...], dtype: str) -> None:
    message.shape.extend(shape)
    message.dtype = _NUMBERS[dtype]  # type: ignore[assignment]  # enums are ints


def _fill_bounds(message: pb.BoxSpec, spec: BoxSpec) -> None:
    low, high = spec.bounds()
    size = math.prod(spec.shape)
    unbounded = validation.unbounded(size, low.dtype)
    if (spec.low, spec.high) == tuple(bound.tobytes() for bound in unbounded):
        message.unbounded = True
    elif len(spec.low) == len(spec.high) == low.itemsize:
        message.uniform.low, message.uniform.high = spec.low, spec.high
    else:
        message.elementwise.low, message.elementwise.high = low.tobytes(), high.tobytes()


class _SpecReader(SpecReader):
    def leaf(self, kind: str | None, message: Any) -> LeafSpec:
        shape = tuple(message.shape)
        match kind:
            case "box":
                dtype = np.dtype(_dtype_name(message))
                self._budget.take(shape, dtype.itemsize)
                bounds = _bounds(message.box, math.prod(shape), dtype)
                return validation.box(shape, dtype, *bounds)
            case "discrete":
                own = message.discrete
                return validation.discrete(own.n, own.start, _integer_dtype(message))
            case "multi_binary":
                return validation.multi_binary(shape[0] if len(shape) == 1 else shape, self._budget)
            case "multi_discrete":
                counts = message.multi_discrete.nvec
                nvec = validation.few(counts, "counts", MAX_COUNTS)
                # One count without an axis is a scalar; without a shape, several are a vector.
                own_shape = shape or (() if len(nvec) == 1 else (len(nvec),))
                dtype_name = _integer_dtype(message)
                return validation.multi_discrete(nvec, own_shape, dtype_name, self._budget)
            case "text":
                text = message.text
                return validation.text(text.min_length, text.max_length, text.charset)
        raise CodecError("it names no kind of space that is known here")


def _dtype_name(message: pb.SpaceSpec) -> str:
    if message.dtype not in _NAMES:
        raise CodecError(f"dtype {message.dtype} is not supported")
    return _NAMES[message.dtype]


def _integer_dtype(message: pb.SpaceSpec) -> str:
    is_told = message.dtype != pb.DATA_TYPE_UNSPECIFIED
    return validation.require_integer(_dtype_name(message) if is_told else "int64")


def _bounds(
    message: pb.BoxSpec, size: int, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``(low, high)``, flat, little endian: ``size`` elements, or one that is all."""
    kind = message.WhichOneof("bounds")
    if kind is None or kind == "unbounded":
        return validation.unbounded(size, dtype)
    own = message.uniform if kind == "uniform" else message.elementwise
    count = 1 if kind == "uniform" else size
    low = validation.typed_bounds(own.low, kind, count, dtype)
    return low[:size], validation.typed_bounds(own.high, kind, count, dtype)[:size]


_MODE_NUMBERS = {
    AutoresetMode.NEXT_STEP: contract_pb.AUTORESET_MODE_NEXT_STEP,
    AutoresetMode.SAME_STEP: contract_pb.AUTORESET_MODE_SAME_STEP,
    AutoresetMode.DISABLED: contract_pb.AUTORESET_MODE_DISABLED,
}
_MODES = {number: mode for mode, number in _MODE_NUMBERS.items()} | {
    contract_pb.AUTORESET_MODE_UNSPECIFIED: AutoresetMode.DISABLED
}
_MODE_KEY = "autoreset_mode"
"""Key of the metadata where the released package's clients look for the mode, too."""


def contract_to_proto(contract: EnvContract) -> contract_pb.EnvContract:
    spec = env_spec_to_proto(contract)
    spec.metadata.entries[_MODE_KEY].str = contract.autoreset_mode.value
    return contract_pb.EnvContract(
        spec=spec,
        num_envs=contract.num_envs,
        render_mode=contract.render_mode,
        autoreset_mode=_MODE_NUMBERS[contract.autoreset_mode],
    )


def contract_from_proto(message: contract_pb.EnvContract) -> EnvContract:
    """Return the contract in ``message``.

    Raises:
        CodecError: A space makes no sense, the autoreset mode is unknown, or so many lanes have
            no place in one message.
    """
    if message.autoreset_mode not in _MODES:
        raise CodecError(f"autoreset mode {message.autoreset_mode} is not known")
    mode = _MODES[message.autoreset_mode]
    contract = _contract(message.spec, message.num_envs, mode, message.render_mode)
    return require_width(contract)


def env_spec_to_proto(contract: EnvContract) -> contract_pb.EnvSpec:
    return contract_pb.EnvSpec(
        id=contract.id,
        action_space=spec_to_proto(contract.action_space),
        observation_space=spec_to_proto(contract.observation_space),
        metadata=encode_meta(contract.metadata, tag_arrays=False),
    )


def env_spec_from_proto(message: contract_pb.EnvSpec) -> EnvContract:
    """Return the contract in ``message``, of one lane.

    Raises:
        CodecError: A space is malformed.
    """
    return require_width(_contract(message, 1, AutoresetMode.DISABLED, ""))


def _contract(
    spec: contract_pb.EnvSpec, num_envs: int, mode: AutoresetMode, render_mode: str
) -> EnvContract:
    metadata = decode_peer_meta(spec.metadata)
    metadata.pop(_MODE_KEY, None)
    return EnvContract(
        id=spec.id,
        observation_space=named_space("observation space", spec_from_proto, spec.observation_space),
        action_space=named_space("action space", spec_from_proto, spec.action_space),
        num_envs=num_envs,
        autoreset_mode=mode,
        render_mode=render_mode,
        metadata=metadata,
    )
