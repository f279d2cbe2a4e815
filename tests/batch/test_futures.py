"""The future of a call of a running batch, without a batch."""

import concurrent.futures
import threading

from diffusax.batch.request import Request

SECONDS = 10


def begun():
    """A call of which a row is computed."""
    request = Request()
    request.set_rows(0, 1, 4)
    return request


def in_thread(function):
    """Starts a function in a thread, and returns the list to which its result is added."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    return thread, found


def test_a_preview_ends_when_its_call_is_cancelled():
    request = begun()
    thread, found = in_thread(request.preview)
    while not request.wants_preview():
        pass
    assert request.cancel()
    thread.join(SECONDS)
    assert found == [[]]


def test_a_preview_of_a_call_that_waits_is_empty_at_once():
    request = Request()
    assert request.preview(0) == []
    request.set_rows(0, 0, 4)
    request.set_rows(1, 4, 4)
    assert request.preview(0) == []


def test_those_who_wait_for_several_calls_learn_of_the_cancelled_one():
    others = [begun(), begun()]
    thread, found = in_thread(lambda: list(concurrent.futures.as_completed(others, SECONDS)))
    assert others[0].cancel()
    assert others[0].cancel()
    assert concurrent.futures.wait(others, 0).done == {others[0]}
    others[1].settle("a result")
    thread.join(SECONDS)
    assert found == [others]


def test_a_call_that_has_begun_is_running_until_it_ends():
    request = Request()
    request.set_rows(0, 0, 4)
    assert not request.running()
    request.set_rows(0, 1, 4)
    assert request.running()
    assert request.cancel()
    assert not request.running()


def test_a_call_that_is_cancelled_by_many_threads_is_cancelled_once():
    for _ in range(50):
        request, ended = begun(), []
        request.add_done_callback(ended.append)
        threads = [in_thread(request.cancel) for _ in range(4)]
        for thread, _ in threads:
            thread.join(SECONDS)
        assert [found for _, found in threads] == [[True]] * 4
        assert ended == [request]
        request.settle("too late")
        assert request.cancelled()
