"""The tokens that an endpoint takes while their file changes; the clock is the test's."""

import errno
import hmac
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.auth import token_file
from rlmesh_ray.auth.token_file import FileStamp, TokenFile, TokenRole, TokenStore
from rlmesh_ray.errors import ConfigurationError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def write(file: Path, text: str, mode: int = 0o600) -> None:
    """Replace ``file`` as a whole."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.rename(file)


def test_a_token_that_stands_alone_allows_everything() -> None:
    known = TokenStore("s3cret")

    assert known.role_of(b"s3cret") is TokenRole.OPERATOR
    for other in (b"", b"s3cre", b"s3crett", b"S3cret", b"Bearer s3cret"):
        assert known.role_of(other) is None


def test_all_tokens_of_the_file_count_with_their_roles(file: Path) -> None:
    write(file, "one\ntwo client\nthree probe\n")
    known = TokenStore(TokenFile(file))

    roles = [known.role_of(token) for token in (b"one", b"two", b"three", b"two client")]

    assert roles == [TokenRole.OPERATOR, TokenRole.CLIENT, TokenRole.PROBE, None]


def test_a_rotation_is_noticed_within_a_second(file: Path, clock: Clock) -> None:
    write(file, "old")
    known = TokenStore(TokenFile(file), clock=clock)

    write(file, "old\nnew")
    assert known.role_of(b"new") is None
    clock.now_s += 1.0
    assert (known.role_of(b"new"), known.role_of(b"old")) == (
        TokenRole.OPERATOR,
        TokenRole.OPERATOR,
    )

    write(file, "new")
    clock.now_s += 0.9
    assert known.role_of(b"old")
    clock.now_s += 0.1
    assert (known.role_of(b"new"), known.role_of(b"old")) == (TokenRole.OPERATOR, None)


@pytest.mark.parametrize(
    ("text", "mode"), [("", 0o600), ("a b c", 0o600), ("new", 0o644), (None, 0)]
)
def test_what_was_good_last_stays_while_the_file_is_bad(
    text: str | None,
    mode: int,
    file: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(file, "old")
    known = TokenStore(TokenFile(file), clock=clock)

    if text is None:
        file.unlink()
    else:
        write(file, text, mode)
    for _ in range(5):
        clock.now_s += 1.0
        assert known.role_of(b"old")
        assert not known.role_of(b"new")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "the previous tokens stay in use" in errors[0].getMessage()

    write(file, "newest")
    clock.now_s += 1.0
    assert (known.role_of(b"newest"), known.role_of(b"old")) == (TokenRole.OPERATOR, None)


def test_a_file_whose_mode_was_mended_counts(file: Path, clock: Clock) -> None:
    write(file, "old")
    known = TokenStore(TokenFile(file), clock=clock)

    write(file, "new", 0o644)
    clock.now_s += 1.0
    assert known.role_of(b"new") is None
    file.chmod(0o600)
    clock.now_s += 1.0

    assert (known.role_of(b"new"), known.role_of(b"old")) == (TokenRole.OPERATOR, None)


def test_a_file_that_becomes_readable_to_others_is_noticed(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, "s3cret")
    known = TokenStore(TokenFile(file), clock=clock)

    file.chmod(0o644)
    clock.now_s += 1.0

    assert known.role_of(b"s3cret")
    assert "chmod 600" in caplog.text


def test_a_file_that_could_not_be_opened_for_a_moment_is_read_later(
    file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, "old")
    known = TokenStore(TokenFile(file), clock=clock)

    def refuse(*_arguments: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    write(file, "new")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        for _ in range(3):
            clock.now_s += 1.0
            assert known.role_of(b"old")
    assert caplog.text.count("Too many open files") == 1
    clock.now_s += 1.0

    assert (known.role_of(b"new"), known.role_of(b"old")) == (TokenRole.OPERATOR, None)


def test_the_file_is_looked_at_once_a_second_at_most(
    file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, "s3cret")
    looks: list[TokenFile] = []

    class Counting(TokenFile):
        def stamp(self) -> FileStamp | None:
            looks.append(self)
            return super().stamp()

    known = TokenStore(Counting(file), clock=clock)
    looks.clear()

    for _ in range(1000):
        clock.now_s += 0.01
        known.role_of(b"s3cret")

    assert 9 <= len(looks) <= 10


def test_every_token_is_compared_whichever_matches(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    write(file, "one\ntwo\nthree")
    known = TokenStore(TokenFile(file))
    compared: list[Any] = []
    compare = hmac.compare_digest

    class Counting:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.append(a)
            return compare(a, b)

    monkeypatch.setattr(token_file, "hmac", Counting)
    for shown in (b"one", b"three", b"none"):
        compared.clear()
        known.role_of(shown)
        assert len(compared) == 3
        assert {len(each) for each in compared} == {32}  # of digests, which hide the length


def test_no_token_is_kept_or_logged(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write(file, "s3cret-one")
    known = TokenStore(TokenFile(file), clock=clock)
    for text in ("s3cret-two", "s3cret-three too many words", "s3cret-four"):
        write(file, text)
        clock.now_s += 1.0
        known.role_of(b"s3cret-five")

    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(vars(known))


@pytest.mark.parametrize("where", ["variable", "path", "home"])
def test_rays_own_token_is_no_token_for_an_endpoint(
    where: str, tmp_path: Path, file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, "own")
    known = TokenStore(TokenFile(file), clock=clock)
    (tmp_path / ".ray").mkdir()
    if where == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "rays-own")
    elif where == "path":
        (tmp_path / "elsewhere").write_text("rays-own\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    else:
        (tmp_path / ".ray" / "auth_token").write_text("rays-own\n")

    with pytest.raises(ConfigurationError, match="Ray's own") as caught:
        TokenStore("rays-own")
    assert "rays-own" not in str(caught.value)
    write(file, "own\nrays-own client")
    with pytest.raises(ConfigurationError, match="Ray's own"):
        TokenStore(TokenFile(file))
    clock.now_s += 1.0
    assert known.role_of(b"rays-own") is None
