"""Everything that an endpoint speaks."""

from rlmesh_ray.client import env_handshake, model_handshake
from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.health import HealthStatus, check_health

_DM_ENV_RPC = "dm_env_rpc.v1"
_DM_ENV_RPC_SERVICE = "dm_env_rpc.v1.Environment"


def generations_of_env(dial: Dial) -> tuple[str, ...]:
    """Return what can be spoken with the EnvService of an endpoint, and dm_env_rpc's protocol.

    Whether that is spoken, too, is seen only where the endpoint's health tells of its services, as
    that of rlmesh-ray does: to ask in that protocol would be to join.

    Raises:
        EndpointError: The endpoint cannot be reached.
    """
    health = check_health(dial, _DM_ENV_RPC_SERVICE)
    is_known = health.status in (HealthStatus.SERVING, HealthStatus.NOT_SERVING)
    return env_handshake.generations_of(dial) + ((_DM_ENV_RPC,) if is_known else ())


def generations_of_model(dial: Dial) -> tuple[str, ...]:
    """Return what can be spoken with the ModelService of an endpoint.

    Raises:
        EndpointError: The endpoint cannot be reached.
    """
    return model_handshake.generations_of(dial)
