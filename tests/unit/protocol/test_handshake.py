import dataclasses

import pytest

from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol.handshake import (
    EDITION_2026_06,
    GENERATION,
    Answer,
    Offer,
    answer_offer,
    check_answer,
    make_offer,
)


def offer(**changes: object) -> Offer:
    return dataclasses.replace(make_offer("test", "1", {"x": "y"}), **changes)  # type: ignore[arg-type]


def reply(to: Offer) -> Answer:
    return answer_offer(to, server_version="2", capabilities={"c": "d"}, contract="contract")


def test_matching_peers_agree_on_the_edition_and_get_the_contract() -> None:
    answer = reply(offer())

    assert answer.compatible
    assert answer.selected_edition == "2026.06"
    assert answer.contract == "contract"
    assert answer.capabilities == {"c": "d"}
    assert check_answer(offer(), answer) is EDITION_2026_06


def test_the_highest_mutual_edition_is_selected() -> None:
    answer = reply(offer(editions=("2020.01", "2026.06", "2099.12")))

    assert answer.selected_edition == "2026.06"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": "rlmesh-wire-v1"}, "generation 'rlmesh-wire-v1' is not supported"),
        ({"editions": ("2020.01",)}, "no mutual workflow edition"),
        ({"editions": ()}, "offered: none"),
        ({"spec_sha256": "f" * 64}, "pinned to the text"),
    ],
)
def test_peers_that_do_not_match_are_told_why_and_get_no_contract(
    changes: dict[str, object], reason: str
) -> None:
    answer = reply(offer(**changes))

    assert not answer.compatible
    assert reason in answer.error_message
    assert answer.editions == ("2026.06",)
    assert answer.contract is None
    assert answer.selected_edition == ""


def test_a_client_that_shows_no_checksum_is_served() -> None:
    assert reply(offer(spec_sha256="", status="")).compatible


def test_a_refusal_reaches_the_clients_user_with_the_reason() -> None:
    answer = reply(offer(generation="other"))

    with pytest.raises(HandshakeRefusedError, match=r"'other'.*supports: 2026\.06"):
        check_answer(offer(), answer)


@pytest.mark.parametrize("changes", [{"selected_edition": "2099.12"}, {"spec_sha256": "f" * 64}])
def test_a_client_refuses_what_it_did_not_offer(changes: dict[str, object]) -> None:
    answer = dataclasses.replace(reply(offer()), **changes)  # type: ignore[arg-type]

    with pytest.raises(HandshakeRefusedError):
        check_answer(offer(), answer)


def test_the_generation_is_the_editions() -> None:
    assert offer().generation == GENERATION == "rlmesh.protocol.v1"
