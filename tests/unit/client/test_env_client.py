"""What an EnvClient logs while it waits."""

import logging

import pytest

from rlmesh_ray.client import env_client
from rlmesh_ray.client.env_client import reset_report


def test_a_long_wait_for_resets_is_logged_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 50.0
    report = reset_report(8, 300.0, lambda: now_s)
    caplog.set_level(logging.INFO, env_client.__name__)

    for tenth in range(30, 2000):
        now_s = 50.0 + tenth / 10
        report(50.0)

    assert [each.message for each in caplog.records] == [
        f"resetting 8 lane(s): {took} s so far (reset_timeout_s is 300 s)"
        for took in (3, 6, 12, 24, 48, 96, 156)
    ]


def test_many_short_waits_for_resets_are_logged_as_seldom_as_a_long_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    report = reset_report(8, 300.0, lambda: now_s)
    caplog.set_level(logging.INFO, env_client.__name__)

    for began_s in range(0, 300, 5):
        for took_s in (3, 4):
            now_s = float(began_s + took_s)
            report(began_s)

    assert len(caplog.records) == 9
