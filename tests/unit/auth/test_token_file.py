"""Token files: what may stand in them, who may read them, and what a client shows of them."""

import os
import pickle
from pathlib import Path

import pytest

from rlmesh_ray import TokenFile
from rlmesh_ray.auth.token_file import TokenEntry, TokenRole, required_role
from rlmesh_ray.errors import ConfigurationError


def written(folder: Path, text: str, mode: int = 0o600) -> TokenFile:
    file = folder / "tokens"
    file.write_text(text)
    file.chmod(mode)
    return TokenFile(file)


def test_a_line_is_a_token_and_perhaps_its_role(tmp_path: Path) -> None:
    file = written(tmp_path, "# ours\n\nall-mine\n seen probe \r\nplayer client\nboss operator\n")

    entries, _ = file.read()

    assert entries == (
        TokenEntry("all-mine", TokenRole.OPERATOR),
        TokenEntry("seen", TokenRole.PROBE),
        TokenEntry("player", TokenRole.CLIENT),
        TokenEntry("boss", TokenRole.OPERATOR),
    )


def test_a_client_shows_the_first_token_that_is_not_a_probes(tmp_path: Path) -> None:
    assert written(tmp_path, "seen probe\nfirst\nsecond").client_token() == "first"
    assert written(tmp_path, "seen probe\n").client_token() == "seen"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("good\ns3cret guest\n", "line 2"),
        ("s3cret probe client\n", "line 1"),
        ("good\n\n# no\ns3crét\n", "line 4"),
        ("s3cret probe\ns3cret client\n", "line 2"),
    ],
)
def test_a_malformed_line_is_named_and_never_quoted(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=line) as caught:
        written(tmp_path, text).read()

    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n# nothing\n"])
def test_a_file_without_a_token_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        written(tmp_path, text).read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o601])
def test_a_file_with_rights_for_others_is_refused_with_the_remedy(
    mode: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"{mode:04o}.*chmod 600"):
        written(tmp_path, "s3cret", mode).read()


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_alone_is_read(mode: int, tmp_path: Path) -> None:
    assert written(tmp_path, "s3cret", mode).client_token() == "s3cret"


def test_of_a_link_the_target_counts(tmp_path: Path) -> None:
    # As Kubernetes mounts secrets.
    (tmp_path / "..data").mkdir()
    target = written(tmp_path / "..data", "s3cret").path
    link = tmp_path / "token"
    link.symlink_to(target)

    assert TokenFile(link).client_token() == "s3cret"
    target.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        TokenFile(link).read()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(ConfigurationError, match="not a regular file"):
        TokenFile(tmp_path / "pipe").read()
    with pytest.raises(ConfigurationError, match=r"regular file|directory"):
        TokenFile(tmp_path).read()
    with pytest.raises(ConfigurationError, match="No such file"):
        TokenFile(tmp_path / "nowhere").read()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_what_is_refused_leaves_no_descriptor_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    refused = [TokenFile(tmp_path), TokenFile(tmp_path / "pipe"), written(tmp_path, "a", 0o644)]
    before = set(os.listdir("/proc/self/fd"))

    for file in refused * 5:
        with pytest.raises(ConfigurationError):
            file.read()

    assert set(os.listdir("/proc/self/fd")) <= before  # what others have left may be closed


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x1e"])
def test_only_a_line_feed_ends_a_line(separator: str, tmp_path: Path) -> None:
    # Else what stands behind it would be a token with all rights.
    entries, _ = written(tmp_path, f"seen{separator}probe\n").read()

    assert entries == (TokenEntry("seen", TokenRole.PROBE),)


def test_a_file_of_another_kind_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="larger than 65536"):
        written(tmp_path, "a" * 70_000).read()


def test_it_shows_and_pickles_as_a_path(tmp_path: Path) -> None:
    file = written(tmp_path, "s3cret")

    entries, _ = file.read()

    assert "s3cret" not in repr(file) + repr(entries) + str(file) + str(pickle.dumps(file))
    assert pickle.loads(pickle.dumps(file)) == file


def test_its_path_holds_in_other_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "s3cret")
    monkeypatch.chdir(tmp_path)

    assert TokenFile("tokens").path == tmp_path / "tokens"


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("/grpc.health.v1.Health/Check", TokenRole.PROBE),
        ("/grpc.health.v1.Health/Watch", TokenRole.PROBE),
        ("/rlmesh.env.v1.EnvService/Handshake", TokenRole.PROBE),
        ("/rlmesh_ray.observe.v1.ObserverService/List", TokenRole.PROBE),
        ("/rlmesh_ray.observe.v1.ObserverService/Render", TokenRole.PROBE),
        ("/rlmesh.env.v1.EnvService/Join", TokenRole.CLIENT),
        ("/rlmesh_ray.lanes.v1.LaneService/Call", TokenRole.CLIENT),
        ("/dm_env_rpc.v1.Environment/Process", TokenRole.CLIENT),
        ("/rlmesh.model.v1.ModelService/Shutdown", TokenRole.OPERATOR),
        ("/of.the/Future", TokenRole.CLIENT),
        ("", TokenRole.CLIENT),
    ],
)
def test_each_call_wants_a_role(method: str, role: TokenRole) -> None:
    assert required_role(method) is role
