"""What a run says of itself."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.runs import toy_run
from support.runs.toy_run import INPUTS, OUTPUTS, Toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffusax.training import TrainConfig, train
from diffusax.training.loop.reports import Reports, batch_arithmetic
from diffusax.training.optimizers import OptimizerConfig, learning_rate


class Wandb:
    """Weights & Biases' client, as far as a run uses it."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        self.runs.append(options)
        return SimpleNamespace(log=lambda *args, **kwargs: None, finish=lambda: None)


@pytest.fixture
def wandb(monkeypatch):
    client = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", client)
    return client


def test_a_resumed_run_goes_on_with_its_own_at_weights_and_biases(tmp_path, wandb):
    config = TrainConfig(output=str(tmp_path), report_to=("wandb",))
    for start in (0, 5, 0):
        Reports(config, name="toy", start=start).close()
    first, resumed, anew = (run["id"] for run in wandb.runs)
    assert first == resumed
    assert first != anew
    assert {run["resume"] for run in wandb.runs} == {"allow"}


def test_without_a_login_weights_and_biases_is_one_sentence(tmp_path, wandb):
    def refuse(**options):
        raise RuntimeError("api_key not configured (no-tty).\n  call wandb.login(key=...)")

    wandb.init = refuse
    config = TrainConfig(output=str(tmp_path), report_to=("wandb",))
    with pytest.raises(ValueError, match=r"does not start .*no-tty.*; run `wandb login`") as caught:
        Reports(config, name="toy", start=0)
    assert "\n" not in str(caught.value)


def test_the_bar_says_that_the_step_compiles_and_its_clock_stands_still(tmp_path, capsys):
    reports = Reports(TrainConfig(output=str(tmp_path), report_to=()), name="toy", start=0)
    with reports.compiling() as show:
        time.sleep(0.4)
        show()
        assert "compiling" in capsys.readouterr().err
    assert reports._bar.format_dict["elapsed"] < 0.2
    reports.advance(1)
    assert "compiling" not in capsys.readouterr().err
    reports.close()


def test_tensorboard_has_what_a_killed_run_wrote(tmp_path):
    options = ["report_to=[tensorboard]", "hang_at=5", "steps=100"]
    run = subprocess.Popen(
        [sys.executable, toy_run.__file__, str(tmp_path), *options], stderr=subprocess.DEVNULL
    )
    file, limit = tmp_path / "metrics.jsonl", time.monotonic() + 60
    while not file.is_file() or len(file.read_text().splitlines()) < 5:
        assert run.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(3)
    run.kill()
    run.wait()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]


class Sometimes(Toy):
    """A loss that is not finite in the batches with row 0."""

    def example(self, row, rng):
        return {**super().example(row, rng), "bad": np.float32(row["bad"])}

    def loss(self, trained, frozen, batch, keys):
        return super().loss(trained, frozen, batch, keys) / (1 - batch["bad"])


class Marked:
    """Two rows, of which the first is marked."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def name(self, index):
        return f"row {index}"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_utilisation_counts_the_work_of_all_microbatches(tmp_path, caplog, accumulate):
    config = TrainConfig(
        output=str(tmp_path),
        steps=3,
        batch_size=8,
        accumulate=accumulate,
        log_every=1,
        peak_tflops=1e-3,
        report_to=(),
    )
    caplog.set_level("INFO", logger="diffusax.training")
    train(Toy(), config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Forward and the gradient of the kernel, two operations for each of its numbers.
    flops = 2 * 2 * INPUTS * OUTPUTS
    devices = jax.device_count()
    for line in lines:
        assert line["tflops"] * 1e12 == pytest.approx(flops * line["images_per_s"])
        assert line["mfu"] == pytest.approx(line["tflops"] / (1e-3 * devices))
    examples = 8 // devices // accumulate
    assert (
        f"batch_size=8: 1 processes x {devices} devices x {examples} examples x {accumulate} "
        "microbatches, so 8 examples per process and step"
    ) in caplog.text


def test_groups_of_devices_share_examples(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = SimpleNamespace(shape={"data": 4, "fsdp": 2, "tensor": 2}, size=16)
    config = TrainConfig(batch_size=64, accumulate=4)
    assert batch_arithmetic(config, mesh) == (
        "batch_size=64: 2 processes x 4 groups of 2 devices x 2 examples x 4 microbatches, "
        "so 32 examples per process and step"
    )


def test_the_learning_rate_is_that_of_the_updates(tmp_path, caplog):
    rows = [{"x": np.ones(64, np.float32), "bad": i == 0} for i in range(4)]
    config = TrainConfig(
        output=str(tmp_path),
        steps=8,
        batch_size=1,
        log_every=1,
        optimizer=OptimizerConfig(schedule="linear"),
        report_to=(),
    )
    train(Sometimes(Marked(rows)), config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["skipped"] == 2
    schedule = learning_rate(config.optimizer, 8)
    for line in lines:
        updates = line["step"] - line["skipped"]
        assert line["lr"] == pytest.approx(float(schedule(max(updates - 1, 0))))
    assert "2 steps were skipped so far" in caplog.text
