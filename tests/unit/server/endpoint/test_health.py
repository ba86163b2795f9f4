import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlmesh_ray.server.endpoint.health import Health, HealthService, run_probe
from rlmesh_ray.wire import health_v1 as wire

NAME = "some.v1.Service"


class Changing:
    """A probe whose answer the test sets."""

    def __init__(self) -> None:
        self.health = Health(True)

    def __call__(self) -> Health:
        return self.health


async def next_status(watch: AsyncIterator[bytes]) -> int:
    return wire.parse_response(await anext(watch))


def watch(service: HealthService, name: str) -> Any:
    # A Watch needs nothing of the call's context.
    return service.watch(wire.pack_request(name), None)


def test_a_probe_is_believed() -> None:
    assert run_probe(lambda: Health(False, "stuck")) == Health(False, "stuck")


def test_a_probe_that_raises_is_no_health() -> None:
    def probe() -> Health:
        raise KeyError("device")

    assert run_probe(probe) == Health(False, "the health probe raised KeyError: 'device'")


@pytest.mark.parametrize("name", ["", NAME])
def test_a_refreshed_watch_sends_the_health_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlmesh_ray.server.endpoint.health.WATCH_PERIOD_S", 1000.0)

    async def scenario() -> list[int]:
        probe = Changing()
        service = HealthService(probe, [NAME])
        responses = watch(service, name)
        first = await next_status(responses)
        waiting = asyncio.ensure_future(next_status(responses))
        await asyncio.sleep(0)
        probe.health = Health(False)
        service.refresh()
        return [first, await waiting]

    assert asyncio.run(scenario()) == [wire.SERVING, wire.NOT_SERVING]


def test_a_watch_sends_the_last_health_before_it_ends() -> None:
    async def scenario() -> list[bytes]:
        probe = Changing()
        service = HealthService(probe, [NAME])
        responses = watch(service, NAME)
        first = await anext(responses)
        probe.health = Health(False, "it is stopping")
        service.end()
        return [first, *[response async for response in responses]]

    statuses = [wire.parse_response(response) for response in asyncio.run(scenario())]
    assert statuses == [wire.SERVING, wire.NOT_SERVING]


def test_a_refresh_without_news_tells_nothing() -> None:
    async def scenario() -> list[bytes]:
        service = HealthService(Changing(), [NAME])
        responses = watch(service, NAME)
        await anext(responses)
        service.refresh()
        service.end()
        return [response async for response in responses]

    assert asyncio.run(scenario()) == []


def test_a_watch_on_an_unknown_service_stays_open() -> None:
    async def scenario() -> tuple[int, bool]:
        service = HealthService(Changing(), [NAME])
        responses = watch(service, "other.v1.Service")
        first = await next_status(responses)
        rest = asyncio.ensure_future(anext(responses, None))
        service.refresh()
        await asyncio.sleep(0)
        is_open = not rest.done()
        service.end()
        await rest
        return first, is_open

    assert asyncio.run(scenario()) == (wire.SERVICE_UNKNOWN, True)
