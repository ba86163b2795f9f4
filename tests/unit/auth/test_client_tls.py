"""Files of TLS and of tokens, as options name them."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.auth.client_tls import ClientTls, read_pem
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.auth.token_file import TokenFile
from rlmesh_ray.errors import ConfigurationError
from tests.odd_files import IRREGULAR, put


def test_files_may_be_named_by_text() -> None:
    client = ClientTls("ca.pem", certificate="own.pem", private_key="own.key")
    server = ServerTls("own.pem", "own.key", client_ca="ca.pem")

    assert client == ClientTls(Path("ca.pem"), Path("own.pem"), Path("own.key"))
    assert server == ServerTls(Path("own.pem"), Path("own.key"), Path("ca.pem"))
    assert pickle.loads(pickle.dumps((client, server))) == (client, server)
    assert ClientTls() == ClientTls(None, None, None)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda wrong: ClientTls(root_ca=wrong), "root_ca"),
        (lambda wrong: ClientTls("ca.pem", certificate=wrong), "certificate"),
        (lambda wrong: ServerTls("own.pem", wrong), "private_key"),
        (lambda wrong: ServerTls("own.pem", "own.key", wrong), "client_ca"),
        (TokenFile, "path"),
    ],
)
@pytest.mark.parametrize("wrong", [5, b"ca.pem", ["ca.pem"]])
def test_what_names_no_file_is_refused(
    make: Callable[[Any], object], name: str, wrong: Any
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}=.* names no file; give its path"):
        make(wrong)


def test_a_server_has_both_files() -> None:
    nothing: Any = None

    with pytest.raises(ConfigurationError, match="certificate=None names no file"):
        ServerTls(nothing, "own.key")


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_name_of_anything_but_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    odd, own = put(IRREGULAR[kind], tmp_path / "odd.pem"), Path("none.pem")

    for files in (ClientTls(odd), ClientTls(None, odd, own), ServerTls(odd, own)):
        with pytest.raises(ConfigurationError, match=r"odd\.pem.*name"):
            files.context()
    with pytest.raises(ConfigurationError, match=r"odd\.pem.*name"):
        read_pem(odd)
