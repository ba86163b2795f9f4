import errno
import os
import pickle
from pathlib import Path

import pytest

from rlmesh_ray.cli.error_reporting import describe, exit_code, trace
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    ContractMismatchError,
    EndpointUnreachableError,
    EnvStartError,
    ListenError,
    MissingPackageError,
    RemoteEnvError,
    RemoteModelError,
)


class RayWrapped(EnvStartError):
    """Like Ray's wrappers: derived from the cause's class, with a traceback as message."""

    def __init__(self, cause: EnvStartError) -> None:
        super().__init__("ray::Actor.address()\nTraceback ...")
        self.cause = cause


def test_an_error_of_this_package_keeps_its_message() -> None:
    error = EndpointUnreachableError("nothing answers there", "127.0.0.1:1")

    assert describe(error) == ("127.0.0.1:1: nothing answers there", "EndpointUnreachableError")


def test_the_message_is_one_line() -> None:
    assert describe(AddressError("one\n  two\n"))[0] == "one two"


def test_what_ray_wraps_is_unwrapped() -> None:
    error = RayWrapped(EnvStartError("cannot create Cart-v1"))

    assert describe(error) == ("cannot create Cart-v1", "EnvStartError")


def test_the_cause_of_a_foreign_error_is_named() -> None:
    error = RuntimeError("something failed")
    error.__cause__ = AddressError("port 1 is in use")

    assert describe(error) == ("port 1 is in use", "AddressError")


def test_an_unexpected_error_names_the_option_debug() -> None:
    message, kind = describe(KeyError("lane"))

    assert message == "unexpected KeyError: 'lane' (--debug shows where)"
    assert kind == "KeyError"


def test_errors_that_cause_each_other_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert describe(first)[1] == "ValueError"


@pytest.mark.parametrize("kind", [ConfigurationError, AddressError])
def test_wrong_options_have_the_exit_code_of_wrong_usage(kind: type[Exception]) -> None:
    in_an_actor = RuntimeError("the actor failed")
    in_an_actor.__cause__ = kind("leave it out")

    assert exit_code(kind("leave it out")) == exit_code(in_an_actor) == 2


def test_a_misnamed_environment_has_the_exit_code_of_wrong_usage() -> None:
    error = EnvStartError("cannot create Cart-v1", is_wrong_usage=True)

    assert exit_code(error) == exit_code(RayWrapped(error)) == 2
    assert exit_code(pickle.loads(pickle.dumps(error))) == 2


@pytest.mark.parametrize(
    "error",
    [
        ListenError("the port is in use"),
        MissingPackageError("torch is not installed"),
        ContractMismatchError("the endpoints differ"),
        EndpointUnreachableError("nothing answers there"),
        RayWrapped(EnvStartError("cannot create Cart-v1")),
        ValueError("unexpected"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failures_of_a_command_that_runs_have_another_exit_code(error: Exception) -> None:
    assert exit_code(error) == 1


def test_a_remote_error_names_the_side() -> None:
    error = RemoteModelError("INTERNAL", "the policy failed", True)

    assert describe(error)[0] == "the model's endpoint answered INTERNAL: the policy failed"


@pytest.mark.parametrize(
    "error",
    [
        RemoteModelError("INTERNAL", "it failed", True, "remote line 7"),
        EnvStartError("cannot create it", "remote line 7"),
    ],
)
def test_the_trace_has_that_of_the_other_process(error: Exception) -> None:
    text = trace(error)

    assert type(error).__name__ in text
    assert text.endswith("The other process reports:\nremote line 7")


def test_a_remote_trace_that_several_errors_share_is_shown_once() -> None:
    first = RemoteEnvError("INTERNAL", "it failed", True, "remote line 7")
    last = RemoteEnvError("INTERNAL", "it failed 11 times", True, "remote line 7")
    last.__cause__ = first

    assert trace(last).count("remote line 7") == 1


def test_the_message_says_that_debug_shows_a_remote_traceback_where_there_is_one() -> None:
    error = RemoteEnvError("INTERNAL", "it failed", True, "remote line 7")

    assert describe(error)[0] == (
        "the environment's endpoint answered INTERNAL: it failed (--debug shows its traceback)"
    )


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Is a directory") as raised:
        tmp_path.read_text()

    assert describe(raised.value)[0].startswith(f"cannot access {tmp_path}: Is a directory")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert describe(full)[0].startswith("cannot write: No space left on device; make room")


def test_a_current_folder_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        os.getcwd()

    assert describe(raised.value)[0].startswith("the current folder has been deleted; change to")
