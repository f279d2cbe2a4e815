"""`diffusax generate`."""

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, configure

import diffusax
from diffusax.boundary.options import Fraction, ImageCount, Pixels, Scale
from diffusax.cli import generation, grid, loras, remote, torch_backend
from diffusax.cli.parsing import OWN, given_flags, parse
from diffusax.images.clips import Clip, VideoFile
from diffusax.text.extra_networks import read_tags


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(generation.ToFile):
    """Generate images from a prompt, an image, a mask or control maps.

    With --prompts FILE --out FOLDER, generate the images of all lines of a file; diffusax generate
    --prompts --help shows the options of that.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("model", "output", "steps", "guidance", "sampler", "seed", "negative_prompt"),
        *("num_images", "height", "width", "image", "strength", "mask", "control", "controlnet"),
        *("grid", "lora_dir", "dtype", "backend", "server"),
    )

    prompt: Positional[str]
    """The text to generate images of; with - each line of standard input is a prompt."""
    model: Annotated[str, OWN] = ""
    """A checkpoint: a folder in diffusers' layout, a .safetensors or .gguf file, or a Hub
    repository id; by default the small model inside the package, which generates emoji. With
    --server, the name of a model there."""
    backend: Literal["jax", "torch"] = "jax"
    """Run diffusax's own networks, or with torch the checkpoint's PyTorch pipeline, of any kind
    that diffusers has, through torchax."""
    image: Annotated[Path | None, OWN] = None
    """Start from this image instead of from noise; the kleins and Qwen-Image 2.1 look at it."""
    reference: Annotated[UseAppendAction[tuple[Path, ...]], OWN] = ()
    """A further image to look at, for models that look at several; can be given several times."""
    strength: Annotated[Fraction | None, OWN] = None
    """How much to change the image, from 0 to 1; the pipeline's own by default."""
    mask: Annotated[Path | None, OWN] = None
    """Generate only where this image is white, and keep the rest of the image."""
    mask_blur: Annotated[float, Meta(ge=0, le=1024)] = 0.0
    """Soften the rim of the mask over this many pixels."""
    mask_crop: Annotated[Pixels | None, OWN] = None
    """Generate only the part around the mask, with this many pixels around it, in full size."""
    control: UseAppendAction[tuple[Path, ...]] = ()
    """An image that steers a ControlNet, such as edges or depth; one for each ControlNet."""
    controlnet: UseAppendAction[tuple[str, ...]] = ()
    """A ControlNet: its folder or Hub repository id; can be given several times."""
    control_scale: UseAppendAction[tuple[Scale, ...]] = ()
    """How much a ControlNet steers, 1 by default; once for all or once for each."""
    height: Annotated[Pixels | None, OWN] = None
    """Height in pixels; by default the image's or the model's own."""
    width: Annotated[Pixels | None, OWN] = None
    """Width in pixels; by default the image's or the model's own."""
    num_images: ImageCount = 1
    """The number of images to generate for each prompt."""
    frames: Annotated[Annotated[int, Meta(ge=1, le=100_000)] | None, OWN] = None
    """The number of frames of a video, for models that generate videos; 81 for Wan by default."""
    fps: Annotated[Annotated[int, Meta(ge=1, le=240)] | None, OWN] = None
    """The frames per second of a video; by default the model's own."""
    grid: Annotated[tuple[str, ...], OWN] = ()
    """Generate a labelled grid over one or two of sampler, steps, guidance, seed, strength and
    clip-skip, such as sampler=euler,dpm++2m steps=10,20: columns, then rows.
    """
    clip_skip: Annotated[Annotated[int, Meta(ge=0, le=100)] | None, OWN] = None
    """The number of the text encoder's last layers to leave out."""
    long_prompt: bool = False
    """Use all of a long prompt, in windows as long as the text encoder reads."""
    prompt_weighting: bool = False
    """Read (word:1.3) as a weight."""
    encode_first: bool = False
    """Encode all prompts and free the text encoder before the other networks are read, so that less
    memory does."""
    server: Annotated[str | None, OWN] = None
    """Let the server at this address, `diffusax serve`, generate the images; image i of a seed is
    then that of seed + i. Models, ControlNets and LoRAs are the server's, by their names there."""
    api_key: Annotated[str | None, OWN] = None
    """The key of a server that asks for one; by default the one in DIFFUSAX_API_KEY, which other
    users of this machine cannot see."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server is not None:
            remote.check(self)
        elif not self.model:
            object.__setattr__(self, "model", "emoji")
        for name, needs in (
            ("strength", "image"),
            ("reference", "image"),
            ("mask", "image"),
            ("mask_blur", "mask"),
            ("mask_crop", "mask"),
            ("control_scale", "control"),
            ("api_key", "server"),
        ):
            flags = given_flags(self, [name])
            if flags and not getattr(self, needs):
                raise ValueError(f"{flags[0]} needs --{needs}")
        if self.grid:
            if self.num_images > 1 or self.prompt == "-":
                raise ValueError("--grid makes one image of one prompt for each of its cells")
            # Each cell is checked like the options of one call, before anything is loaded.
            list(grid.cells(self, grid.read_axes(self.grid, self)))
        if self.backend == "torch":
            torch_backend.check(self)
        flags = given_flags(self, ("clip_skip", "long_prompt", "prompt_weighting"))
        if self.encode_first and flags:
            raise ValueError(f"{flags[0]} cannot be with --encode-first; leave one of them out")
        if len(self.control) != len(self.controlnet):
            raise ValueError(
                f"--control and --controlnet go together: one image for each ControlNet "
                f"(got {len(self.control)} and {len(self.controlnet)})"
            )
        if len(self.control_scale) > 1 and len(self.control_scale) != len(self.control):
            raise ValueError(
                f"--control-scale must be given once, or {len(self.control)} times as --control "
                f"(got {len(self.control_scale)})"
            )

    def run(self) -> list[Path]:
        """Generates the images and returns the files written, the contact sheet first."""
        output = generation.output_file(self.output, *generation.VIDEOS)
        prompts = generation.lines_of_input() if self.prompt == "-" else [self.prompt]
        seed = generation.seed_or_random(self.seed)
        axes = grid.read_axes(self.grid, self)
        runs = [dataclasses.replace(self, prompt=prompt) for prompt in prompts]
        runs = list(grid.cells(self, axes)) if axes else runs
        generate = _generated if self.server is None else remote.generate
        images: list[Any] = []
        texts: list[str] = []
        with self.profiled():
            for found, own in generate(self, runs, seed):
                images += found
                texts += own
        if images and isinstance(images[0], Clip | VideoFile):
            return generation.save_videos(output, images, seed)
        sheet = grid.draw_sheet(images, axes) if axes else None
        return generation.save(output, images, texts, seed, sheet=sheet)


def command(args: list[str]) -> Any:
    """Reads the options from the arguments: for one prompt, or for a file of many."""
    if any(arg.split("=")[0] == "--prompts" for arg in args):
        from diffusax.cli import generate_many

        return generate_many.command(args)
    return parse(Generate, args, prog="diffusax generate")


def _generated(
    options: Generate, runs: Sequence[Generate], seed: int
) -> Iterator[tuple[list[Any], list[str]]]:
    """Yields the images of each run and their settings, generated here."""
    inputs = _read_images(options)
    open_with = torch_backend.opened if options.backend == "torch" else _opened
    generate = open_with(options, inputs, runs)
    for run in runs:
        yield generate(run, seed if run.seed is None else run.seed)


def _opened(
    options: Generate, inputs: dict[str, Any], runs: Sequence[Generate]
) -> generation.Generator:
    """Loads the pipeline; returns a function that generates any of these runs with it."""
    from diffusax.samplers import scheduler_from_name

    names = [name for run in runs for name in read_tags(run.prompt)[1]]
    pipe = _load(dataclasses.replace(options, sampler=None), _texts(runs), names)
    _check_frames(options, pipe)
    inputs = _fitted(options, pipe, inputs)
    own, rate = pipe.scheduler, pipe.family.frame_rate
    schedulers = {
        name: own if name is None else scheduler_from_name(name, own)
        for name in {run.sampler for run in runs}
    }

    def generate(options: Generate, seed: int) -> tuple[list[Any], list[str]]:
        pipe.scheduler = schedulers[options.sampler]
        loras.load_named(pipe, options.lora_dir, read_tags(options.prompt)[1])
        prompt, adapters = loras.adapters_of(pipe, options.prompt)
        size = _size(options, pipe, inputs)
        count = "num_videos_per_prompt" if rate else "num_images_per_prompt"
        images = generation.call(
            pipe,
            prompt=prompt,
            **adapters,
            negative_prompt=options.negative_prompt,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            num_frames=options.frames,
            strength=options.strength,
            padding_mask_crop=options.mask_crop,
            seed=seed,
            noise=options.noise,
            clip_skip=options.clip_skip,
            long_prompt=options.long_prompt or None,
            prompt_weighting=options.prompt_weighting or None,
            **{count: options.num_images},
            **inputs,
            **size,
            **_scales(options),
        )
        if rate:
            fps = options.fps or rate(pipe.parts.options)
            return [Clip(tuple(frames), fps) for frames in images], []
        given = _fields(options, pipe, images[0], size)
        return images, generation.describe(pipe, options, images, seed, given, _files(options))

    return generate


def _check_frames(options: Generate, pipe: Any) -> None:
    """Raises ValueError where options of videos are given for images, or the other way around."""
    generation.check_kind(options, type(pipe).__name__, videos=pipe.family.draws_videos)


def _texts(runs: Sequence[Generate]) -> list[str]:
    """Returns the prompts of the runs, without the tags of LoRAs, and the negative prompts."""
    return [text for run in runs for text in (read_tags(run.prompt)[0], run.negative_prompt or "")]


def _load(options: Generate, texts: Sequence[str], names: Sequence[str]) -> Any:
    """Loads the pipeline for the inputs that are given beside the prompt.

    texts: those that --encode-first encodes. names: those of the LoRAs in prompts.
    """
    auto = (
        diffusax.AutoPipelineForInpainting
        if options.mask
        else diffusax.AutoPipelineForImage2Image
        if options.image
        else diffusax.AutoPipelineForText2Image
    )
    from diffusax.models.transformers.references import Layout

    nets = [_controlnet(net, options.dtype, options.weights) for net in options.controlnet]
    more: dict[str, Any] = {"controlnet": nets if len(nets) > 1 else nets[0]} if nets else {}
    more |= {"encode_first": texts} if options.encode_first else {}
    layout = loras.learned_layout(options.lora_dir, names) if options.image else None
    more |= {"references_layout": layout} if layout in get_args(Layout) else {}
    return options.prepare(auto.from_pretrained(options.model, **options.loading(), **more))


def _controlnet(path: str, dtype: Any, weights: str) -> Any:
    """Loads a ControlNet of Stable Diffusion or of FLUX.1.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    model = diffusax.AutoModel.from_pretrained(path, dtype=dtype, weights=weights)
    if model.class_name not in ("ControlNetModel", "FluxControlNetModel"):
        raise ValueError(f"{path} holds a {model.class_name}, not a ControlNetModel")
    return model


def _read_images(options: Generate) -> dict[str, Any]:
    """Reads the image arguments before anything large is loaded."""
    from diffusax.images.conversion import resize
    from diffusax.images.reading import load_image

    controls = [load_image(path) for path in options.control]
    # Read for the errors alone: pipelines read them again, with their opacity.
    for path in options.reference:
        load_image(path)
    given: dict[str, Any] = {}
    if controls:
        given["control_image" if options.image else "image"] = (
            controls if len(controls) > 1 else controls[0]
        )
    if options.image:
        image = load_image(options.image)
        size = options.height or image.height, options.width or image.width
        given["image"] = image if options.mask else resize(image, *size, mode="crop")
    if options.mask:
        from diffusax.images.masks import blur, mask_of

        mask = mask_of(options.mask)
        given["mask_image"] = blur(mask, options.mask_blur) if options.mask_blur else mask
    return given


def _fitted(options: Generate, pipe: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the image arguments in the size, and under the names, that the pipeline takes.

    Raises:
        ValueError: it does not look at further images.
    """
    names = inspect.signature(type(pipe).__call__).parameters
    more = list(options.reference)
    if _is_looked_at(options, pipe):
        return {**inputs, "image": [options.image, *more] if more else options.image}
    if more and "image_reference" not in names:
        raise ValueError(
            f"--reference must be left out: {type(pipe).__name__} looks at no further images"
        )
    if more:
        return {**inputs, "image_reference": more}
    if options.control and not options.image and "control_image" in names:
        return {"control_image": inputs["image"]}
    return inputs


def _is_looked_at(options: Generate, pipe: Any) -> bool:
    """Returns whether the image is none to start from, and so keeps its own size."""
    from diffusax.pipelines.tasks.tasks import edit, image_to_image
    from diffusax.pipelines.tasks.videos import image_to_video

    looks = image_to_image in pipe.more_tasks or pipe.task in (edit, image_to_video)
    return bool(options.image and not options.mask and looks)


def _size(options: Generate, pipe: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns height and width: those of the image to paint in or over, if all of it is painted."""
    from_image = options.image and not options.mask and not _is_looked_at(options, pipe)
    if from_image or (options.mask and options.mask_crop is None):
        factor, image = pipe.parts.latents.multiple, inputs["image"]
        own = image.height // factor * factor, image.width // factor * factor
        if from_image:
            return dict(pipe.family.resize.keeping(*own))
        return {"height": options.height or own[0], "width": options.width or own[1]}
    return {"height": options.height, "width": options.width}


def _scales(options: Generate) -> dict[str, Any]:
    scales = list(options.control_scale)
    return (
        {"controlnet_conditioning_scale": scales if len(scales) > 1 else scales[0]}
        if scales
        else {}
    )


def _fields(options: Generate, pipe: Any, image: Any, size: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the image's text that other commands do not have."""
    found: dict[str, Any] = {
        "prompt_weighting": options.prompt_weighting,
        "long_prompt": options.long_prompt,
    }
    if options.clip_skip is not None:
        found["clip_skip"] = options.clip_skip
    if options.image and not _is_looked_at(options, pipe):
        found["strength"] = options.strength
    if options.mask:
        found["mask_blur"] = options.mask_blur
    if options.mask_crop is not None:
        # The part around the mask has this size, and the image its own.
        height, width = pipe.parts.default_size
        found |= {"height": size["height"] or height, "width": size["width"] or width}
        found["padding_mask_crop"] = options.mask_crop
    if options.controlnet:
        scales = options.control_scale or (1.0,)
        found["controls"] = [
            {"model": Path(net).name, "scale": float(scale), "start": 0.0, "end": 1.0}
            for net, scale in zip(options.controlnet, itertools.cycle(scales))
        ]
    return found


def _files(options: Generate) -> dict[str, Any]:
    """Returns the names of the images that the options give, for the image's text."""
    return {
        "Image": options.image and options.image.name,
        "Mask": options.mask and options.mask.name,
        "Control": " ".join(path.name for path in options.control) or None,
    }
