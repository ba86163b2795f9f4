from rlmesh_ray.cli.signals import has_interrupt


def test_an_interrupt_that_another_error_has_covered_is_seen() -> None:
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
