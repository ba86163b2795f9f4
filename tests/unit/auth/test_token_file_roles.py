"""Tokens of endpoints, derived from a fleet's secret."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.auth.token_file import bearer_value, derive_token
from rlmesh_ray.errors import ConfigurationError

NAMES = st.text(max_size=8)


def test_every_endpoint_and_role_has_a_token_of_its_own() -> None:
    tokens = {
        derive_token(secret, endpoint, role)
        for secret, endpoint, role in itertools.product(
            ("secret", "another"), ("fleet-0", "fleet-1"), ("client", "operator")
        )
    }

    assert len(tokens) == 8


@given(NAMES, NAMES)
def test_a_derived_token_can_travel_in_a_header(secret: str, endpoint_id: str) -> None:
    token = derive_token(secret, endpoint_id)

    assert bearer_value(token) == f"Bearer {token}"
    assert len(token) == 43


def test_a_derived_token_stays_what_it_is() -> None:
    # Endpoints and clients of different versions of this package work it out, each by itself.
    assert derive_token("secret", "fleet-0") == "vWzT1-MmijdFybOYSZBu8ixMxekyA5IaT42-ImPku3g"


@pytest.mark.parametrize("token", ["", " a", "a ", "ä", "a\nb"])
def test_what_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        bearer_value(token)


@pytest.mark.parametrize("token", [5, b"a", Path("tokens")])
def test_a_token_of_another_type_is_refused_with_the_types_that_it_may_have(token: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is of type \w+; give a str or a TokenFile"):
        bearer_value(token)
