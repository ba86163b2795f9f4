"""Checks of "Session Establishment", the same for both services."""

import re

from rlmesh_ray.compliance.checks import ClauseNotObservable, holds, require
from rlmesh_ray.compliance.subjects import END_REMEDY, EnvSubject, ModelSubject, Subject
from rlmesh_ray.errors import AccessDeniedError, EndpointError, EndpointUnreachableError
from rlmesh_ray.protocol.handshake import EDITION_2026_06
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1.specs import contract_to_proto

_NO_GENERATION = "rlmesh.protocol.v0.check"
_TOO_OLD, _TOO_NEW = "2000.01", "2999.12"


@holds("session.generation")
def another_generation_is_refused(subject: Subject) -> None:
    require(subject.shake_hands().compatible, "an offer of its own generation is refused")
    answer = subject.shake_hands(generation=_NO_GENERATION)
    require(not answer.compatible, f"generation {_NO_GENERATION!r} is accepted")


@holds("session.mutual-edition")
def an_offer_without_a_mutual_edition_is_refused(subject: Subject) -> None:
    for editions in ((_TOO_OLD, _TOO_NEW), ()):
        answer = subject.shake_hands(editions=editions)
        require(not answer.compatible, f"an offer of {list(editions)} is accepted")
    answer = subject.shake_hands(editions=(_TOO_OLD, EDITION_2026_06.name, _TOO_NEW))
    require(answer.compatible, f"{EDITION_2026_06.name} among others is refused")


@holds("session.highest-edition")
def the_highest_mutual_edition_is_selected(subject: Subject) -> None:
    """Names of editions are dates, which sort.

    The offer has no checksum: the selected edition may be one whose text this package lacks.
    """
    known = {EDITION_2026_06.name, *subject.shake_hands(editions=(_TOO_OLD,)).editions}
    offered = (_TOO_NEW, *sorted(known), _TOO_OLD)
    answer = subject.shake_hands(editions=offered, spec_sha256="", status="")
    require(answer.compatible, f"an offer of {list(offered)} is refused: {answer.error_message}")
    selected, expected = answer.selected_edition, max(known)
    require(
        selected == expected,
        f"of {list(offered)}, edition {selected!r} was selected; the highest mutual one is "
        f"{expected!r}",
    )


@holds("session.refusal")
def a_refusal_gives_the_reason_and_the_editions(subject: Subject) -> None:
    for changes in ({"generation": _NO_GENERATION}, {"editions": (_TOO_OLD,)}):
        answer = subject.shake_hands(**changes)
        require(not answer.compatible, f"{changes} is accepted")
        require(bool(answer.error_message), f"the refusal of {changes} has no error_message")
        known = EDITION_2026_06.name in answer.editions
        require(known, f"the refusal of {changes} does not list the server's editions")
        selected = answer.selected_edition
        require(not selected, f"the refusal of {changes} selects edition {selected!r}")


@holds("session.capabilities")
def capabilities_are_advisory(subject: Subject) -> None:
    usual = subject.shake_hands()
    for capabilities in ({}, {"org.example.unheard-of.v7": "yes", "": ""}):
        answer = subject.shake_hands(capabilities=capabilities)
        require(answer.compatible, f"a client with capabilities {capabilities} is refused")
        is_same = (answer.selected_edition, _packed(answer.contract)) == (
            usual.selected_edition,
            _packed(usual.contract),
        )
        require(is_same, f"a client with capabilities {capabilities} gets another contract")


@holds("wire.pin")
def another_text_of_the_edition_is_refused(subject: Subject) -> None:
    """While the edition is provisional; a client without a checksum is accepted."""
    answer = subject.shake_hands()
    if answer.status != "provisional":
        raise ClauseNotObservable(f"the selected edition is {answer.status or 'of unknown status'}")
    shown = answer.spec_sha256.lower()
    is_checksum = re.fullmatch("[0-9a-f]{64}", shown) is not None
    require(is_checksum, f"a provisional edition comes with the checksum {shown!r}")
    is_agreed = shown in (subject.offer().spec_sha256, EDITION_2026_06.spec_sha256)
    require(is_agreed, f"a client with another text than {shown} is compatible")
    require(
        subject.shake_hands(spec_sha256="", status="").compatible,
        "a client without a checksum is refused",
    )
    other = subject.shake_hands(spec_sha256="0" * 64)
    require(not other.compatible, "a client with another text of the edition is compatible")


@holds("shutdown.distinct")
def the_end_of_a_session_leaves_the_endpoint_running(subject: EnvSubject) -> None:
    for _ in range(2):
        subject.raw_session()
    try:
        is_serving = subject.shake_hands().compatible
    except EndpointError:
        is_serving = False
    require(is_serving, "after a session's Close the endpoint does not answer any more")


@holds("shutdown.refusal")
def a_refused_shutdown_changes_nothing(subject: Subject) -> None:
    """Sent only where the operator allows it: the server might accept.

    A server may also have no Shutdown at all, or deny it to all callers.
    """
    if not subject.may_ask_shutdown:
        raise ClauseNotObservable(f"would send Shutdown, which may end the endpoint; {END_REMEDY}")
    try:
        accepted = subject.ask_shutdown()
    except (AccessDeniedError, EndpointUnreachableError):
        accepted = False  # if it is really unreachable, the session below fails
    if accepted:
        raise ClauseNotObservable("the endpoint accepts Shutdown, and is gone now")
    subject.raw_session()


@holds("session.contract")
def the_contract_comes_with_compatible_only(subject: EnvSubject) -> None:
    require(subject.has_contract(), "a compatible handshake has no contract")
    has_contract = subject.has_contract(editions=(_TOO_OLD,))
    require(not has_contract, "a refusal carries a contract")


@holds("session.contract-fixed")
def the_contract_stays_the_same(subject: EnvSubject) -> None:
    before = _packed(subject.shake_hands().contract)
    with subject.session() as session:
        session.reset()
        during = _packed(subject.shake_hands().contract)
        session.until_episode_ends()
    after = _packed(subject.shake_hands().contract)
    require(before == during == after, "the contract has changed")


@holds("model.establishment")
def a_model_has_no_contract(subject: ModelSubject) -> None:
    """Field 6, where an EnvService has its contract, must be absent."""
    require(not subject.has_contract(), "the handshake's answer has field 6, a contract")


def _packed(contract: object) -> bytes:
    """Return bytes that are equal for equal contracts, also for ones with NaN."""
    if not isinstance(contract, EnvContract):
        return b""
    return contract_to_proto(contract).SerializeToString(deterministic=True)
