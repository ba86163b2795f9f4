import dataclasses

import pytest

from rlmesh_ray.errors import ConfigurationError, HandshakeRefusedError
from rlmesh_ray.protocol.handshake import (
    EDITION_2026_06,
    GENERATION,
    KNOWN_TEXTS,
    HandshakeRequest,
    HandshakeResponse,
    answer_handshake,
    check_handshake_response,
    edition_sha256,
    make_handshake_request,
)

B3 = KNOWN_TEXTS["rlmesh-0.1.0b3"]
OTHER = "f" * 64


def offer(**changes: object) -> HandshakeRequest:
    return dataclasses.replace(make_handshake_request("test", "1", {"x": "y"}), **changes)  # type: ignore[arg-type]


def reply(to: HandshakeRequest) -> HandshakeResponse:
    return answer_handshake(to, server_version="2", capabilities={"c": "d"}, contract="contract")


def test_matching_peers_agree_on_the_edition_and_get_the_contract() -> None:
    answer = reply(offer())

    assert answer.compatible
    assert answer.selected_edition == "2026.06"
    assert answer.contract == "contract"
    assert answer.capabilities == {"c": "d"}
    assert check_handshake_response(offer(), answer).selected_edition == "2026.06"


def test_the_highest_mutual_edition_is_selected() -> None:
    answer = reply(offer(editions=("2020.01", "2026.06", "2099.12")))

    assert answer.selected_edition == "2026.06"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": "rlmesh-wire-v1"}, "generation 'rlmesh-wire-v1' is not supported"),
        ({"editions": ("2020.01",)}, "no mutual workflow edition"),
        ({"editions": ()}, "offered: none"),
        ({"spec_sha256": OTHER}, "pinned to the text"),
    ],
)
def test_peers_that_do_not_match_get_the_reason_and_get_no_contract(
    changes: dict[str, object], reason: str
) -> None:
    answer = reply(offer(**changes))

    assert not answer.compatible
    assert reason in answer.error_message
    assert answer.editions == ("2026.06",)
    assert (answer.generation, answer.server_version) == (GENERATION, "2")
    assert answer.contract is None
    assert answer.selected_edition == ""


def test_a_client_that_shows_no_checksum_is_served() -> None:
    answer = reply(offer(spec_sha256="", status=""))

    assert answer.compatible
    assert answer.spec_sha256 == EDITION_2026_06.spec_sha256


def test_a_refusal_reaches_the_clients_user_with_the_reason() -> None:
    answer = reply(offer(generation="other"))

    with pytest.raises(HandshakeRefusedError, match=r"'other'.*supports: 2026\.06"):
        check_handshake_response(offer(), answer)


@pytest.mark.parametrize(
    "changes",
    [
        {"selected_edition": "2099.12"},
        {"selected_edition": ""},
        {"spec_sha256": OTHER},
        {"generation": "rlmesh.protocol.v2", "min_generation": "rlmesh.protocol.v2"},
    ],
)
def test_a_client_refuses_what_it_did_not_offer(changes: dict[str, object]) -> None:
    answer = dataclasses.replace(reply(offer()), **changes)  # type: ignore[arg-type]

    with pytest.raises(HandshakeRefusedError) as refused:
        check_handshake_response(offer(), answer)

    assert refused.value.supported_editions == ("2026.06",)


def test_a_server_of_a_newer_generation_that_still_supports_this_one_is_accepted() -> None:
    answer = dataclasses.replace(reply(offer()), generation="rlmesh.protocol.v2")

    assert check_handshake_response(offer(), answer).selected_edition == "2026.06"


def test_a_server_that_shows_no_checksum_is_accepted() -> None:
    answer = dataclasses.replace(reply(offer()), spec_sha256="", status="")

    assert check_handshake_response(offer(), answer).selected_edition == "2026.06"


# --- other texts of a provisional edition ------------------------------------------------


@pytest.mark.parametrize("status", ["provisional", "sealed"])
def test_a_text_that_the_operator_accepts_is_echoed_with_its_status(status: str) -> None:
    peer_offer = offer(spec_sha256=B3, status=status)

    answer = answer_handshake(
        peer_offer,
        server_version="2",
        capabilities={},
        contract="contract",
        accept_texts=[OTHER, B3],
    )

    assert answer.compatible
    assert (answer.spec_sha256, answer.status) == (B3, status)
    assert answer.contract == "contract"
    assert check_handshake_response(peer_offer, answer).selected_edition == "2026.06"


def test_a_peer_of_an_accepted_text_without_a_status_gets_the_editions() -> None:
    peer_offer = offer(spec_sha256=B3, status="")

    answer = answer_handshake(peer_offer, server_version="2", capabilities={}, accept_texts=[B3])

    assert (answer.spec_sha256, answer.status) == (B3, EDITION_2026_06.status)


def test_accepting_another_text_changes_nothing_for_peers_of_the_own_one() -> None:
    answer = answer_handshake(offer(), server_version="2", capabilities={}, accept_texts=[B3])

    assert answer.compatible
    assert answer.spec_sha256 == EDITION_2026_06.spec_sha256


@pytest.mark.parametrize("accepted", [(), (OTHER,)])
def test_no_text_is_accepted_that_the_operator_has_not_named(accepted: tuple[str, ...]) -> None:
    answer = answer_handshake(
        offer(spec_sha256=B3), server_version="2", capabilities={}, accept_texts=accepted
    )

    assert not answer.compatible
    assert answer.spec_sha256 == ""


def test_a_client_of_a_known_text_learns_what_the_operator_can_do() -> None:
    assert "accept_edition_texts=['rlmesh-0.1.0b3']" in reply(offer(spec_sha256=B3)).error_message
    assert "--accept-edition-text rlmesh-0.1.0b3" in reply(offer(spec_sha256=B3)).error_message
    assert "accept" not in reply(offer(spec_sha256=OTHER)).error_message


def test_the_client_presents_the_text_that_its_user_names() -> None:
    peer_offer = make_handshake_request("test", "1", {}, text=B3)

    assert peer_offer.spec_sha256 == B3
    assert make_handshake_request("test", "1", {}).spec_sha256 == EDITION_2026_06.spec_sha256


@pytest.mark.parametrize("shown", [EDITION_2026_06.spec_sha256, B3])
def test_a_client_accepts_the_text_that_it_presented_and_its_own(shown: str) -> None:
    answer = dataclasses.replace(reply(offer()), spec_sha256=shown)

    assert check_handshake_response(offer(spec_sha256=B3), answer).selected_edition == "2026.06"


def test_a_client_that_presented_another_text_accepts_no_third_one() -> None:
    answer = dataclasses.replace(reply(offer()), spec_sha256=OTHER)

    with pytest.raises(HandshakeRefusedError, match="pinned to the text"):
        check_handshake_response(offer(spec_sha256=B3), answer)


@pytest.mark.parametrize(
    "answer",
    [
        dataclasses.replace(reply(offer()), spec_sha256=B3),
        # As rlmesh 0.1.0b3 refuses: without its checksum, whose first digits are in the reason.
        dataclasses.replace(
            reply(offer(editions=())),
            error_message=f"checksum differs: this build spec {B3[:12]} vs peer spec 3827ecdfb7ad",
        ),
    ],
)
def test_the_user_learns_how_to_present_a_known_text(answer: HandshakeResponse) -> None:
    with pytest.raises(HandshakeRefusedError) as caught:
        check_handshake_response(offer(), answer)

    assert "edition_text='rlmesh-0.1.0b3'" in str(caught.value)
    assert "--edition-text rlmesh-0.1.0b3" in str(caught.value)


def test_a_user_who_presented_another_text_to_a_server_of_the_own_one_learns_so() -> None:
    peer_offer = offer(spec_sha256=B3)

    with pytest.raises(HandshakeRefusedError, match="connect without edition_text"):
        check_handshake_response(peer_offer, reply(peer_offer))


@pytest.mark.parametrize(
    ("name", "text"),
    [("rlmesh-0.1.0b3", B3), (OTHER, OTHER), (OTHER.upper(), OTHER), (B3, B3)],
)
def test_a_text_is_named_by_its_release_or_its_checksum(name: str, text: str) -> None:
    assert edition_sha256(name) == text


@pytest.mark.parametrize("name", ["", "rlmesh-0.1.0b4", "f" * 63, "f" * 65, "g" * 64, "٣" * 64])
def test_what_names_no_text_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"give rlmesh-0\.1\.0b3, or .*sha256"):
        edition_sha256(name)


def test_what_a_peer_has_chosen_is_quoted_in_part_only() -> None:
    for changes in ({"generation": "x" * 10**6}, {"editions": ("x" * 10**6,)}):
        assert len(reply(offer(**changes)).error_message) < 1000


def test_the_generation_is_the_editions() -> None:
    assert offer().generation == GENERATION == "rlmesh.protocol.v1"
