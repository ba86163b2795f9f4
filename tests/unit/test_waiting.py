"""Waiting for descriptors."""

import os

from rlmesh_ray.waiting import Waiting


def test_the_same_descriptors_are_waited_for_again_and_again() -> None:
    ours, theirs = os.pipe()
    waiting = Waiting(1e-3)
    try:
        assert waiting.ready(ours, timeout_s=0.0) == []
        os.write(theirs, b"x")
        assert waiting.ready(ours) == [ours]
        os.read(ours, 1)
        assert waiting.ready(ours, timeout_s=0.0) == []
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_number_that_is_used_anew_means_the_new_descriptor() -> None:
    waiting = Waiting(1e-3)
    for _ in range(2):
        ours, theirs = os.pipe()
        try:
            assert waiting.ready(ours, timeout_s=0.0) == []
            os.write(theirs, b"x")
            assert waiting.ready(ours) == [ours]
        finally:
            os.close(ours)
            os.close(theirs)


def test_any_number_of_descriptors_can_be_waited_for_in_turn() -> None:
    waiting = Waiting(1e-3)
    pipes = [os.pipe() for _ in range(100)]
    try:
        for ours, theirs in pipes:
            os.write(theirs, b"x")
            assert waiting.ready(ours) == [ours]
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)
