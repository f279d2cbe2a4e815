"""Reports of a run: progress bar, metrics.jsonl, TensorBoard, Weights & Biases."""

import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from diffusax.boundary.messages import require_extra
from diffusax.images.sheets import contact_sheet
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.devices.mesh import batch_size
from diffusax.training.config import TrainConfig
from diffusax.training.options import by_name
from diffusax.training.recipes.recipe import Clip


def peak_flops(config: TrainConfig) -> float | None:
    """Returns the peak FLOP/s of all devices together, or None where it is not known."""
    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12 * jax.device_count()
    chip = chip_of(jax.devices()[0])
    return chip.tflops * 1e12 * jax.device_count() if chip else None


def batch_arithmetic(config: TrainConfig, mesh: jax.sharding.Mesh) -> str:
    """Describes in a product what a batch is made of."""
    processes, parts = jax.process_count(), batch_size(mesh)
    groups, members = parts // processes, mesh.size // parts
    of = f" groups of {members} devices" if members > 1 else " devices"
    examples = config.batch_size // (parts * config.accumulate)
    return (
        f"batch_size={config.batch_size}: {processes} processes x {groups}{of} x {examples} "
        f"examples x {config.accumulate} microbatches, so {config.batch_size // processes} "
        "examples per process and step"
    )


class Reports:
    """The logs of the first process; on other processes nothing is logged."""

    def __init__(self, config: TrainConfig, *, name: str, start: int):
        """Opens the logs.

        Args:
            config: the options of the run.
            name: the name of the recipe.
            start: the step that the run continues from; later lines in its log are removed.
        """
        self._main = jax.process_index() == 0
        self._folder = Path(config.output)
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._bar = tqdm(
            total=config.steps, initial=start, desc=name, unit="step", disable=not self._main
        )
        if not self._main:
            return
        (self._folder / "validation").mkdir(parents=True, exist_ok=True)
        self._lines = _truncated(self._folder / "metrics.jsonl", start)
        if "tensorboard" in config.report_to:
            writer = require_extra("tensorboardX", "train").SummaryWriter
            # A killed run writes nothing more, and by default would lose two minutes of its log.
            self._tensorboard = writer(
                str(self._folder / "logs"), purge_step=start + 1, flush_secs=1
            )
        if "wandb" in config.report_to:
            self._wandb = _start_wandb(config, name, resumed=start > 0)

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        self._bar.update(step - self._bar.n)

    @contextlib.contextmanager
    def compiling(self, size: str = "") -> Iterator[Callable[[], None]]:
        """Shows, inside the context, that the run compiles; the bar's clock stands still.

        size: that of the images that the step is compiled for, where there are several.

        Yields:
            A function that updates the time shown, to be called now and then.
        """
        self._bar.set_postfix_str(f"compiling {size}".strip())
        try:
            yield self._show_time
        finally:
            self._bar.set_postfix_str("", refresh=False)
            self._bar.unpause()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes a line of metrics.jsonl, and the same numbers to the other logs."""
        if not self._main:
            return
        shown = {k: f"{values[k]:.3g}" for k in ("loss", "images_per_s", "mfu") if k in values}
        self._bar.set_postfix(shown)
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def images(
        self, step: int, images: Sequence[Image.Image] | Clip, *, name: str = "validation"
    ) -> None:
        """Writes a contact sheet, or a clip, to the folder `validation` and to other logs.

        TensorBoard gets a clip's first, middle and last frame.
        """
        if not self._main:
            return
        if isinstance(images, Clip):
            file = self._folder / "validation" / f"{name}-{step:07}{images.suffix}"
            images.write(file)
            self._log_clip(step, images, file, name)
            return
        sheet = contact_sheet(images)
        sheet.save(self._folder / "validation" / f"{name}-{step:07}.png")
        if self._tensorboard is not None:
            self._tensorboard.add_image(name, np.asarray(sheet), step, dataformats="HWC")
        if self._wandb is not None:
            wandb = require_extra("wandb", "wandb")
            self._wandb.log({name: [wandb.Image(image) for image in images]}, step=step)

    def _log_clip(self, step: int, clip: Clip, file: Path, name: str) -> None:
        if self._tensorboard is not None:
            chosen = sorted({0, len(clip.frames) // 2, len(clip.frames) - 1})
            sheet = contact_sheet([clip.frames[i] for i in chosen], columns=len(chosen))
            self._tensorboard.add_image(name, np.asarray(sheet), step, dataformats="HWC")
        if self._wandb is not None:
            wandb = require_extra("wandb", "wandb")
            video = wandb.Video(str(file), format=file.suffix.removeprefix("."))
            self._wandb.log({name: video}, step=step)

    def close(self) -> None:
        """Writes what is not written yet, and closes the logs."""
        self._bar.close()
        if not self._main:
            return
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _show_time(self) -> None:
        """Redraws the bar on a terminal; in a log file it would add lines."""
        if self._main and sys.stderr.isatty():
            self._bar.refresh()


def _start_wandb(config: TrainConfig, name: str, *, resumed: bool) -> Any:
    """Starts the run at Weights & Biases; a resumed run continues its own.

    Raises:
        ValueError: it cannot be started, because there is no login or no connection.
    """
    wandb = require_extra("wandb", "wandb")
    file = Path(config.output) / "wandb.txt"
    if not (resumed and file.is_file()):
        file.write_text(uuid.uuid4().hex[:8])
    try:
        return wandb.init(
            project="diffusax",
            name=name,
            id=file.read_text().strip(),
            resume="allow",
            config=by_name(config),
            dir=config.output,
        )
    # wandb's errors have no common class of their own.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"Weights & Biases does not start ({reason}); run `wandb login`, set "
            "WANDB_MODE=offline, or leave wandb out of report_to"
        ) from None


def _truncated(path: Path, start: int) -> Any:
    """Opens the file at its end, without the lines after `start`, which will be written again."""
    kept = []
    if path.is_file():
        for line in path.read_text("utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    kept.append(line)
            except (json.JSONDecodeError, KeyError):
                continue
    path.write_text("".join(line + "\n" for line in kept), "utf-8")
    return path.open("a", encoding="utf-8")


log = logging.getLogger(__name__)


class Meter:
    """Losses and speed since the last reading."""

    def __init__(self, config: TrainConfig, step: int):
        """Starts to measure. step: the step that the run begins after."""
        self.config = config
        self.peak = peak_flops(config)
        self.skipped = 0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Starts to measure anew after a step."""
        self.metrics: list[dict[str, jax.Array]] = []
        self.flops = 0
        self.step, self.time = step, time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leaves out time in which no step was done."""
        self.time += seconds

    def add(self, metrics: dict[str, jax.Array], flops: int) -> None:
        """Adds the metrics of one more step, which need not be computed yet, and its operations."""
        self.metrics.append(metrics)
        self.flops += flops

    def read(self, step: int) -> dict[str, float]:
        """Returns means over the steps since the last reading; waits until they are computed."""
        metrics = jax.device_get(self.metrics)
        losses = [float(m["loss"]) for m in metrics if np.isfinite(m["loss"])]
        skipped = int(metrics[-1]["skipped"])
        if skipped > self.skipped:
            log.warning(
                "%d steps were skipped so far, whose loss, gradients or update were not finite",
                skipped,
            )
        self.skipped = skipped
        values: dict[str, float] = {"skipped": skipped}
        if losses:
            values["loss"] = sum(losses) / len(losses)
            values["grad_norm"] = float(metrics[-1]["grad_norm"])
        steps = step - self.step
        seconds = time.perf_counter() - self.time
        values["images_per_s"] = steps * self.config.batch_size / seconds
        if self.flops:
            rate = self.flops / seconds
            values["tflops"] = rate / 1e12
            if self.peak:
                values["mfu"] = rate / self.peak
        self.restart(step)
        return values
