"""Work beside the caller's."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diffusax.offline.stages import ahead


def test_results_come_in_order_and_only_so_many_are_begun_before():
    begun = []

    def work(item):
        begun.append(item)
        return threading.current_thread().name, item * 10

    with ThreadPoolExecutor(3, "beside") as pool:
        for depth in (1, 2, 5):
            begun.clear()
            for asked, (thread, result) in enumerate(ahead(pool, work, range(20), depth)):
                assert result == asked * 10
                assert thread.startswith("beside")
                assert len(begun) <= asked + depth + 1
            assert sorted(begun) == list(range(20))


def test_work_goes_on_while_the_caller_does_something_else():
    started, release = threading.Event(), threading.Event()

    def work(item):
        if item == 1:
            started.set()
            assert release.wait(10)
        return item

    with ThreadPoolExecutor(1) as pool:
        results = ahead(pool, work, range(3), 1)
        assert next(results) == 0
        assert started.wait(10)
        release.set()
        assert list(results) == [1, 2]


def test_a_depth_of_none_is_the_callers_own_thread():
    names = ahead(None, lambda _: threading.current_thread().name, range(2), 0)
    assert list(names) == [threading.current_thread().name] * 2


def test_an_error_is_the_callers():
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        list(ahead(pool, lambda item: 1 // item, [1, 0, 2], 2))
