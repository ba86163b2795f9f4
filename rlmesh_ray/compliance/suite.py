"""Runs all checks of the suite against one endpoint."""

import time
from collections.abc import Iterator, Mapping

from rlmesh_ray.compliance import (  # noqa: F401  # they fill ENV and MODEL
    env_checks,
    handshake_and_shutdown_checks,
    model_checks,
)
from rlmesh_ray.compliance.checks import (
    CLAUSES,
    ENV,
    MODEL,
    Check,
    ClauseBroken,
    ClauseNotObservable,
    Finding,
    Verdict,
)
from rlmesh_ray.compliance.subjects import Subject
from rlmesh_ray.errors import CapacityError, RlmeshError

_MOST_RETRIES, _RETRY_S = 10, 0.5

# These checks may end the endpoint, and run last.
_LAST = ("shutdown.refusal", "model.close-drains")


def _ordered(found: Mapping[str, Check]) -> Mapping[str, Check]:
    order = [key for key in CLAUSES if key not in _LAST]
    return {key: found[key] for key in (*order, *_LAST) if key in found}


ENV_CHECKS = _ordered(ENV)
"""Checks of an EnvService by clause, in the order in which they run."""
MODEL_CHECKS = _ordered(MODEL)
"""Checks of a ModelService by clause, in the order in which they run."""
_CHECKS = {"env": ENV_CHECKS, "model": MODEL_CHECKS}


def check_all(subject: Subject) -> Iterator[Finding]:
    return (check_clause(subject, clause) for clause in _CHECKS[subject.service])


def check_clause(subject: Subject, clause: str) -> Finding:
    check = _CHECKS[subject.service][clause]
    verdict, message = Verdict.BROKEN, ""
    try:
        _check_retrying(check, subject)
        verdict = Verdict.HOLDS
    except ClauseBroken as broken:
        message = str(broken)
    except ClauseNotObservable as reason:
        verdict, message = Verdict.NOT_OBSERVABLE, str(reason)
    except RlmeshError as error:
        # An error of this package's client counts as the server's.
        message = f"the session fails: {error}"
    except Exception as error:  # noqa: BLE001  # one invalid answer must not stop the suite
        message = f"the server's messages are invalid: {type(error).__name__}: {error}"
    return Finding(clause, subject.service, verdict, message)


def _check_retrying(check: Check, subject: Subject) -> None:
    """Check; check again while the server has no room for a session."""
    for _ in range(_MOST_RETRIES):
        try:
            return check(subject)
        except CapacityError:
            # The former session may still occupy its place.
            time.sleep(_RETRY_S)
    return check(subject)
