"""openpi's protocol, one observation at a time: ``python -m benchmarks.robots.openpi_server``.

The policy runs in the event loop, as in openpi's own server.
"""

import asyncio

from websockets.asyncio.server import ServerConnection, serve

from benchmarks.control import stay
from benchmarks.robots.policy import SleepingPolicy
from rlmesh_ray.dialects.openpi.wire import pack, unpack

_POLICY = SleepingPolicy(1)


async def _answer(connection: ServerConnection) -> None:
    await connection.send(pack({}))
    async for message in connection:
        assert isinstance(message, bytes)
        observation = unpack(message)["observation"]
        await connection.send(pack({"actions": _POLICY(observation[None])}))


async def _serve() -> None:
    async with serve(_answer, "127.0.0.1", 0, compression=None, max_size=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        await asyncio.to_thread(stay, f"127.0.0.1:{port}")


if __name__ == "__main__":
    asyncio.run(_serve())
