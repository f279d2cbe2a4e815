"""The future of a call of a running batch, without a batch."""

import concurrent.futures
import threading

from diffusax.batch.request import Generation

SECONDS = 10


def begun():
    """A call of which a row is computed."""
    generation = Generation()
    generation.set_rows(0, 1, 4)
    return generation


def in_thread(function):
    """Starts a function in a thread, and returns the list to which its result is added."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    return thread, found


def test_a_preview_ends_when_its_call_is_cancelled():
    generation = begun()
    thread, found = in_thread(generation.preview)
    while not generation.wants_preview():
        pass
    assert generation.cancel()
    thread.join(SECONDS)
    assert found == [[]]


def test_a_preview_of_a_call_that_waits_is_empty_at_once():
    generation = Generation()
    assert generation.preview(0) == []
    generation.set_rows(0, 0, 4)
    generation.set_rows(1, 4, 4)
    assert generation.preview(0) == []


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
    generation = Generation()
    generation.set_rows(0, 0, 4)
    assert not generation.running()
    generation.set_rows(0, 1, 4)
    assert generation.running()
    assert generation.cancel()
    assert not generation.running()


def test_a_call_that_is_cancelled_by_many_threads_is_cancelled_once():
    for _ in range(50):
        generation, ended = begun(), []
        generation.add_done_callback(ended.append)
        threads = [in_thread(generation.cancel) for _ in range(4)]
        for thread, _ in threads:
            thread.join(SECONDS)
        assert [found for _, found in threads] == [[True]] * 4
        assert ended == [generation]
        generation.settle("too late")
        assert generation.cancelled()
