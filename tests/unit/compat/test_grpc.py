from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.compat.grpc import begin_single_threaded_call, message_writer


def test_gRPC_without_single_threaded_calls(without: Any) -> None:
    without("rlmesh_ray.compat.single_threaded_call")

    assert begin_single_threaded_call(object(), "/service/Method", ()) is None


def test_a_channel_of_another_kind_begins_no_single_threaded_call() -> None:
    assert begin_single_threaded_call(object(), "/service/Method", ()) is None


@pytest.mark.parametrize("parts", [{}, {"_cython_call": object()}])
def test_gRPC_without_the_parts_of_a_call_writes_by_the_call(parts: dict[str, object]) -> None:
    call = SimpleNamespace(write=object(), **parts)

    assert message_writer(call) is call.write
