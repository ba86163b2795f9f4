"""RemotePolicy: the policy of another server, served again."""

import itertools
from functools import partial

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.model_handshake import policy_of
from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.errors import ContractMismatchError, PolicyError, RlmeshError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.options import MAX_HORIZON
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec

Spaces = tuple[SpaceSpec, SpaceSpec]


class RemotePolicy:
    """Asks a server whose clients name no lanes beforehand, as openpi's do not.

    Each lane of this server's routes has a lane of its own there, with a connection of its own that
    is opened anew with each episode. All rows of a batch are asked at the same time. After an error
    the server is dialed again with the next batch.

    Args:
        address: Such as ``openpi://HOST:PORT``.
        token: The token that the server requires.
        tls: For a server with TLS.

    Raises:
        EndpointError: The server cannot be reached.
    """

    def __init__(
        self, address: str, token: TokenSource | None = None, tls: ClientTlsSource | None = None
    ) -> None:
        self._address = address
        self._connect = partial(RemoteModel, address, token=token, tls=tls)
        self._model: RemoteModel | None = self._connect()
        horizon = min(policy_of(self._model.answer).horizon, MAX_HORIZON)
        self.traits = PolicyTraits(kind="remote policy", horizon=horizon)
        """Its horizon is what the server's metadata says, up to the longest that is served."""
        self._routes: dict[Spaces, str] = {}
        self._lanes: dict[tuple[str, int], int] = {}

    def check_contract(self, contract: EnvContract) -> None:
        """Check that the server's description does not contradict an environment.

        Raises:
            ContractMismatchError: It does, or the server cannot be reached.
        """
        try:
            self._route(self._connected(), contract)
        except RlmeshError as error:
            raise ContractMismatchError(str(error)) from error

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Return the server's action for each row, or its chunk.

        Raises:
            PolicyError: The server has failed, or cannot be reached.
        """
        rows_of = [(route.route_key, slot) for route in rows.routes for slot in route.slots]
        keys = [(key, slot.env_index) for key, slot in rows_of]
        _, ids, steps, begins = zip(*(slot for _, slot in rows_of), strict=True)
        # Another client may have had the lane before.
        resets = [each or key not in self._lanes for each, key in zip(begins, keys, strict=True)]
        slots = Slots([self._lane(key) for key in keys], ids, steps, resets)
        try:
            model = self._connected()
            route_id = self._route(model, contract)
            predict = model.predict_chunk if self.traits.horizon > 1 else model.predict
            return predict(rows.observations, route_id=route_id, slots=slots)
        except RlmeshError as error:
            self._routes.clear()
            if self._model is not None:
                self._model.close()
                self._model = None
            raise PolicyError(f"the policy at {self._address} failed: {error}") from error

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free one lane of a route, or all: another one may have its number."""
        for key in tuple(self._lanes):
            if key[0] == route_key and env_index in (None, key[1]):
                del self._lanes[key]

    def _connected(self) -> RemoteModel:
        if self._model is None:
            self._model = self._connect()
        return self._model

    def _route(self, model: RemoteModel, contract: EnvContract) -> str:
        spaces = contract.observation_space, contract.action_space
        if spaces not in self._routes:
            own = EnvContract(contract.id, *spaces, 1, contract.autoreset_mode)
            route_id = f"route-{len(self._routes)}"
            self._routes[spaces] = model.configure_route(
                own, route_id=route_id, horizon=self.traits.horizon
            )
        return self._routes[spaces]

    def _lane(self, key: tuple[str, int]) -> int:
        if key not in self._lanes:
            taken = set(self._lanes.values())
            self._lanes[key] = next(index for index in itertools.count() if index not in taken)
        return self._lanes[key]
