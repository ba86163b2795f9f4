"""TLS and mutual TLS, in every protocol: what is needed on either side, and what is said else."""

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.health import check_health
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import RLlinkClient
from rlmesh_ray.dialects.rllink.server.connection import RLlinkServer
from rlmesh_ray.errors import ConfigurationError, EndpointError, EndpointUnreachableError
from tests.loopback.certificates import Authority, certified, needs_openssl
from tests.loopback.served_calls import ServedCalls

pytestmark = needs_openssl


class Certificates:
    """What two authorities have signed."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
        self.ours, self.theirs = ours.certificate, theirs.certificate
        self.server = ours.sign("server")
        self.client = ours.sign("client")
        self.strange = theirs.sign("strange")
        self.expired = ours.sign("expired", has_expired=True)

    @property
    def mutual(self) -> ServerTls:
        """Return what a server speaks that wants to see certificates."""
        return ServerTls(*self.server, self.ours)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


class Trainer:
    """Tells over RLlink how to sample."""

    def admit(self, peer: str, dialect: object) -> "Trainer":
        return self

    def receive(self, request: m.Request) -> m.Reply | None:
        return m.SetConfig(1, True)

    def leave(self) -> None:
        pass


@contextlib.contextmanager
def rllink_server(tls: Any) -> Iterator[RLlinkServer]:
    server = RLlinkServer(Trainer().admit, tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def use_env(address: str, tls: Any) -> None:
    with contextlib.closing(RemoteEnv(address, tls=tls)) as env:
        env.reset()
        env.step(0)


def use_model(address: str, tls: Any) -> None:
    with contextlib.closing(RemoteModel(address, tls=tls)) as model:
        model.configure_route(gymnasium.make("CartPole-v1"))


def use_dm_env_rpc(address: str, tls: Any) -> None:
    with contextlib.closing(
        RemoteEnv(ConnectOptions(f"dm_env_rpc://{address}", tls=tls, timeout_s=2.0))
    ) as env:
        env.reset()
        env.step(0)


def use_health(address: str, tls: Any) -> None:
    health = check_health(ConnectOptions(address, tls=tls))
    if not health.is_serving:
        raise EndpointUnreachableError(health.reason, address)


def use_rllink(address: str, tls: Any) -> None:
    with RLlinkClient(address, tls=tls, connect_timeout_s=5.0, timeout_s=5.0) as client:
        assert client.get_config().env_steps_per_sample == 1


Use = Callable[[str, Any], None]
USES: dict[str, tuple[Callable[[Any], Any], Use]] = {
    "env": (lambda tls: EnvServer("CartPole-v1", tls=tls), use_env),
    "model": (lambda tls: ModelServer(zeros, tls=tls), use_model),
    "dm_env_rpc": (lambda tls: EnvServer("CartPole-v1", tls=tls), use_dm_env_rpc),
    "health": (lambda tls: ModelServer(zeros, tls=tls), use_health),
    "rllink": (rllink_server, use_rllink),
}


# Each of the others does the same with Ray's files, below.
@pytest.mark.parametrize("protocol", ["env", "rllink"])
def test_mutual_tls_lets_in_whom_the_authority_knows(
    protocol: str, certificates: Certificates
) -> None:
    serve, use = USES[protocol]

    with serve(certificates.mutual) as server:
        use(server.address, ClientTls(certificates.ours, *certificates.client))


# gRPC and RLlink check certificates, each in its own way; the services of a port share that.
@pytest.mark.parametrize("protocol", ["health", "rllink"])
@pytest.mark.parametrize("stranger", ["plain", "no-certificate", "other-authority", "expired"])
def test_mutual_tls_keeps_out_everybody_else(
    stranger: str, protocol: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, use = USES[protocol]
    shown = {
        "plain": None,
        "no-certificate": ClientTls(certificates.ours),
        "other-authority": ClientTls(certificates.ours, *certificates.strange),
        "expired": ClientTls(certificates.ours, *certificates.expired),
    }[stranger]
    calls = ServedCalls(monkeypatch)

    with serve(certificates.mutual) as server:
        with pytest.raises(EndpointError, match=r"TLS|certificate"):
            use(server.address, shown)

        assert calls.entered == []


@pytest.mark.parametrize(
    ("server_is", "protocol"),
    [
        *itertools.product(["plain", "of-another-authority", "expired"], ["health", "rllink"]),
        *(("of-another-authority", protocol) for protocol in ("env", "model", "dm_env_rpc")),
    ],
)
def test_a_client_talks_to_no_server_that_it_cannot_know(
    server_is: str, protocol: str, certificates: Certificates
) -> None:
    _, use = USES[protocol]
    serve = rllink_server if protocol == "rllink" else USES["health"][0]  # no client gets further
    tls = {
        "plain": None,
        "of-another-authority": ServerTls(*certificates.strange),
        "expired": ServerTls(*certificates.expired),
    }[server_is]

    with serve(tls) as server, pytest.raises(EndpointUnreachableError, match=r"TLS|certificate"):
        use(server.address, ClientTls(certificates.ours))


def test_a_certificate_that_has_expired_is_called_so(certificates: Certificates) -> None:
    with (
        ModelServer(zeros, tls=ServerTls(*certificates.expired)) as server,
        pytest.raises(EndpointUnreachableError, match="has expired"),
    ):
        use_health(server.address, ClientTls(certificates.ours))


# --- the files -------------------------------------------------------------------------


def broken(certificates: Certificates, folder: Path) -> dict[str, tuple[ServerTls, str]]:
    junk = folder / "junk.pem"
    junk.write_text("no certificate")
    certificate, key = certificates.server
    return {
        "certificate": (ServerTls(junk, key), "junk.pem"),
        "key-of-another": (ServerTls(certificate, certificates.client[1]), "client.key"),
        "nowhere": (ServerTls(folder / "nowhere.pem", key), "nowhere.pem"),
        "authority": (ServerTls(certificate, key, junk), "junk.pem"),
    }


@pytest.mark.parametrize("which", ["certificate", "key-of-another", "nowhere", "authority"])
@pytest.mark.parametrize("kind", ["env", "model", "rllink"])
def test_files_are_looked_at_before_anything_listens(
    kind: str, which: str, certificates: Certificates, tmp_path: Path
) -> None:
    tls, named = broken(certificates, tmp_path)[which]

    def make() -> object:
        return RLlinkServer(Trainer().admit, tls=tls) if kind == "rllink" else USES[kind][0](tls)

    with pytest.raises(ConfigurationError, match=named):
        make()


def test_a_clients_files_are_looked_at_before_it_dials(
    certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "junk.pem").write_text("no certificate")
    for tls in (
        ClientTls(tmp_path / "junk.pem"),
        ClientTls(certificates.ours, tmp_path / "junk.pem", certificates.client[1]),
    ):
        with pytest.raises(ConfigurationError, match=r"junk\.pem"):
            use_health("127.0.0.1:1", tls)
        with pytest.raises(ConfigurationError, match=r"junk\.pem"):
            RLlinkClient("127.0.0.1:1", tls=tls)


def test_what_names_no_files_is_refused_on_either_side() -> None:
    wrong: Any = "server.crt"

    for serve in (EnvServer, ModelServer):
        with pytest.raises(ConfigurationError, match=r"tls='server.crt' .* ServerTls\("):
            serve("CartPole-v1" if serve is EnvServer else zeros, tls=wrong)
    for connect_options in (RemoteEnv, RemoteModel):
        with pytest.raises(ConfigurationError, match=r"tls='server.crt' .* ClientTls\("):
            connect_options("127.0.0.1:1", tls=wrong)


def test_a_key_with_a_password_is_refused_and_not_asked_for(
    certificates: Certificates, tmp_path: Path
) -> None:
    certificate, key = certificates.server
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:word", "-out", locked],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip

    with pytest.raises(ConfigurationError, match=r"locked\.key.*without a password"):
        EnvServer("CartPole-v1", tls=ServerTls(certificate, locked))


# --- Ray's files -----------------------------------------------------------------------


@pytest.fixture
def rays_files(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = certificates.server
    for name, value in {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        "RAY_TLS_CA_CERT": certificates.ours,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("protocol", USES)
def test_rays_files_make_both_ends_speak_mutual_tls(
    protocol: str, rays_files: None, certificates: Certificates
) -> None:
    serve, use = USES[protocol]

    with serve(RayTls()) as server:
        use(server.address, RayTls())
        use(server.address, ClientTls.from_ray())
        with pytest.raises(EndpointError, match=r"TLS|certificate"):
            use(server.address, ClientTls(certificates.ours))
    assert ServerTls.from_ray() == certificates.mutual


def test_where_ray_uses_no_tls_its_files_mean_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    with EnvServer("CartPole-v1", tls=RayTls()) as server:
        use_env(server.address, RayTls())
        use_env(server.address, None)


def test_tls_does_without_grpc_where_rllink_is_spoken() -> None:
    client = "rlmesh_ray.dialects.rllink.client"
    script = f"import {client}, sys; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def curve(name: str) -> tuple[str, ...]:
    return "ec", "-pkeyopt", f"ec_paramgen_curve:{name}"


@pytest.mark.parametrize("key", [("rsa:2048",), curve("P-256"), curve("P-384")])
def test_a_key_that_is_taken_can_be_spoken_with(key: tuple[str, ...], tmp_path: Path) -> None:
    certificate, private_key = certified(tmp_path, *key)

    with ModelServer(zeros, tls=ServerTls(certificate, private_key)) as server:
        assert check_health(ConnectOptions(server.address, tls=ClientTls(certificate))).is_serving


@pytest.mark.parametrize("key", [("ed25519",), curve("P-521"), curve("secp256k1")])
def test_a_key_that_grpc_does_not_know_is_refused(key: tuple[str, ...], tmp_path: Path) -> None:
    certificate, private_key = certified(tmp_path, *key)

    with pytest.raises(ConfigurationError, match=r"itself\.pem has a key.*P-256"):
        ModelServer(zeros, tls=ServerTls(certificate, private_key))
    with pytest.raises(ConfigurationError, match=r"itself\.pem has a key.*P-256"):
        ClientTls(certificate, certificate, private_key).credentials()
