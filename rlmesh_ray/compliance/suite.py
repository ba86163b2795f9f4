"""Runs all checks of the suite against one endpoint."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from rlmesh_ray.compliance import (  # noqa: F401  # they fill ENV and MODEL
    env_checks,
    handshake_and_shutdown_checks,
    model_checks,
)
from rlmesh_ray.compliance.checks import (
    CLAUSES,
    Check,
    ClauseBroken,
    ClauseNotObservable,
    Finding,
    Verdict,
)
from rlmesh_ray.compliance.subjects import ENV, MODEL, EnvSubject, ModelSubject
from rlmesh_ray.errors import CapacityError, RlmeshError

SubjectT = TypeVar("SubjectT")

_MOST_RETRIES, _RETRY_S = 10, 0.5

# These checks may end the endpoint, and run last.
_LAST = ("shutdown.refusal", "model.close-drains")


def _ordered(found: Mapping[str, Check[SubjectT]]) -> Mapping[str, Check[SubjectT]]:
    order = [key for key in CLAUSES if key not in _LAST]
    return {key: found[key] for key in (*order, *_LAST) if key in found}


# The modules of checks fill ENV and MODEL when they are imported.
ENV_CHECKS = _ordered(ENV)
"""Checks of an EnvService by clause, in the order in which they run."""
MODEL_CHECKS = _ordered(MODEL)
"""Checks of a ModelService by clause, in the order in which they run."""


def check_env(subject: EnvSubject) -> Iterator[Finding]:
    return (check_env_clause(subject, clause) for clause in ENV_CHECKS)


def check_model(subject: ModelSubject) -> Iterator[Finding]:
    return (check_model_clause(subject, clause) for clause in MODEL_CHECKS)


def check_env_clause(subject: EnvSubject, clause: str) -> Finding:
    return _run(clause, "env", partial(ENV_CHECKS[clause], subject))


def check_model_clause(subject: ModelSubject, clause: str) -> Finding:
    return _run(clause, "model", partial(MODEL_CHECKS[clause], subject))


def _run(clause: str, service: str, check: Callable[[], None]) -> Finding:
    try:
        _retried(check)
    except ClauseBroken as broken:
        return Finding(clause, service, Verdict.BROKEN, str(broken))
    except ClauseNotObservable as reason:
        return Finding(clause, service, Verdict.NOT_OBSERVABLE, str(reason))
    except RlmeshError as error:
        # An error of this package's client counts as the server's.
        return Finding(clause, service, Verdict.BROKEN, f"the session fails: {error}")
    except Exception as error:  # noqa: BLE001  # one invalid answer must not stop the suite
        message = f"the server's messages are invalid: {type(error).__name__}: {error}"
        return Finding(clause, service, Verdict.BROKEN, message)
    return Finding(clause, service, Verdict.HOLDS)


def _retried(check: Callable[[], None]) -> None:
    """Run ``check``, again while the server has no room for a session yet."""
    for _ in range(_MOST_RETRIES):
        try:
            return check()
        except CapacityError:
            # The former session may still occupy its place.
            time.sleep(_RETRY_S)
    return check()
