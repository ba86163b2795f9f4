"""The limit of grpc.aio: a server that sends back what it gets, and does nothing else.

``python -m benchmarks.serving.noop_server generator|read_write [uvloop]``; ``targets.NOOP_STYLES``
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from importlib import import_module

import grpc

from benchmarks.control import stay
from benchmarks.serving.frames import SERVICE


async def _generator(
    requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _read_write(_requests: object, context: grpc.aio.ServicerContext) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request)


async def _serve(style: str) -> None:
    join = {"generator": _generator, "read_write": _read_write}[style]
    handlers = {"Join": grpc.stream_stream_rpc_method_handler(join)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(stay, f"127.0.0.1:{port}")
    await server.stop(None)


if __name__ == "__main__":
    style, loop = [*sys.argv[1:], "asyncio"][:2]
    new_event_loop = import_module(loop).new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(style))
