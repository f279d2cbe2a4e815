"""LoRA files in pipelines against diffusers with the same files, all weights random."""

import warnings

import diffusers
import numpy as np
import pytest
from support.lora_files import write_kohya, write_older, write_peft
from support.pairs import NEGATIVES, PROMPTS, TOLERANCE, generators
from support.tiny import build_stable_diffusion, build_stable_diffusion_xl

import diffusax
from diffusax.checkpoints.original.unet import unet_names

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 4.0}
TEXT = (".q_proj", ".k_proj", ".v_proj", ".out_proj", ".fc1")
STYLE = {"unet": (".to_q", ".to_out.0", ".conv1", ".proj", ".conv_shortcut")}
FACE = {"unet": (".to_k", ".to_v", ".conv2", ".time_emb_proj", ".proj_in", ".0.conv")}


class Pair:
    """diffusers' pipeline and ours, of the same weights."""

    def __init__(self, folder, kind):
        build = build_stable_diffusion if kind == "sd" else build_stable_diffusion_xl
        self.folder, self.kind = folder, kind
        self.theirs = build(folder / kind, scheduler=diffusers.DDIMScheduler(clip_sample=False))
        self.ours = diffusax.DiffusionPipeline.from_pretrained(folder / kind)
        self.ours.set_progress_bar_config(disable=True)
        encoders = ["text_encoder"] if kind == "sd" else ["text_encoder", "text_encoder_2"]
        self.networks = {name: getattr(self.theirs, name) for name in ["unet", *encoders]}

    def ends(self, unet):
        return {**dict.fromkeys(self.networks, TEXT), **unet}

    def both(self, method, *args, **kwargs):
        with warnings.catch_warnings():
            # PEFT warns of a second adapter.
            warnings.simplefilter("ignore")
            return self._both(method, *args, **kwargs)

    def _both(self, method, *args, **kwargs):
        return [getattr(pipe, method)(*args, **kwargs) for pipe in (self.theirs, self.ours)]

    def images(self, **call):
        given = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0], **CALL, **call}
        return [
            pipe(**given, generator=generators([7])[0]).images for pipe in (self.theirs, self.ours)
        ]

    def compare(self, **call):
        theirs, ours = self.images(**call)
        assert np.abs(theirs - ours).max() < TOLERANCE
        return ours


@pytest.fixture(scope="module", params=["sd", "xl"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    made = Pair(folder, request.param)
    made.plain = made.compare()
    style = write_peft(folder / "style.safetensors", made.networks, made.ends(STYLE))
    names = unet_names(made.ours.unet.config)
    rename = None if made.kind == "sd" else {path: name for name, path in names.items()}
    face = write_kohya(folder / "face.safetensors", made.networks, made.ends(FACE), rename)
    made.both("load_lora_weights", style, adapter_name="style")
    made.both("load_lora_weights", str(folder), weight_name=face.name, adapter_name="face")
    return made


def test_two_formats_with_weights_by_block_and_scales(pair):
    # The one that was loaded last is active.
    face = pair.compare()
    theirs, ours = pair.both("get_active_adapters")
    assert theirs == ours == ["face"]
    pair.both("set_adapters", ["style", "face"], [0.8, -0.4])
    both = pair.compare()
    half = pair.compare(cross_attention_kwargs={"scale": 0.5})
    # Else it would scale the text encoders of LoRAs that are loaded later.
    pair.theirs._lora_scale = 1.0
    up = {"block_0": 0.1, "block_1": [0.4, 0.9]} if pair.kind == "sd" else 0.3
    if pair.kind == "xl":
        blocks = {"unet": {"mid": 0.2, "up": up}, "text_encoder_2": 0.3}
    else:
        blocks = {"unet": {"down": {"block_0": [0.7]}, "up": 0.2}, "text_encoder": 0.3}
    pair.both("set_adapters", ["face", "style"], [blocks, 0.6])
    by_block = pair.compare()
    pair.both("disable_lora")
    assert np.abs(pair.compare() - pair.plain).max() < 1e-6
    pair.both("enable_lora")
    images = [pair.plain, face, both, half, by_block]
    for i, image in enumerate(images):
        assert all(np.abs(image - other).max() > 0.005 for other in images[:i])


def test_merged_into_the_parameters_and_back(pair):
    pair.both("set_adapters", ["style", "face"], [0.8, -0.4])
    before = {name: dict(leaves(tree)) for name, tree in pair.ours.params.items()}
    parts = [name for name in pair.networks if name != "text_encoder_2"]
    apart = pair.compare()
    pair.both("fuse_lora", components=parts, lora_scale=0.7)
    assert pair.ours.fused_loras == pair.theirs.fused_loras == {"style", "face"}
    fused = pair.compare()
    assert np.abs(fused - apart).max() > 0.005
    pair.both("unfuse_lora", components=parts)
    assert pair.ours.num_fused_loras == 0
    for name, tree in pair.ours.params.items():
        for path, leaf in leaves(tree):
            np.testing.assert_array_equal(leaf, before[name][path])
    # PEFT's layers keep the scale of the merge.
    pair.both("set_adapters", ["style", "face"], [0.8, -0.4])
    np.testing.assert_array_equal(pair.compare(), apart)


def leaves(tree):
    import jax

    return [(str(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.slow
def test_older_keys_and_a_file_without_alphas(pair):
    older = write_older(pair.folder / "older.safetensors", pair.networks)
    plain = write_peft(
        pair.folder / "plain.safetensors", pair.networks, pair.ends(FACE), metadata=False
    )
    for file in (older, plain):
        pair.both("load_lora_weights", str(file), adapter_name=file.stem)
        assert np.abs(pair.compare() - pair.plain).max() > 0.01
        pair.both("delete_adapters", file.stem)
    assert pair.ours.get_list_adapters() == pair.theirs.get_list_adapters()
