"""What programs see of the commands and the metrics is what ``tests/golden/surface.txt`` says."""

import pytest

from tests.golden import surface


@pytest.mark.parametrize("section", surface.SECTIONS)
def test_the_surface_is_what_the_golden_file_says(section: str) -> None:
    assert surface.lines(section) == surface.held(section), "run: python -m tests.golden.surface"
