"""The measured costs of a running batch's rows."""

import pytest

from diffusax.pipelines.measures import RowSeconds


def test_what_a_size_costs_to_compile_is_no_cost_of_its_rows():
    class Kind:
        """A kind of batch."""

    seconds, kind = RowSeconds(), Kind()
    assert seconds.measured(kind, 4) is None
    seconds.note(kind, 4, 20.0)
    assert seconds.measured(kind, 4) is None
    for given, mean in ((0.005, 0.005), (0.007, 0.0056), (20.0, 0.00728), (0.003, 0.003)):
        seconds.note(kind, 4, given)
        assert seconds.measured(kind, 4) == pytest.approx(mean)
    assert seconds.measured(kind, 8) is None
