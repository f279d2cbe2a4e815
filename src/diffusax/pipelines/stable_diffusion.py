"""Text to image with Stable Diffusion 1.x and 2.x."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from diffusax.checkpoints import save_network, write_model_index
from diffusax.checkpoints.networks import write_json
from diffusax.models.network import Network, Params
from diffusax.models.tiling import tiled_decode
from diffusax.pipelines import checks
from diffusax.pipelines.conditioning import PromptEncoder, prompt_context
from diffusax.pictures import to_pil
from diffusax.pipelines.noise import SEED_LIMIT, JaxNoise, TorchNoise, noise_source
from diffusax.pipelines.programs import Guidance, Programs
from diffusax.samplers import Schedule, Scheduler, Table
from diffusax.text.prompts import tokenize_prompts
from diffusax.text.tokenizer import CLIPTokenizer

OUTPUT_TYPES = ("pil", "np", "jax", "latent")
Callback = Callable[["StableDiffusionPipeline", int, float, dict[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class ImagePipelineOutput:
    """images: PIL images, or an array: b h w 3 in [0, 1], or latents b c h w."""

    images: Any


class StableDiffusionPipeline:
    """Prompts to pictures. Assigning `scheduler` swaps the sampler and compiles nothing.

    Attributes:
        text_encoder, unet, vae: the networks.
        tokenizer: CLIP's.
        scheduler: the sampler and the noise schedule.
        params: the networks' parameters, {"text_encoder": ..., "unet": ..., "vae": ...}.
        vae_tiling: decode large pictures in tiles (see `enable_vae_tiling`).
    """

    def __init__(
        self,
        *,
        text_encoder: Network,
        tokenizer: CLIPTokenizer,
        unet: Network,
        vae: Network,
        scheduler: Scheduler,
    ):
        self.text_encoder, self.unet, self.vae = text_encoder, unet, vae
        self.tokenizer, self.scheduler = tokenizer, scheduler
        self.params: dict[str, Params] = {
            "text_encoder": text_encoder.params,
            "unet": unet.params,
            "vae": vae.params,
        }
        self.vae_tiling = False
        self._progress_bar: dict[str, Any] = {}
        self._programs = Programs(text_encoder, unet, vae)
        self._encode = jax.jit(self._programs.encode, static_argnames=("clip_skip", "repeats"))
        self._begin = jax.jit(self._programs.begin, static_argnames="shape")
        self._denoise = jax.jit(self._programs.denoise, donate_argnames="state")
        self._decode = jax.jit(self._programs.decode)
        self._decode_raw = jax.jit(self._programs.decode_raw)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **options: Any) -> "StableDiffusionPipeline":
        """As `DiffusionPipeline.from_pretrained`."""
        from diffusax.pipelines.loading import load_pipeline

        return load_pipeline(path_or_repo, **options)

    def save_pretrained(self, folder: str | Path, *, variant: str | None = None) -> None:
        """Writes a checkpoint that diffusers opens, with the parameters in `self.params`."""
        folder = Path(folder)
        for name in ("text_encoder", "unet", "vae"):
            network = dataclasses.replace(getattr(self, name), params=self.params[name])
            save_network(network, folder / name, variant=variant)
        self.tokenizer.save(folder / "tokenizer")
        (folder / "scheduler").mkdir(exist_ok=True)
        write_json(folder / "scheduler" / "scheduler_config.json", self.scheduler.to_config())
        write_model_index(
            folder,
            "StableDiffusionPipeline",
            {
                "feature_extractor": None,
                "image_encoder": None,
                "safety_checker": None,
                "scheduler": ("diffusers", self.scheduler.class_name),
                "text_encoder": ("transformers", self.text_encoder.class_name),
                "tokenizer": ("transformers", "CLIPTokenizer"),
                "unet": ("diffusers", self.unet.class_name),
                "vae": ("diffusers", self.vae.class_name),
            },
            requires_safety_checker=False,
        )

    @property
    def generate_fn(self) -> Callable[[Params, dict[str, Any]], jax.Array]:
        """The pure function (params, inputs) -> pictures b H W 3, to jit, vmap or differentiate.

        `pipe.generate_fn(pipe.params, pipe.prepare_inputs("a prompt"))`.
        """
        return self._programs.generate

    def enable_vae_tiling(self) -> None:
        """Decodes pictures larger than the autoencoder's sample_size in overlapping tiles."""
        self.vae_tiling = True

    def disable_vae_tiling(self) -> None:
        """Decodes every picture in one piece."""
        self.vae_tiling = False

    def set_progress_bar_config(self, **options: Any) -> None:
        """Options of the tqdm bar, such as `disable=True`; it shows in terminals by default."""
        self._progress_bar = options

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: Sequence[float] | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.5,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        seed: int | Sequence[int] | None = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: str = "pil",
        guidance_rescale: float = 0.0,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        *,
        noise: str = "jax",
        long_prompt: bool = False,
        prompt_weighting: bool = False,
    ) -> ImagePipelineOutput:
        """Draws pictures.

        Args:
            prompt: one or several; or `prompt_embeds`, n t d.
            height, width: in pixels, divisible by the autoencoder's factor (8). The default is the
                size that the UNet was trained at.
            num_inference_steps: of the sampler.
            timesteps, sigmas: custom ones instead, for samplers that take them.
            guidance_scale: classifier-free guidance; 1 and less turns it off.
            negative_prompt: what to steer away from; or `negative_prompt_embeds`.
            num_images_per_prompt: the pictures of a prompt stand together in the result.
            eta: DDIM's, from 0 (deterministic) to 1.
            seed: of the run, or one per picture; None takes one from the system.
            latents: the initial noise, images c h/8 w/8, instead of drawing it.
            output_type: "pil", "np" or "jax" (b h w 3 in [0, 1]), or "latent" (b c h/8 w/8).
            guidance_rescale: phi of Lin et al. 2024, section 3.4.
            clip_skip: how many of the text encoder's last layers to leave out.
            callback_on_step_end: called as (pipe, step, timestep, {"latents": b c h w}) after every
                step. It may return {"latents": new ones}; False stops the run.
            noise: "jax", or "torch" for the numbers of torch.Generator().manual_seed(seed).
            long_prompt: use all of a long prompt, in windows of 77 tokens.
            prompt_weighting: read `(word:1.3)` as a weight.

        Raises:
            ValueError: an argument that cannot be; says which, and what can.
            FloatingPointError: the latents or pictures are not finite.
        """
        checks.check_choice("output_type", output_type, OUTPUT_TYPES)
        guided = guidance_scale > 1 and self.unet.config.time_cond_proj_dim is None
        encoder = self._encoder(
            repeats=num_images_per_prompt,
            clip_skip=clip_skip,
            long_prompt=long_prompt,
            weighting=prompt_weighting,
        )
        context = prompt_context(
            encoder,
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            guided=guided,
            dim=self._context_dim,
        )
        b = context.shape[0] // (2 if guided else 1)
        schedule = self._schedule(num_inference_steps, timesteps, sigmas, eta)
        shape = self._latent_shape(b, height, width)
        source = self._noise(noise, seed, b)
        state = self._begin_state(source, latents, shape, schedule)
        guidance = Guidance(np.float32(guidance_scale), np.float32(guidance_rescale))
        run = functools.partial(self._rows, source, shape, context, schedule, guidance)
        state = self._sample(run, state, schedule, source, callback_on_step_end)
        return ImagePipelineOutput(self._output(state[0], output_type))

    def encode_prompt(
        self,
        prompt: str | Sequence[str],
        *,
        num_images_per_prompt: int = 1,
        clip_skip: int | None = None,
        long_prompt: bool = False,
        prompt_weighting: bool = False,
        windows: int | None = None,
    ) -> jax.Array:
        """What the UNet attends to, (prompts images) t d. `windows` asks for that many."""
        encoder = self._encoder(
            repeats=num_images_per_prompt,
            clip_skip=clip_skip,
            long_prompt=long_prompt,
            weighting=prompt_weighting,
        )
        return encoder(checks.as_list("prompt", prompt), windows)

    def prepare_inputs(
        self,
        prompt: str | Sequence[str],
        *,
        negative_prompt: str | Sequence[str] = "",
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        eta: float = 0.0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """The inputs of `generate_fn`: a dict of arrays, guidance on where guidance_scale > 1."""
        prompts = checks.as_list("prompt", prompt)
        n = len(prompts)
        negatives = checks.as_list("negative_prompt", negative_prompt)
        negatives = checks.match_length("negative_prompt", negatives, n)
        texts = [*negatives, *prompts] if guidance_scale > 1 else prompts
        schedule = self._schedule(num_inference_steps, None, None, eta)
        keys = self._noise("jax", seed, n).initial((0, 0, 0, 0))
        state = self._begin(keys, np.float32(1), shape=self._latent_shape(n, height, width)[1:])
        table = jax.tree.map(lambda column: column[: len(schedule)], schedule.table())
        return {
            "input_ids": tokenize_prompts(self.tokenizer, texts).input_ids,
            "noise": state[0],
            "keys": keys,
            "init_noise_sigma": np.float32(schedule.init_noise_sigma),
            "table": table,
            "guidance": Guidance(np.float32(guidance_scale), np.float32(guidance_rescale)),
        }

    def _encoder(self, **options: Any) -> PromptEncoder:
        encode = functools.partial(self._encode, self.params["text_encoder"])
        return PromptEncoder(self.tokenizer, encode, **options)

    @property
    def _context_dim(self) -> int:
        dim = self.unet.config.cross_attention_dim
        return dim[0] if isinstance(dim, tuple) else dim

    def _schedule(self, steps: int, timesteps: Any, sigmas: Any, eta: float) -> Schedule:
        custom = timesteps is not None or sigmas is not None
        return self.scheduler.schedule(
            None if custom else steps, timesteps=timesteps, sigmas=sigmas, eta=eta
        )

    def _latent_shape(
        self, b: int, height: int | None, width: int | None
    ) -> tuple[int, int, int, int]:
        """B h w c of the latents."""
        factor = self.vae.config.downsampling
        size = self.unet.config.sample_size or 64
        rows, columns = size if isinstance(size, tuple) else (size, size)
        height, width = height or rows * factor, width or columns * factor
        checks.check_size(height, width, factor)
        return b, height // factor, width // factor, self.unet.config.in_channels

    def _noise(self, kind: str, seed: Any, n: int) -> JaxNoise | TorchNoise:
        checks.check_choice("noise", kind, tuple(SEED_LIMIT))
        return noise_source(kind, checks.check_seeds(seed, n, SEED_LIMIT[kind]), n)

    def _begin_state(
        self,
        source: JaxNoise | TorchNoise,
        latents: Any,
        shape: tuple[int, int, int, int],
        schedule: Schedule,
    ) -> jax.Array:
        if latents is None:
            initial = source.initial(shape)
        else:
            b, h, w, c = shape
            initial = checks.check_latents(latents, (b, c, h, w)).transpose(0, 2, 3, 1)
        return self._begin(initial, np.float32(schedule.init_noise_sigma), shape=shape[1:])

    def _rows(
        self,
        source: JaxNoise | TorchNoise,
        shape: tuple[int, int, int, int],
        context: jax.Array,
        schedule: Schedule,
        guidance: Guidance,
        table: Table,
        state: jax.Array,
        start: int,
        stop: int,
    ) -> jax.Array:
        drawn = source.row(shape, draws=bool(schedule.draws_noise[start:stop].any()))
        bounds = np.int32(start), np.int32(stop)
        return self._denoise(self.params["unet"], state, context, table, *bounds, drawn, guidance)

    def _sample(
        self,
        run: Callable[..., jax.Array],
        state: jax.Array,
        schedule: Schedule,
        source: JaxNoise | TorchNoise,
        callback: Callback | None,
    ) -> jax.Array:
        """All rows in one dispatch, or row by row where somebody watches or noise is handed in."""
        table = jax.tree.map(jnp.asarray, schedule.table())
        n = len(schedule)
        bar = tqdm(
            total=n, **{"disable": not sys.stderr.isatty(), "leave": False, **self._progress_bar}
        )
        hand_in = isinstance(source, TorchNoise) and schedule.draws_noise.any()
        if bar.disable and callback is None and not hand_in:
            return run(table, state, 0, n)
        with bar:
            for i, timestep in enumerate(schedule.timesteps):
                state = run(table, state, i, i + 1)
                if callback is not None:
                    state, stopped = self._call_back(callback, i, float(timestep), state)
                    if stopped:
                        break
                if not bar.disable:
                    state.block_until_ready()
                    bar.update()
        return state

    def _call_back(
        self, callback: Callback, step: int, timestep: float, state: jax.Array
    ) -> tuple[jax.Array, bool]:
        latents = jnp.transpose(state[0], (0, 3, 1, 2))
        result = callback(self, step, timestep, {"latents": latents})
        if isinstance(result, dict) and result.get("latents", latents) is not latents:
            changed = checks.check_latents(result["latents"], latents.shape)
            state = state.at[0].set(changed.transpose(0, 2, 3, 1))
        return state, result is False

    def _output(self, latents: jax.Array, output_type: str) -> Any:
        if output_type == "latent":
            if not np.isfinite(np.asarray(latents)).all():
                raise FloatingPointError(self._not_finite("latents"))
            return jnp.transpose(latents, (0, 3, 1, 2))
        images, finite = self._decode_images(latents)
        if not np.asarray(finite).all():
            culprit = "pictures" if np.isfinite(np.asarray(latents)).all() else "latents"
            raise FloatingPointError(self._not_finite(culprit))
        if output_type == "jax":
            return images
        return to_pil(np.asarray(images)) if output_type == "pil" else np.asarray(images)

    def _decode_images(self, latents: jax.Array) -> tuple[Any, Any]:
        config = self.vae.config
        tile = getattr(config, "sample_size", 512)
        tile = (tile[0] if isinstance(tile, tuple) else tile) // config.downsampling
        if not self.vae_tiling or max(latents.shape[1:3]) <= tile:
            return self._decode(self.params["vae"], latents)
        decode = functools.partial(self._decode_raw, self.params["vae"])
        images = tiled_decode(decode, np.asarray(latents), tile=tile, factor=config.downsampling)
        return jnp.asarray(np.clip(images / 2 + 0.5, 0, 1)), np.isfinite(images).all()

    def _not_finite(self, what: str) -> str:
        if what == "pictures":
            return (
                f"the decoded pictures are not finite in {self.vae.dtype}: load the autoencoder in "
                "float32 with from_pretrained(..., vae_dtype='float32')"
                + (" (its config has force_upcast)" if self.vae.config.force_upcast else "")
            )
        return (
            f"the latents are not finite in {self.unet.dtype}: use dtype='bfloat16' or 'float32', "
            "and check that the scheduler's prediction_type is the model's"
        )
