"""Names of optional features, as they stand in capability maps (advisory, both directions)."""

ENV_SERVICE = "rlmesh.env.service.v1"
MODEL_SERVICE = "rlmesh.model.service.v1"
SPACES_CORE = "rlmesh.spaces.core.v1"
CONCURRENT_PREDICT = "rlmesh.model.concurrent_predict.v1"
"""The model service works on all routes at once and answers in completion order. Routes of one
policy share its thread and its batches, so that a slow batch delays all of their predictions; to
open and to close routes does not wait for it."""
SUBSET_STEP = "subset_step"
"""Of ``rlmesh-wire-v1``: Reset and Step may name lanes."""
OBSERVATION_HISTORY = "rlmesh.model.observation_history.v1"
"""Of ``rlmesh-wire-v1``: the model can be given former observations."""
YES = "true"
"""The value of a capability of ``rlmesh-wire-v1`` that is there."""

NDARRAY = "rlmesh_ray.ndarray.v1"
"""Infos may carry arrays with their dtype (a peer without it sees nested lists)."""
PARTIAL_RESET = "rlmesh_ray.partial_reset.v1"
"""``ResetRequest.env_indices`` is honoured."""
SAME_STEP = "rlmesh_ray.same_step.v1"
"""In SAME_STEP mode, which the edition reserves: from a client, that it does not take the first
observation of the next episode for the last one; from a server, that its lanes are in that mode."""
MULTI_AGENT = "rlmesh_ray.multi_agent.v1"
"""Key of a contract's metadata: each lane holds several agents, as ``spaces.multi_agent`` says."""
LANE_CALLS = "rlmesh_ray.lane_calls.v1"
"""Only from the server: what clients may call in their lanes, names separated by commas."""
SHARED_MEMORY = "rlmesh_ray.shared_memory.v1"
"""Values of steps may travel in memory, between processes of one machine: from a client, that it
would; from a server, the name of its socket for that (``transport.shared_memory``)."""
DIRECT_TCP = "rlmesh_ray.direct_tcp.v1"
"""Steps may travel over a TCP connection of their own (``transport.tcp``): from a client, that it
would; from a server, its port for that."""
NUMBERED_REQUESTS = "rlmesh_ray.numbered_requests.v1"
"""The ids of a client's requests count up by one, in decimal: those of Reset, Step and Render, and
calls into lanes count, too. Each is executed once, over whichever transport it comes
(``transport.exactly_once``)."""
SESSION = "rlmesh_ray.session.v1"
"""Only from the server: the session id that the client carries in the Join metadata."""

POLICY = "rlmesh_ray.policy.v1"
"""What a model's endpoint serves: from a client, that it wants to know; from a server, to such a
client only, what ``wire.policy_v1`` says."""

GATEWAY_METADATA_KEY = "rlmesh-ray-gateway"
"""Set where a call has come through a gateway."""
SESSION_METADATA_KEY = "rlmesh-ray-session"
"""Where the Join carries the session id."""
AUTHORIZATION_METADATA_KEY = "authorization"
"""Where every call carries ``Bearer TOKEN``."""
