"""The messages of the published ``dm-env-rpc`` package, which has no types.

The only module that imports it, so that nothing else notices when the extra is not installed.
"""

from typing import Any

from dm_env_rpc.v1 import dm_env_rpc_pb2
from dm_env_rpc.v1.extensions import properties_pb2
from google.rpc import error_details_pb2, status_pb2

pb: Any = dm_env_rpc_pb2
"""Tensors, specs, requests and responses."""
properties: Any = properties_pb2
"""The properties extension."""
status: Any = status_pb2
"""The status in an error response."""
error_details: Any = error_details_pb2
"""The messages in its details."""
