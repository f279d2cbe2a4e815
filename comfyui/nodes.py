"""The nodes, by ComfyUI's protocol for them: INPUT_TYPES, RETURN_TYPES, FUNCTION."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from .choices import CHOICES, given, names_of, widget
from .client import Server, default_url
from .pictures import images_of, images_to_send
from .running import run

SERVER, LORAS, CONTROLS = "DIFFUSAX_SERVER", "DIFFUSAX_LORAS", "DIFFUSAX_CONTROLS"
"""The types of our own that links have."""
SEEDS = 2**64
"""The number of seeds; after the last one comes 0, as at the server."""
_CATEGORY = "diffusax"
_HIDDEN = {"node_id": "UNIQUE_ID"}
_LISTS = ("models", "samplers", "loras", "controlnets")
_OWN = -1.0
"""What number inputs have for the model's own value."""

Inputs = dict[str, Any]


class Connect:
    """Connects with a server, and lists what it has."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Connects with a diffusax server. The lists of names in the other nodes are then its."
    )
    FUNCTION = "connect"
    RETURN_TYPES = (SERVER, "STRING")
    RETURN_NAMES = ("server", "models")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        url = {
            "default": default_url(),
            "tooltip": "The address that `diffusax serve` prints; DIFFUSAX_SERVER of the "
            "environment, or this machine, for none.",
        }
        key = {
            "default": "",
            "tooltip": "Better left empty, as workflows and images carry what is typed. At the "
            "environment's address, DIFFUSAX_API_KEY of the environment is sent.",
        }
        return {"required": {"url": ("STRING", url)}, "optional": {"api_key": ("STRING", key)}}

    @classmethod
    def IS_CHANGED(cls, url: str = "", api_key: str = "") -> str:
        """Returns a digest of the server's lists, at a change of which it is asked anew."""
        found = Server(url or "", api_key or "").capabilities()
        names = repr([names_of(found, kind) for kind in _LISTS])
        return hashlib.sha256(names.encode()).hexdigest()

    def connect(self, url: str, api_key: str = "") -> tuple[Server, str]:
        """Returns the server, and a line about each of its models."""
        server = Server(url, api_key)
        found = server.capabilities()
        CHOICES.remember(server, found)
        lines = [
            f"{model['name']}: {', '.join(model['tasks'])}; {model['width']}x{model['height']}, "
            f"{model['steps']} steps"
            for model in found["models"]
        ]
        return server, "\n".join(lines)


class Lora:
    """Adds a LoRA of the server."""

    CATEGORY = _CATEGORY
    DESCRIPTION = "Adds a LoRA of the server. Several of these nodes in a row add several."
    FUNCTION = "add"
    RETURN_TYPES = (LORAS,)
    RETURN_NAMES = ("loras",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        return {
            "required": {
                "name": widget("loras", "The name of a LoRA at the server.", None),
                "weight": _number(1.0, -100, 100, "How strongly it applies.", step=0.05),
            },
            "optional": {"loras": (LORAS, {"tooltip": "Further LoRAs."})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, name: str = "") -> bool:
        """Takes every name: the server that the workflow names may have others than the list."""
        return True

    def add(
        self, name: str, weight: float, loras: Mapping[str, float] | None = None
    ) -> tuple[dict[str, float]]:
        """Returns the weights of LoRAs by name; those of the same name add up."""
        found = dict(loras or {})
        found[name.strip()] = found.get(name.strip(), 0.0) + weight
        return (found,)


class ControlNet:
    """Adds a ControlNet of the server, with its image."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Adds a ControlNet of the server, with the image that it sees (edges, depth, a pose). "
        "Several of these nodes in a row add several."
    )
    FUNCTION = "add"
    RETURN_TYPES = (CONTROLS,)
    RETURN_NAMES = ("controls",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        begin, end = (
            f"The fraction of the steps at which it {verb}." for verb in ("starts", "ends")
        )
        return {
            "required": {
                "model": widget("controlnets", "The name of a ControlNet at the server.", None),
                "image": ("IMAGE", {"tooltip": "What it sees; one image."}),
                "weight": _number(1.0, -100, 100, "How strongly it applies.", step=0.05),
                "start": _number(0.0, 0, 1, begin, step=0.01),
                "end": _number(1.0, 0, 1, end, step=0.01),
            },
            "optional": {"controls": (CONTROLS, {"tooltip": "Further ControlNets."})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, model: str = "") -> bool:
        """Takes every name: the server that the workflow names may have others than the list."""
        return True

    def add(
        self,
        model: str,
        image: Any,
        weight: float,
        start: float,
        end: float,
        controls: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[Mapping[str, Any]]]:
        """Returns the ControlNets as a job has them."""
        sent = images_to_send(image)
        if len(sent) != 1:
            raise ValueError(
                f"image must be one image for a ControlNet (got a batch of {len(sent)}); take one "
                "of them"
            )
        own = {
            "model": model.strip(),
            "image": sent[0],
            "scale": weight,
            "start": start,
            "end": end,
        }
        return ([*controls, own],)


class _Generating:
    """What the nodes that generate have in common."""

    CATEGORY = _CATEGORY
    FUNCTION = "generate"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "settings")

    @classmethod
    def VALIDATE_INPUTS(cls, model: str = "", sampler: str = "") -> bool:
        """Takes every name: the server that the workflow names may have others than the list."""
        return True


class Generate(_Generating):
    """Generates images from a prompt, or from a prompt and images."""

    DESCRIPTION = "Generates images from a prompt, or from a prompt and an image, at a server."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        image = "The image to start from; none for text to image. Of a batch, each by itself."
        strength = "How much of the image to change; counts only where there is one."
        return {
            "required": {**_before("prompt", "What to generate."), **_sizes(), **_settings()},
            "optional": {
                "image": ("IMAGE", {"tooltip": image}),
                "strength": _number(0.8, 0, 1, strength, step=0.01),
                **_steering(),
            },
            "hidden": _HIDDEN,
        }

    def generate(
        self, server: Server, node_id: str, image: Any = None, strength: float = 0.8, **inputs: Any
    ) -> tuple[Any, str]:
        """Returns the images and their settings."""
        fields = _fields(inputs)
        if image is None:
            return _generated(server, [fields], node_id)
        starts = [{"image": sent, "strength": strength} for sent in images_to_send(image)]
        return _generated(server, _each_with_its_seed(fields, starts), node_id)


class Inpaint(_Generating):
    """Generates the masked part of images anew."""

    DESCRIPTION = "Generates the masked part of an image anew, at a server."

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        image = "The image; of a batch, each by itself."
        blur = "The pixels by which the mask's edge is softened."
        crop = (
            "Generates only the masked part, at full size, with so many pixels around it; -1 for "
            "the whole image."
        )
        return {
            "required": {
                **_before("prompt", "What to generate."),
                "image": ("IMAGE", {"tooltip": image}),
                "mask": (
                    "MASK",
                    {"tooltip": "Where to generate; one for all images, or for each."},
                ),
                "strength": _number(1.0, 0, 1, "How much to change there.", step=0.01),
                "mask_blur": _number(0.0, 0, 1024, blur, step=1.0),
                "padding_mask_crop": _whole(-1, -1, 4096, crop),
                **_sizes(),
                **_settings(),
            },
            "optional": _steering(),
            "hidden": _HIDDEN,
        }

    def generate(
        self, server: Server, node_id: str, image: Any, mask: Any, **inputs: Any
    ) -> tuple[Any, str]:
        """Returns the images and their settings."""
        masks = images_to_send(mask.reshape(-1, *mask.shape[-2:]))
        images = images_to_send(image)
        if len(masks) not in (1, len(images)):
            raise ValueError(
                f"mask must be one mask or {len(images)}, as image has (got {len(masks)}); take "
                "one of them"
            )
        own = {"strength": inputs.pop("strength"), "mask_blur": inputs.pop("mask_blur")}
        crop = inputs.pop("padding_mask_crop")
        fields = {**_fields(inputs), **own, **({"padding_mask_crop": crop} if crop >= 0 else {})}
        masks *= len(images) // len(masks)
        pairs = [{"image": one, "mask_image": where} for one, where in zip(images, masks)]
        return _generated(server, _each_with_its_seed(fields, pairs), node_id)


class Edit(_Generating):
    """Edits an image as an instruction says, with others to look at."""

    DESCRIPTION = (
        "Edits an image as an instruction says, with a model for edits: InstructPix2Pix, FLUX.1 "
        "Kontext, FLUX.2, Qwen-Image-Edit. Some look at further images."
    )

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        """Returns the inputs."""
        more = ("IMAGE", {"tooltip": "Further images, for models that look at several."})
        closeness = "How closely InstructPix2Pix keeps to the image; -1 for the model's own value."
        return {
            "required": {
                **_before("instruction", 'How to change the image, such as "make it blue".'),
                "image": ("IMAGE", {"tooltip": "The image to edit; those of a batch, together."}),
                "image_guidance_scale": _number(_OWN, _OWN, 100, closeness, step=0.1),
                **_sizes(),
                **_settings(),
            },
            "optional": {"image_2": more, "image_3": more, "image_4": more, **_steering()},
            "hidden": _HIDDEN,
        }

    def generate(
        self,
        server: Server,
        node_id: str,
        instruction: str,
        image: Any,
        image_guidance_scale: float,
        image_2: Any = None,
        image_3: Any = None,
        image_4: Any = None,
        **inputs: Any,
    ) -> tuple[Any, str]:
        """Returns the images and their settings."""
        batches = [one for one in (image, image_2, image_3, image_4) if one is not None]
        first, *more = (sent for batch in batches for sent in images_to_send(batch))
        fields = {**_fields({**inputs, "prompt": instruction}), "image": first}
        if more:
            fields["more_images"] = more
        if image_guidance_scale >= 0:
            fields["image_guidance_scale"] = image_guidance_scale
        return _generated(server, [fields], node_id)


def _before(prompt: str, tooltip: str) -> Inputs:
    """Returns the first inputs of nodes that generate. prompt: the name of the prompt's."""
    lines = {"multiline": True, "dynamicPrompts": True, "default": ""}
    away = {**lines, "tooltip": "What to steer away from."}
    return {
        "server": (SERVER, {"tooltip": "The server, of the node Connect."}),
        "model": widget("models", "A model of the server; its first one by default."),
        prompt: ("STRING", {**lines, "tooltip": tooltip}),
        "negative_prompt": ("STRING", away),
    }


def _sizes() -> Inputs:
    """Returns the inputs for the size."""
    tooltip = "In pixels; 0 for that of the image, or else the model's own."
    return {name: _whole(0, 0, 16_384, tooltip, step=8) for name in ("width", "height")}


def _settings() -> Inputs:
    """Returns the inputs of a run."""
    guidance = "The scale of classifier-free guidance (cfg); -1 for the model's own."
    seed = _whole(0, 0, SEEDS - 1, "The seed of the first image; each further one has the next.")
    seed[1]["control_after_generate"] = True
    return {
        "steps": _whole(0, 0, 1000, "The sampler's steps; 0 for the model's own number."),
        "guidance_scale": _number(_OWN, _OWN, 100, guidance, step=0.1),
        "sampler": widget("samplers", "The sampler; the model's own by default."),
        "seed": seed,
        "batch_size": _whole(1, 1, 1000, "The number of images."),
    }


def _steering() -> Inputs:
    """Returns the inputs for LoRAs and ControlNets."""
    return {
        "loras": (LORAS, {"tooltip": "Of the node LoRA."}),
        "controls": (CONTROLS, {"tooltip": "Of the node ControlNet."}),
    }


def _whole(default: int, low: int, high: int, tooltip: str, step: int = 1) -> tuple[str, Inputs]:
    about = {"default": default, "min": low, "max": high, "step": step, "tooltip": tooltip}
    return "INT", about


def _number(
    default: float, low: float, high: float, tooltip: str, step: float
) -> tuple[str, Inputs]:
    about = {"default": default, "min": low, "max": high, "step": step, "tooltip": tooltip}
    return "FLOAT", {**about, "round": 0.001}


def _fields(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a job; what is left out has the model's own value."""
    found: dict[str, Any] = {
        "prompt": inputs["prompt"],
        "negative_prompt": inputs["negative_prompt"],
        "model": given(inputs["model"]),
        "width": inputs["width"] or None,
        "height": inputs["height"] or None,
        "num_inference_steps": inputs["steps"] or None,
        "guidance_scale": None if inputs["guidance_scale"] == _OWN else inputs["guidance_scale"],
        "sampler": given(inputs["sampler"]),
        "seed": inputs["seed"],
        "num_images": inputs["batch_size"],
        "adapters": inputs.get("loras"),
        "controls": inputs.get("controls"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _each_with_its_seed(
    fields: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a request for each image to start from, whose seeds follow on one another."""
    count = fields["num_images"]
    return [
        {**fields, **start, "seed": (fields["seed"] + i * count) % SEEDS}
        for i, start in enumerate(starts)
    ]


def _generated(
    server: Server, requests: Sequence[Mapping[str, Any]], node_id: str
) -> tuple[Any, str]:
    """Returns the images of requests, [batch, height, width, 3], and their settings."""
    images, texts = images_of(run(server, requests, node_id))
    return images, "\n\n".join(texts)
