"""`diffusax ema`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Options, Share
from diffusax.cli.parsing import OWN, parse
from diffusax.cli.train import RECIPES, make_recipe
from diffusax.training import TrainConfig
from diffusax.training.ema.posthoc import Length
from diffusax.training.ema.snapshots import AVERAGES, read_snapshots
from diffusax.training.ema.update import Start
from diffusax.training.loop.export import make_average
from diffusax.training.options import read_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ema(Options):
    """Make another average of a run's parameters from those that ema.rule=power stored.

    The model is written in the form of `model_ema`. It is an error if the stored averages do not
    give the wanted one to a tenth.
    """

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's output folder."""
    kind: Literal["power", "late"] = "power"
    """A power-function average over all steps (Karras et al. 2024), or one of the last steps."""
    length: Annotated[Length | None, OWN] = None
    """The width (sigma_rel) of a power-function average, as a share of the steps, such as 0.05."""
    start: Annotated[Start | None, OWN] = None
    """Where a late average begins: a whole number is a step, a number with a point a fraction."""
    decay: Annotated[Share | None, OWN] = None
    """The decay of a late average's weights into the past, by update; by default all are alike."""
    step: Annotated[Count | None, OWN] = None
    """The step where the average ends, at which it was stored; by default the last of them."""
    output: Annotated[Path | None, OWN] = None
    """The folder for the model; by default one in the run's, named after the average."""

    def run(self) -> None:
        """Writes the model."""
        late = self.kind == "late"
        needed = "start" if late else "length"
        others = ("length",) if late else ("start", "decay")
        if getattr(self, needed) is None:
            raise ValueError(f"--{needed} must be given with --kind {self.kind}")
        if given := [name for name in others if getattr(self, name) is not None]:
            raise ValueError(f"--{given[0]} cannot be given with --kind {self.kind}")
        name = read_snapshots(self.folder / AVERAGES)[0].recipe
        _, config_class = RECIPES[name]
        config: TrainConfig = read_config(config_class, self.folder / "config.yaml")
        config = dataclasses.replace(config, output=str(self.folder))
        # Nothing is trained, so that DreamBooth needs no images of its class.
        recipe = make_recipe(name, config, compile_only=name == "dreambooth")
        folder = self.output or self.folder / self._name()
        error = make_average(
            recipe,
            config,
            folder,
            length=self.length,
            start=self.start,
            decay=self.decay,
            step=self.step,
        )
        print(escaped(f"wrote {folder} (the profile differs by {error:.2g} of its norm)"))

    def _name(self) -> str:
        what = f"{self.length:g}" if self.start is None else f"late_{self.start:g}"
        decay = "" if self.decay is None else f"_{self.decay:g}"
        return f"model_ema_{what}{decay}" + ("" if self.step is None else f"_at_{self.step}")


def command(args: list[str]) -> Ema:
    """Reads the options from the arguments."""
    return parse(Ema, args, prog="diffusax ema")
