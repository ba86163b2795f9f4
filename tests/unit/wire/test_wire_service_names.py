"""gRPC service names, which travel: each is that of its schema."""

from typing import Any

import pytest

from rlmesh_ray.wire import lane_calls_v1, observe_v1, registry_v1, transport_v1
from rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1 import service_pb2 as lanes_pb
from rlmesh_ray.wire._pb.rlmesh_ray.observe.v1 import service_pb2 as observe_pb
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as registry_pb
from rlmesh_ray.wire._pb.rlmesh_ray.transport.v1 import service_pb2 as transport_pb


@pytest.mark.parametrize(
    ("module", "schema"),
    [
        (lane_calls_v1, lanes_pb),
        (observe_v1, observe_pb),
        (registry_v1, registry_pb),
        (transport_v1, transport_pb),
    ],
)
def test_a_service_is_called_by_the_name_of_its_schema(module: Any, schema: Any) -> None:
    (service,) = schema.DESCRIPTOR.services_by_name.values()

    assert service.full_name == module.SERVICE
