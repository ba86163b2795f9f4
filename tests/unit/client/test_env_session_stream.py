import pytest

from rlmesh_ray.client.env_session_stream import endpoint_timeout_ms, with_client_timeout


@pytest.mark.parametrize(
    ("message", "timeout_s", "expected"),
    [
        ("no result within 2700 ms", 3.0, "no result within 3 s"),
        ("no result within 12700 ms", 3.0, "no result within 12700 ms"),  # of the endpoint's own
        ("no result within 701 ms", 0.0, "no result within 701 ms"),
        ("the wheel turned for 27 s", 3.0, "the wheel turned for 27 s"),
    ],
)
def test_a_timeout_names_the_limit_that_the_user_has_set_and_no_other(
    message: str, timeout_s: float, expected: str
) -> None:
    assert with_client_timeout(message, endpoint_timeout_ms(timeout_s), timeout_s) == expected
