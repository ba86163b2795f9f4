"""Specs and contracts to the messages of ``rlmesh_wire``, and back.

A spec from a peer is checked whole, as ``rlmesh_v1.specs`` does it.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, assert_never

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
from rlmesh_ray.wire._pb.rlmesh_wire.core.v1 import env_contract_pb2 as contract_pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1 import spaces_pb2 as pb
from rlmesh_ray.wire.protobuf import few
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta
from rlmesh_ray.wire.rlmesh_v1.specs import (
    SpecReader,
    fill_spec,
    read_spaces,
    typed_bounds,
    unbounded,
)

_NUMBERS = {name: pb.DataType.Value(f"DATA_TYPE_{name.upper()}") for name in DTYPES}


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
    return _SpecReader().spec(message)


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
    no_bounds = unbounded(size, low.dtype)
    if (spec.low, spec.high) == tuple(bound.tobytes() for bound in no_bounds):
        message.unbounded = True
    elif len(spec.low) == len(spec.high) == low.itemsize:
        message.uniform.low, message.uniform.high = spec.low, spec.high
    else:
        message.elementwise.low, message.elementwise.high = low.tobytes(), high.tobytes()


class _SpecReader(SpecReader):
    dtypes: ClassVar[Mapping[int, str]] = {number: name for name, number in _NUMBERS.items()}

    def bounds(
        self, message: Any, size: int, dtype: np.dtype[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        match message.WhichOneof("bounds"):
            case "uniform":
                return typed_bounds(message.uniform, "uniform", 1, size, dtype)
            case "elementwise":
                return typed_bounds(message.elementwise, "elementwise", size, size, dtype)
        return unbounded(size, dtype)

    def binary_axes(self, message: Any) -> int | tuple[int, ...]:
        shape = tuple(message.shape)
        return shape[0] if len(shape) == 1 else shape

    def counts(self, message: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        nvec = few(message.multi_discrete.nvec, "counts", MAX_COUNTS)
        # One count without an axis is a scalar; without a shape, several are a vector.
        return nvec, tuple(message.shape) or (() if len(nvec) == 1 else (len(nvec),))


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
    return _contract(message.spec, message.num_envs, mode, message.render_mode)


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
    return _contract(message, 1, AutoresetMode.DISABLED, "")


def _contract(
    spec: contract_pb.EnvSpec, num_envs: int, mode: AutoresetMode, render_mode: str
) -> EnvContract:
    metadata = decode_peer_meta(spec.metadata)
    metadata.pop(_MODE_KEY, None)
    observation_space, action_space = read_spaces(spec, num_envs, _SpecReader)
    return EnvContract(
        id=spec.id,
        observation_space=observation_space,
        action_space=action_space,
        num_envs=num_envs,
        autoreset_mode=mode,
        render_mode=render_mode,
        metadata=metadata,
    )
