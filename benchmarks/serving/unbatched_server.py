"""What batching costs: the same policy and frames, asked in the handler itself.

No batcher, no second thread, no session: ``python -m benchmarks.serving.unbatched_server``. It
stays awake for its client, as ModelServer does for one that is alone.
"""

import asyncio
from collections.abc import AsyncIterator

from benchmarks.control import stay
from benchmarks.serving.frames import SERVICE
from benchmarks.serving.mlp import mlp
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.protocol.messages import ConfigureRoute, Predict, Predicted, RouteConfigured
from rlmesh_ray.server.event_loop import new_event_loop
from rlmesh_ray.server.gc_tuning import freeze_heap
from rlmesh_ray.server.model_service import busy_polled
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

_POLICY = as_policy(mlp())


async def _join(
    requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    contracts: dict[str, EnvContract] = {}
    async for data in busy_polled(requests, lambda: True):
        match wire.parse_request(data):
            case ConfigureRoute(contract=EnvContract() as contract) as request:
                contracts[request.context.route_id] = contract
                yield wire.pack_response(RouteConfigured(request.request_id))
            case Predict() as request:
                yield wire.pack_response(_predict(request, contracts[request.context.route_id]))


def _predict(request: Predict, contract: EnvContract) -> Predicted:
    slots = request.context.slots
    columns = values.decode_batch(contract.observation_space, request.observation, len(slots))
    observations = unflatten(contract.observation_space, columns)
    rows = Rows(observations, [RouteRows(request.context.route_id, slots)])
    actions = _POLICY.predict(contract, rows)
    chosen = coerce_batch(contract.action_space, actions, len(slots))
    data = values.encode_batch(contract.action_space, chosen, len(slots))
    return Predicted(request.request_id, request.context, data)


async def _serve() -> None:
    server = grpc.aio.server()
    handlers = {"Join": grpc.stream_stream_rpc_method_handler(_join)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    freeze_heap()
    await asyncio.to_thread(stay, f"127.0.0.1:{port}")
    await server.stop(None)


if __name__ == "__main__":
    # On the same loop as ModelServer: what is compared is the batching alone.
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve())
