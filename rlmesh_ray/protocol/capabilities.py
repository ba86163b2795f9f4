"""Names: generation and edition, capabilities (optional, advisory, sent by both sides), metadata.

The names of other generations stand in their dialects.
"""

PROTOCOL_V1 = "rlmesh.protocol.v1"
"""The generation of the edition's text."""
EDITION_NAME = "2026.06"
"""The edition that generation and ``rlmesh-wire-v1`` share; peers of the latter compare it letter
by letter."""

ENV_SERVICE = "rlmesh.env.service.v1"
MODEL_SERVICE = "rlmesh.model.service.v1"
SPACES_CORE = "rlmesh.spaces.core.v1"
CONCURRENT_PREDICT = "rlmesh.model.concurrent_predict.v1"
"""The model service executes requests of different routes concurrently and answers in completion
order. Routes of one policy share its thread and its batches, so that a slow batch delays all of
their predictions; opening and closing routes does not wait for it."""
SUBSET_STEP = "subset_step"
"""``rlmesh-wire-v1``: Reset and Step may name lanes."""
YES = "true"
"""The value of a present capability in ``rlmesh-wire-v1``."""

NDARRAY = "rlmesh_ray.ndarray.v1"
"""Infos may contain arrays with their dtype (a peer without it gets nested lists)."""
PARTIAL_RESET = "rlmesh_ray.partial_reset.v1"
"""``ResetRequest.env_indices`` is supported."""
SAME_STEP = "rlmesh_ray.same_step.v1"
"""Autoreset mode SAME_STEP, which the edition reserves. From a client: it does not take the first
observation of the next episode for the last one. From a server: its lanes are in that mode."""
MULTI_AGENT = "rlmesh_ray.multi_agent.v1"
"""Key of a contract's metadata: each lane holds several agents (``spaces.multi_agent``)."""
SPEC = "rlmesh_ray.spec.v1"
"""Key of a contract's metadata: id, ``max_episode_steps`` and more of the environment's spec in
Gymnasium (``EnvContract.spec``)."""
LANE_CALLS = "rlmesh_ray.lane_calls.v1"
"""From a server only: the names that clients may call in their lanes, separated by commas."""
SET_ATTR = "set_wrapper_attr"
"""The method of gymnasium's environments that sets an attribute: the call of ``set_attr``."""
SHARED_MEMORY = "rlmesh_ray.shared_memory.v1"
"""The shared-memory transport of steps, between processes of one machine. From a client: it can use
it. From a server: the name of its socket (``transport.direct_sockets``)."""
DIRECT_TCP = "rlmesh_ray.direct_tcp.v1"
"""The direct TCP transport of steps (``transport.tcp``). From a client: it can use it. From a
server: its port."""
DIRECT_RENDER = "rlmesh_ray.direct_render.v1"
"""From a server only: over a shared-memory connection it also answers Render, with the pixels of
each lane's picture (``transport.direct_sockets``)."""
NUMBERED_REQUESTS = "rlmesh_ray.numbered_requests.v1"
"""The request ids of a client are consecutive numbers, in decimal, over Reset, Step, Render and
calls into lanes. Each is executed once, over any transport (``transport.exactly_once``)."""
SESSION = "rlmesh_ray.session.v1"
"""From a server only: the session id, which the client sends in the Join metadata."""

POLICY = "rlmesh_ray.policy.v1"
"""Facts about the served policy (``wire.policy_v1``). From a client: it asks for them. From a
server, to such a client only: the facts."""
ACTION_CHUNKS = "rlmesh_ray.action_chunks.v1"
"""A policy chooses several actions at once, a chunk. From a client: it can take them. From a
server, to such a client only: how many actions a chunk has. Key of a contract's metadata in
ConfigureRoute: how many actions of each chunk the client wants on that route. The ``action`` of its
PredictResponse has a batch of the rows' actions for each of these steps, one after the other."""
IMAGE_CODEC = "rlmesh_ray.image_codec.v1"
"""Images travel compressed (``wire.image_codec_v1``). From a server only: the formats, separated by
commas, and ``RESIZE``. Key of a contract's metadata in ConfigureRoute: how the images in the
observations of that route are compressed, such as ``jpeg:95``. For sessions with environments see
``IMAGE_CODEC_METADATA_KEY``."""
RESIZE = "resize"
"""An EnvService sends images in the sizes that ``IMAGE_SIZES_METADATA_KEY`` names."""

GATEWAY_METADATA_KEY = "rlmesh-ray-gateway"
"""Set on calls that come through a gateway."""
SESSION_METADATA_KEY = "rlmesh-ray-session"
"""Carries the session id in the Join metadata."""
IMAGE_CODEC_METADATA_KEY = "rlmesh-ray-image-codec"
"""Names in the Join metadata how the images of a session's observations are compressed, such as
``jpeg:95``; only for an EnvService with the capability ``IMAGE_CODEC``."""
IMAGE_SIZES_METADATA_KEY = "rlmesh-ray-image-sizes"
"""Names in the Join metadata the heights and widths of a session's images, in the order of the
observation space's leaves, such as ``224x224,84x84``; only where ``IMAGE_CODEC`` has ``RESIZE``."""
AUTHORIZATION_METADATA_KEY = "authorization"
"""Carries ``Bearer TOKEN`` in the metadata of every call."""
