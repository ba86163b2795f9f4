"""Property with the contract as text: this package's clients get the exact spaces from it."""

from google.protobuf import json_format

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2
from rlmesh_ray.wire.rlmesh_v1.contract import contract_from_proto, contract_to_proto

CONTRACT = "rlmesh.contract"
"""Key of the property: a STRING, protobuf's JSON form of an ``rlmesh.env.v1.EnvContract``."""


def contract_to_text(contract: EnvContract) -> str:
    """Return the value of the property."""
    return json_format.MessageToJson(contract_to_proto(contract), indent=None)


def contract_from_text(text: str) -> EnvContract:
    """Return the contract in the value of the property.

    Raises:
        CodecError: It is none.
    """
    try:
        message = json_format.Parse(text, contract_pb2.EnvContract(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise CodecError(f"{CONTRACT} holds no contract: {error}") from error
    return contract_from_proto(message)
