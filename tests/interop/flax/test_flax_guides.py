"""The programs of diffusers' guides to its Flax classes run, but for the import, on 8 devices."""

import pytest
from support.many_devices import run_on_devices
from support.runs import RUNS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_the_guide_runs(kind, tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline(kind)
    run_on_devices(RUNS / "flax_guides_run.py", kind, folder, devices=8)
