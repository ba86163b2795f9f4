"""For all tests."""

from hypothesis import settings

# Machines are busy: how long an example takes says nothing.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
