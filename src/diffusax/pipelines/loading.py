"""Checkpoints to pipelines."""

from pathlib import Path
from typing import Any

from diffusax.checkpoints import load_network, read_model_index, resolve
from diffusax.checkpoints.files import load_json
from diffusax.models.network import Network
from diffusax.pipelines.stable_diffusion import StableDiffusionPipeline
from diffusax.samplers import Scheduler, scheduler_from_config
from diffusax.text.tokenizer import CLIPTokenizer

PIPELINES = {"StableDiffusionPipeline": StableDiffusionPipeline}


class DiffusionPipeline:
    """The pipeline that a checkpoint names in its model_index.json."""

    @staticmethod
    def from_pretrained(
        path_or_repo: str | Path,
        *,
        dtype: Any = "float32",
        vae_dtype: Any = None,
        variant: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        cache_dir: str | Path | None = None,
        vae: Network | None = None,
        scheduler: Scheduler | None = None,
        device: Any = None,
    ) -> StableDiffusionPipeline:
        """Loads a checkpoint in diffusers' layout.

        Args:
            path_or_repo: a folder, a Hub repository id, or "emoji" for the model in the package.
            dtype: of parameters and computation, a name or a JAX dtype; None keeps the files'.
            vae_dtype: the autoencoder's, where it should differ.
            variant: such as "fp16", where the checkpoint has one.
            revision: a branch, tag or commit of the repository.
            token: for private and gated repositories; by default the stored login.
            local_files_only: use the cache only.
            cache_dir: instead of HF_HOME.
            vae: an autoencoder to use instead, as from `load_network` (a TAESD, say).
            scheduler: a sampler to use instead.
            device: a device or sharding to put the parameters on.

        Raises:
            ValueError: the checkpoint cannot be had or read; says which file and why.
        """
        return load_pipeline(
            path_or_repo,
            dtype=dtype,
            vae_dtype=vae_dtype,
            variant=variant,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            cache_dir=cache_dir,
            vae=vae,
            scheduler=scheduler,
            device=device,
        )


def load_pipeline(
    path_or_repo: str | Path,
    *,
    dtype: Any = "float32",
    vae_dtype: Any = None,
    variant: str | None = None,
    vae: Network | None = None,
    scheduler: Scheduler | None = None,
    device: Any = None,
    **hub: Any,
) -> StableDiffusionPipeline:
    """See `DiffusionPipeline.from_pretrained`."""
    folder = resolve(path_or_repo, variant=variant, **hub)
    class_name, components, _ = read_model_index(folder)
    if class_name not in PIPELINES:
        raise ValueError(
            f"{folder / 'model_index.json'} asks for {class_name or 'no pipeline'}, which diffusax "
            f"does not have (it has {', '.join(PIPELINES)})"
        )
    for name in ("scheduler", "text_encoder", "tokenizer", "unet", "vae"):
        if name not in components:
            raise ValueError(f"{folder / 'model_index.json'} has no {name}")
    if scheduler is None:
        config = load_json(folder / "scheduler" / "scheduler_config.json")
        scheduler = scheduler_from_config({"_class_name": components["scheduler"][1], **config})
    if vae is None:
        vae = load_network(
            folder / "vae",
            dtype=dtype if vae_dtype is None else vae_dtype,
            variant=variant,
            device=device,
        )
    options = {"dtype": dtype, "variant": variant, "device": device}
    return PIPELINES[class_name](
        text_encoder=load_network(folder / "text_encoder", **options),
        tokenizer=CLIPTokenizer.from_folder(folder / "tokenizer"),
        unet=load_network(folder / "unet", **options),
        vae=vae,
        scheduler=scheduler,
    )
