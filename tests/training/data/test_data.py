"""Rows to batches."""

import json
import logging

import numpy as np
import pytest
from support.runs.toy_run import Rows

from diffusax.training.data.batches import Batches


def prepare(row, rng):
    return {"x": row["x"], "noise": rng.standard_normal(2)}


class Numbered(Rows):
    """Rows that hold their own index; some of them broken."""

    def __init__(self, rows: int, broken: tuple[int, ...] = ()):
        super().__init__(rows)
        self.broken = broken

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("cannot be read")
        return {"x": np.int64(index)}


def batches(source, n=4, **options) -> Batches:
    return Batches(source, prepare, batch_size=n, **{"seed": 0, **options})


def take(iterator, count: int) -> np.ndarray:
    return np.stack([next(iterator)["x"] for _ in range(count)])


def test_every_epoch_has_each_row_once_in_an_order_of_its_own():
    epochs = take(batches(Numbered(20)), 10).reshape(2, 20)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) != list(range(20))


def test_the_seed_decides_the_order_and_the_random_numbers():
    first, same, other = (batches(Numbered(20), seed=seed) for seed in (1, 1, 2))
    a, b, c = (next(x) for x in (first, same, other))
    np.testing.assert_array_equal(a["noise"], b["noise"])
    np.testing.assert_array_equal(a["x"], b["x"])
    assert not np.array_equal(a["x"], c["x"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 0),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(2, 0, marks=pytest.mark.slow),
        pytest.param(0, 3, marks=pytest.mark.slow),
    ],
)
def test_continues_from_a_saved_position_whatever_the_workers(before, after):
    run = batches(Numbered(40), workers=before)
    take(run, 7)
    state = json.loads(json.dumps(run.get_state()))
    expected = [next(run) for _ in range(8)]
    run.close()
    again = batches(Numbered(40), workers=after)
    again.set_state(state)
    for batch in expected:
        for key, value in next(again).items():
            np.testing.assert_array_equal(value, batch[key])
    assert again.tally.seen == run.tally.seen
    again.close()


def test_continues_from_a_position_that_holds_grains_state():
    """As checkpoints of earlier versions have it, here with two workers."""
    run = batches(Numbered(40))
    take(run, 7)
    expected = take(run, 3)
    workers = {
        **{"next_index_in_cycle": 0, "next_index_in_datasets": 2, "future_states": {}},
        **{"iterators_in_use_indices": [0, 1], "exhausted": [0, 0]},
        "iterators_in_use_states": [{"next_index": 14}, {"next_index": 14}],
    }
    again = batches(Numbered(40))
    again.set_state({"grain": workers, "seen": 28, "broken": 0})
    np.testing.assert_array_equal(take(again, 3), expected)


def test_processes_share_the_rows_of_an_epoch():
    parts = [batches(Numbered(24), process_index=i, process_count=2) for i in range(2)]
    rows = [set(take(part, 3).ravel()) for part in parts]
    assert rows[0] | rows[1] == set(range(24))
    assert not rows[0] & rows[1]
    with pytest.raises(ValueError, match="not enough for 3 processes"):
        batches(Numbered(2), process_count=3)


def test_broken_rows_are_skipped_counted_and_named(caplog):
    run = batches(Numbered(400, broken=(3, 77)), n=20)
    with caplog.at_level(logging.WARNING):
        rows = take(run, 40)
    assert not {3, 77} & set(rows.ravel())
    assert run.tally.broken == 4
    assert sum("row 77: cannot be read" in message for message in caplog.messages) == 1


def test_more_than_one_broken_row_in_a_hundred_stops_the_run():
    run = batches(Numbered(400, broken=(1, 2, 3, 4, 5)), n=20)
    with pytest.raises(
        ValueError, match=r"more than 1%; the last is row \d: OSError|cannot be read"
    ):
        take(run, 40)


def test_a_row_that_cannot_be_prepared_is_broken_too():
    def fussy(row, rng):
        if row["x"] == 5:
            raise KeyError("text")
        return prepare(row, rng)

    run = Batches(Numbered(200), fussy, batch_size=10, seed=0)
    assert 5 not in take(run, 20)
    assert run.tally.broken == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_example_is_known_before_the_batches_are_read(workers):
    source = Numbered(400, broken=(3, 5, 7))
    expected = next(batches(source))
    looked_at = batches(source, workers=workers)
    position = looked_at.get_state()
    example = looked_at.example()
    assert (example["x"], *example["noise"]) == (expected["x"][0], *expected["noise"][0])
    assert looked_at.get_state() == position
    np.testing.assert_array_equal(next(looked_at)["x"], expected["x"])
    looked_at.close()


def test_where_all_rows_are_broken_there_is_no_example():
    with pytest.raises(ValueError, match=r"11 of 11 rows are broken.*cannot be read"):
        batches(Numbered(400, broken=tuple(range(400)))).example()
