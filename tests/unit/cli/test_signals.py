import contextlib
import signal
from itertools import count

import pytest

from rlmesh_ray.cli.signals import (
    Presses,
    has_interrupt,
    interrupt_on_sigterm,
    interrupts_held,
    interrupts_noted,
    require_no_interrupt,
)


@pytest.fixture
def apart() -> Presses:
    """Presses that are a second apart."""
    return Presses(count().__next__)


@pytest.fixture
def same() -> Presses:
    """Signals of the same press."""
    return Presses(lambda: 0.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_delayed_until_the_block_is_done(
    number: signal.Signals, apart: Presses
) -> None:
    with interrupt_on_sigterm(apart):
        assert interrupted_in_a_block(apart, number) == [number]
        with pytest.raises(KeyboardInterrupt):  # as before the block
            signal.raise_signal(number)


def test_an_interrupt_that_other_code_has_lost_is_raised_again(apart: Presses) -> None:
    with interrupt_on_sigterm(apart):
        require_no_interrupt(apart)
        with contextlib.suppress(KeyboardInterrupt):  # as an import, or a destructor
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            require_no_interrupt(apart)

    with interrupt_on_sigterm(apart):  # of the next command
        require_no_interrupt(apart)


def test_a_second_interrupt_is_not_delayed(apart: Presses) -> None:
    assert interrupted_in_a_block(apart, signal.SIGINT, signal.SIGTERM) == [signal.SIGINT]


def test_the_first_interrupt_is_recorded_and_the_second_one_raised(apart: Presses) -> None:
    noted: list[str] = []
    with (
        interrupt_on_sigterm(apart),
        interrupts_noted(lambda: noted.append("noted"), apart) as has_come,
    ):
        assert not has_come()
        signal.raise_signal(signal.SIGTERM)
        assert has_come()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert noted == ["noted"]


def test_a_signal_that_comes_again_for_the_same_press_is_one_interrupt(same: Presses) -> None:
    both = [signal.SIGINT, signal.SIGINT]

    assert interrupted_in_a_block(same, *both) == both
    with interrupt_on_sigterm(same):  # and what cleans up after the block is left alone
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_an_ignored_signal_stays_ignored_in_the_block() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def interrupted_in_a_block(presses: Presses, *numbers: signal.Signals) -> list[signal.Signals]:
    """Return which of the signals did not end the block."""
    outlived = []
    try:
        with interrupts_held(presses):
            for number in numbers:
                signal.raise_signal(number)
                outlived.append(number)
    except KeyboardInterrupt:
        return outlived
    raise AssertionError("no interrupt came out of the block")


def test_an_interrupt_behind_another_error_is_found() -> None:
    assert has_interrupt(covered_by_cleaning_up())
    assert has_interrupt(KeyboardInterrupt())


def test_an_error_of_its_own_is_no_interrupt() -> None:
    assert not has_interrupt(RuntimeError("cannot release un-acquired lock"))


def covered_by_cleaning_up() -> Exception:
    try:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("cannot release un-acquired lock")
    except RuntimeError as error:
        return error
