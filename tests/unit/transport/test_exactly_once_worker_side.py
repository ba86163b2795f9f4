"""Which requests a worker executes; what follows in a session is explored in ``explorer``."""

import pytest

from rlmesh_ray.transport.exactly_once import (
    ClientSide,
    EndpointSide,
    ExecutionDecision,
    SessionProgress,
    WorkerSide,
)


def worker_at(number: int) -> tuple[WorkerSide, SessionProgress]:
    progress = SessionProgress.local(1)
    progress.start(number)
    return WorkerSide(progress), progress


def test_a_worker_begins_where_the_session_stands() -> None:
    worker, _ = worker_at(6)

    assert [worker.decide(number) for number in (5, 6, 7, 8)] == [
        ExecutionDecision.REFUSE,
        ExecutionDecision.RESEND_ANSWER,
        ExecutionDecision.EXECUTE,
        ExecutionDecision.REFUSE,
    ]


def test_a_number_is_executed_once_over_either_transport() -> None:
    worker, progress = worker_at(0)
    worker.is_direct_open = True
    progress.begin(1, 0)
    progress.end()

    assert not worker.executes_direct(1)
    assert worker.decide(1) is ExecutionDecision.RESEND_ANSWER
    assert worker.executes_direct(2)


def test_direct_steps_are_executed_only_while_they_are_accepted() -> None:
    worker, progress = worker_at(0)
    assert not worker.executes_direct(1)
    worker.is_direct_open = True
    progress.begin(1, 0)
    worker.is_direct_open = False
    progress.end()

    assert not worker.executes_direct(2)
    assert worker.decide(2) is ExecutionDecision.EXECUTE


def test_what_the_endpoint_answers_itself_is_passed_over_in_its_turn() -> None:
    worker, progress = worker_at(0)
    worker.skip(2)
    assert progress.done == 0
    worker.skip(1)

    assert (progress.begun, progress.done) == (1, 1)
    assert worker.decide(2) is ExecutionDecision.EXECUTE


@pytest.mark.parametrize("is_done", [False, True])
def test_a_late_step_is_overdue_unless_it_was_done_before_the_disconnect(is_done: bool) -> None:
    progress = SessionProgress.local(1)
    endpoint = EndpointSide(progress)
    progress.begin(1, 0)
    if is_done:
        progress.end()

    assert endpoint.disconnect_overdue(1) is not is_done
    assert endpoint.is_overdue(1) is not is_done
    assert not endpoint.is_overdue(0)
    assert not endpoint.is_overdue(2)
    assert not endpoint.is_at_rest
    endpoint.reply_received()
    assert endpoint.is_at_rest


def test_a_client_sends_again_what_the_direct_connection_did_not_answer() -> None:
    client = ClientSide()
    client.sent()
    client.sent_direct()

    assert not client.direct_answered(1)
    assert client.fall_back_to_join() == 2
    assert not client.direct_answered(2)
    assert client.next_number == 3
