"""Entry of the command line: the script ``rlmesh-ray``, and ``python -m rlmesh_ray``.

It imports next to nothing itself, so that Ctrl-C is handled while the commands are imported.
"""

import contextlib
import io
import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_SERVERS = {"serve-env", "serve-model", "pool", "register", "watch"}
"""Commands that signals end with exit code 0."""


def main() -> int:
    """Run the command that the process was started with; return its exit code."""
    _open_standard_streams()
    # A process that ignores them, as a shell's background job ignores Ctrl-C, still does.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from rlmesh_ray.cli.main import main as run

    code = run()
    if code == _INTERRUPTED:
        code = _code_of_an_interrupt()
    # What is left here is the report of a failure, or of a server's end.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
            continue
        _discard(stream.fileno())
    policies = sys.modules.get("rlmesh_ray.server.model.policy_thread")
    if policies is not None and policies.any_policy_runs():
        os._exit(code)  # without the end of the interpreter, which such a thread may not outlive
    return code


def _end(number: int, frame: FrameType | None) -> None:
    """End the process immediately: an import may swallow a KeyboardInterrupt, or fail by it."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(_code_of_an_interrupt())


def _code_of_an_interrupt() -> int:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return 0 if command in _SERVERS else _INTERRUPTED


def _open_standard_streams() -> None:
    """Open the streams that the caller has closed; escape characters that they cannot encode.

    A socket must not get the number of a standard stream: workers inherit those.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _discard(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard(descriptor: int) -> None:
    """Redirect a standard stream to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    os.set_inheritable(descriptor, True)


if __name__ == "__main__":
    sys.exit(main())
