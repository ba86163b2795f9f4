"""Trials of a token file that is replaced while clients step and dial."""

import contextlib
import random
import tempfile
import time
from functools import partial
from pathlib import Path

from rlmesh_ray import RemoteVectorEnv, TokenFile
from rlmesh_ray.errors import AccessDeniedError
from tests.chaos.driver import Driver
from tests.chaos.endpoint import Endpoint
from tests.chaos.history import History
from tests.chaos.scoreboard import Row
from tests.chaos.vector_client import NUM_LANES, VectorClient, VisitingClient
from tests.loopback.eventually import eventually

_NOTICED_S = 10.0
"""By then a server must have noticed that its file has changed; about a second is promised."""


def rotate_tokens(row: Row, num_trials: int, history: History, seed: int) -> list[float]:
    """Replace the token in both files, as the manual says, while a client steps and one dials."""
    draws = random.Random(f"{seed}, {row.name}")
    resumed_s = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours, theirs = folder / "clients", folder / "server"
        token = _new_token(draws)
        _write(ours, token)
        _write(theirs, token)
        endpoint = Endpoint(
            "tests.chaos.hash_chain:HashChain",
            token_file=theirs,
            num_envs=NUM_LANES,
            transport=row.transport,
        )
        stack.callback(endpoint.stop)
        clients = [
            kind(
                endpoint.address,
                history,
                seed=seed,
                token=TokenFile(ours),
                name=f"{kind.__name__} ",
            )
            for kind in (VectorClient, VisitingClient)
        ]
        drivers = [stack.enter_context(Driver(row.name, client)) for client in clients]
        for _ in range(num_trials):
            former, token = token, _new_token(draws)
            _write(theirs, former, token)
            if not eventually(partial(_opens, endpoint.address, token), _NOTICED_S):
                history.wrong(f"a new token is refused after {_NOTICED_S:g} s")
            _write(ours, token)
            for driver in drivers:
                driver.see_answers(1)
            began_s = time.monotonic()
            _write(theirs, token)
            history.fault(row.fault)
            if not eventually(partial(_refuses, endpoint.address, former), _NOTICED_S):
                history.wrong(f"a token still opens {_NOTICED_S:g} s after it was taken away")
            for driver in drivers:
                driver.see_answers(1)
            resumed_s.append(time.monotonic() - began_s)
    for failure in (failure for client in clients for failure in client.failures):
        history.wrong(f"a call has failed: {failure}")
    return resumed_s


def _new_token(draws: random.Random) -> str:
    return f"{draws.getrandbits(128):032x}"


def _write(path: Path, *tokens: str) -> None:
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text("".join(f"{token}\n" for token in tokens))
    draft.replace(path)


def _opens(address: str, token: str) -> bool:
    try:
        RemoteVectorEnv(address, token=token).close()
    except AccessDeniedError:
        return False
    return True


def _refuses(address: str, token: str) -> bool:
    return not _opens(address, token)
