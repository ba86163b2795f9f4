import pytest

from rlmesh_ray.server.endpoint.calls import clipped, text_of


class Mute(Exception):
    """An error whose own text cannot be had."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__()
        self._raised = raised

    def __str__(self) -> str:
        raise self._raised


def test_the_text_of_an_error_is_its_message() -> None:
    assert text_of(ValueError("no such thing")) == "no such thing"


@pytest.mark.parametrize("raised", [ValueError("too"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_whose_str_raises_has_a_text(raised: BaseException) -> None:
    assert "__str__" in text_of(Mute(raised))


def test_a_very_long_text_is_shortened() -> None:
    text = text_of(ValueError("begins" + "x" * 10**6 + "ends"))

    assert text.startswith("begins")
    assert text.endswith("ends")
    assert len(text) < 10**4


def test_what_is_short_enough_stays_whole() -> None:
    assert clipped("1234", 4) == "1234"
    assert clipped("12345", 4) == "12 [...] 45"
