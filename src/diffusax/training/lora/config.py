"""The options of LoRA."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.options import Options


@dataclasses.dataclass(frozen=True)
class LoRAConfig(Options):
    """Train low-rank adapters (LoRA, Hu et al. 2021) in the place of the networks."""

    group: ClassVar[str] = "lora."

    rank: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The rank of the adapters; 0 trains the networks themselves."""
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The scale of the adapters times their rank; by default the rank."""
    targets: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """The ends of the names of the layers that get adapters, or "all" for every linear layer and
    convolution; by default those of attention, to_q, to_k, to_v and to_out.0, in text encoders
    q_proj, k_proj, v_proj and out_proj."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The share of a layer's inputs that its adapter does not see."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """How A begins, while B is zero: gaussian is that of diffusers' scripts, kaiming PEFT's own."""
    dora: bool = False
    """Learn the lengths of the kernels' columns, too (DoRA, Liu et al. 2024)."""
    path: str | None = None
    """A LoRA to go on from, in any format that load_lora_weights reads: a file, a folder or a Hub
    repository id. Its layers, ranks and alphas are kept."""
    format: Literal["diffusers", "kohya", "both"] = "diffusers"
    """The format of the result's file: pytorch_lora_weights.safetensors of diffusers,
    kohya.safetensors of kohya's scripts, or both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("rank", "alpha", "targets", "init", "dora")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name in names if getattr(self, name) != defaults[name]]
        if self.path is not None and given:
            raise ValueError(
                f"lora.{given[0]} cannot be given with lora.path, whose layers are trained further "
                "as they are"
            )
        others = [n for n, v in defaults.items() if n != "rank" and getattr(self, n) != v]
        if others and not self.on:
            raise ValueError(f"lora.{others[0]} does nothing without lora.rank or lora.path")

    @property
    def on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or self.path is not None
