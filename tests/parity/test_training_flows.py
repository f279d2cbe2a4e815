"""Training of transformers by flow matching against the loops of diffusers' scripts.

The references are the scripts' inner loops on the same images, prompts, noise and noise levels.
"""

import dataclasses
import json
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.numpy import load_file
from support.data_sets import edit_row, picture, row, write_image_folder, write_parquet
from support.effort import few
from support.flow_training import (
    FLOWS,
    LOOKING,
    SCALE,
    draw_batches,
    edit_options,
    options,
    our_losses,
    torch_losses,
)
from support.lora import ATTENTION
from support.lora_training import ALPHA, add_trained, check_gradients, trained_tree
from support.qwen_edits import PLUS, make_areas_smaller
from support.tiny_transformers import klein_pipeline, qwen_image_pipeline

import diffusax
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks import tasks
from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    ControlNetConfig,
    DenoiserValidationConfig,
    DreamBoothConfig,
    EMAConfig,
    FineTuningOptimizerConfig,
    InstructPix2PixValidationConfig,
    LoRAConfig,
    OptimizerConfig,
    TextToImageConfig,
    TextualInversionConfig,
    cache_latents,
    controlnet,
    dreambooth,
    instruct_pix2pix,
    text_to_image,
    textual_inversion,
    train,
)
from diffusax.training.step.denoising import DenoisingLoss, encode_captions
from diffusax.training.step.draws import Dropped

RANK = 4
LOSS = 1e-5
LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclasses.dataclass(frozen=True)
class Case:
    family: str
    scheme: str
    adapters: bool
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the pipeline."""
    texts: tuple[int, int] | None = None
    """The shape of embeddings that take the place of prompts."""
    edits: int | tuple[tuple[int, int], ...] = 0
    """The images that are looked at (train_dreambooth_lora_flux2_klein_img2img.py), or their
    heights and widths."""


EDITORS = ("kontext", "klein", "flux3", "qwen-image-edit", "qwen-image21-edit")
CASES = {
    "z-image-lora-cosmap": Case("z-image", "cosmap", True),
    "z-image-lora-sigma-sqrt": Case("z-image", "sigma_sqrt", True),
    "z-image-full-logit-normal": Case("z-image", "logit_normal", False),
    "flux-lora-guided": Case("flux", "cosmap", True),
    "flux-lora": Case("flux", "cosmap", True, {"guidance_embeds": False}),
    "kontext-edits": Case("kontext", "cosmap", True, edits=1),
    "klein-lora": Case("klein", "none", True, {"layers": 4}, (40, 48)),
    "klein-full": Case("klein", "cosmap", False),
    "klein-edits": Case("klein", "cosmap", True, {"layers": 4}, (40, 48), edits=1),
    "klein-edits-of-two": Case("klein", "cosmap", False, {"layers": 4}, (40, 48), edits=2),
    "klein-edits-of-sizes": Case(
        "klein", "none", True, {"layers": 4}, (40, 48), edits=((16, 48), (32, 24))
    ),
    "kontext-edits-of-sizes": Case("kontext", "none", True, edits=((16, 32),)),
    "qwen-image-edits-of-sizes": Case("qwen-image-edit", "none", True, edits=((16, 40),)),
    "flux3-lora": Case("flux3", "none", True),
    "flux3-full": Case("flux3", "logit_normal", False),
    "flux3-edits": Case("flux3", "cosmap", True, edits=1),
    "krea2-lora": Case("krea2", "none", True),
    "krea2-full": Case("krea2", "cosmap", False),
    "krea2-edits": Case("krea2-edit-blind", "none", True, edits=2),
    "krea2-edits-joint": Case("krea2-edit-joint", "none", True, edits=1),
    "krea2-edits-full": Case("krea2-edit-blind", "none", False, edits=1),
    "z-image-edits": Case("z-image-edit-blind", "none", True, edits=1),
    "z-image-edits-joint": Case("z-image-edit-joint", "none", True, edits=3),
    "z-image-edits-full": Case("z-image-edit-blind", "none", False, edits=2),
    "qwen-image-lora": Case("qwen-image", "none", True),
    "qwen-image-full": Case("qwen-image", "cosmap", False),
    "qwen-image-edits": Case("qwen-image-edit", "cosmap", True, edits=1),
    "qwen-image21-edits": Case("qwen-image21-edit", "cosmap", True, edits=1),
    "qwen-image21-lora": Case("qwen-image21", "none", True),
    "qwen-image21-full": Case("qwen-image21", "logit_normal", False),
}


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    make_areas_smaller(monkeypatch.setattr)


@pytest.fixture
def data(tmp_path):
    return write_parquet(tmp_path / "data", [row(i) for i in range(6)])


@pytest.mark.parametrize(
    "name",
    few(CASES, "z-image-lora-cosmap", "klein-lora", "krea2-lora", "kontext-edits", "krea2-edits"),
)
def test_losses_of_the_first_steps_and_gradients_are_upstreams(tmp_path, data, name):
    case = CASES[name]
    flow = {**FLOWS, **LOOKING}[case.family]
    pipe, recipe, loss, trained = prepared(tmp_path, data, case)
    run = draw_batches(flow, texts=case.texts, edits=case.edits)
    losses, first = our_losses(loss, recipe, trained, run)
    expected, theirs = torch_losses(flow, pipe, run, case.scheme)
    assert np.ptp(expected) > 1e-3
    np.testing.assert_allclose(losses, expected, rtol=LOSS)
    check_gradients(first if case.adapters else params_to_tensors(first["transformer"]), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.edits in (1, 2)])
def test_losses_of_twenty_steps_of_adamw_are_upstreams(tmp_path, data, name):
    case = CASES[name]
    flow = {**FLOWS, **LOOKING}[case.family]
    pipe, recipe, loss, trained = prepared(tmp_path, data, case)
    run = draw_batches(flow, texts=case.texts, edits=case.edits, steps=20)
    # The same images again and again, so that something is learnt.
    run = [{**batch, **{k: run[0][k] for k in batch if "pixel" in k}} for batch in run]
    rate = 1e-3
    losses, _ = our_losses(loss, recipe, trained, run, adamw=rate)
    expected, _ = torch_losses(flow, pipe, run, case.scheme, adamw=rate)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    still, _ = our_losses(loss, recipe, trained, run[-1:])
    assert abs(still[0] - losses[-1]) > 1e-3 * losses[-1]


def prepared(tmp_path: Any, data: Any, case: Case) -> tuple[Any, Any, DenoisingLoss, Any]:
    """PyTorch's pipeline, the recipe, its loss without dropout, and what is trained of both."""
    flow = {**FLOWS, **LOOKING}[case.family]
    pipe = flow.pipeline(tmp_path / "model", **case.options)
    changes: dict[str, Any] = {"guidance_scale": SCALE, "gradient_checkpointing": "blocks"}
    if case.adapters:
        add_trained(pipe.transformer, RANK, list(flow.targets))
        changes["lora"] = LoRAConfig(rank=RANK, alpha=ALPHA * RANK, targets=flow.targets)
    else:
        pipe.transformer.requires_grad_(True)
    if case.scheme != "none":
        changes["weighting_scheme"] = case.scheme
    if case.edits:
        data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
        if case.family.endswith("joint"):
            changes["references_layout"] = "joint"
        given = edit_options(tmp_path / "model", data, flow.size[0], **changes)
        recipe = instruct_pix2pix(given)
    else:
        recipe = text_to_image(options(tmp_path / "model", data, flow.size[0], **changes))
    trained = recipe.trained()
    if case.adapters:
        own = {"transformer": trained_tree(pipe.transformer)}
        assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, trained)
        trained = own
    base = recipe.base
    loss = DenoisingLoss.of(
        recipe.config,
        base.family,
        base.networks,
        base.scheduler,
        lora=recipe.lora,
        layers=base.hidden_layers,
        tokenizers=tuple(base.text_tokenizers),
    )
    if base.scheduler.config["use_dynamic_shifting"]:
        # The scripts train checkpoints whose shift depends on the image without any.
        assert loss.process.shift == 1
    return pipe, recipe, loss, trained


@pytest.mark.slow
@pytest.mark.parametrize("family", EDITORS)
def test_adapters_of_edits_are_trained_over_kernels_of_eight_bits(tmp_path, family):
    flow = FLOWS[family]
    flow.pipeline(tmp_path / "model")
    data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
    lora = LoRAConfig(rank=2, targets=flow.targets)
    changes = {"lora": lora, "weights": "int8", "gradient_checkpointing": "blocks"}
    recipe = instruct_pix2pix(edit_options(tmp_path / "model", data, flow.size[0], **changes))
    frozen, rng = recipe.frozen(), np.random.default_rng(0)
    eight = [x for _, x in ordered_leaves(frozen["transformer"]) if isinstance(x, Quantized)]
    assert len(eight) > 10
    drawn = [rng.normal(size=x.shape, scale=0.1) for _, x in ordered_leaves(recipe.trained())]
    trained = jax.tree.unflatten(jax.tree.structure(recipe.trained()), map(jnp.float32, drawn))
    rows = [recipe.example(recipe.source[i], np.random.default_rng(i)) for i in range(2)]
    batch = {name: np.stack([own[name] for own in rows]) for name in rows[0]}
    keys = jax.vmap(jax.random.key)(jnp.arange(2))

    def loss(trained, frozen):
        return recipe.loss(trained, frozen, batch, keys).mean()

    whole = jax.tree.map(np.asarray, frozen, is_leaf=lambda x: isinstance(x, Quantized))
    found, expected = (jax.jit(jax.value_and_grad(loss))(trained, own) for own in (frozen, whole))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    check_gradients(found[1], jax.tree.map(np.asarray, expected[1]))


@pytest.mark.parametrize("family", few(["flux", "klein", "qwen-image21"], "flux"))
def test_noise_levels_are_shifted_by_a_number_or_as_in_pipelines(tmp_path, data, family):
    flow = FLOWS[family]
    pipe = flow.pipeline(tmp_path / "model")
    changes = {"weighting_scheme": "none"}
    rows = {"pixel_values": np.zeros((3, *flow.size, 3), np.uint8)}
    keys = jax.vmap(jax.random.key)(jnp.arange(3))

    def drawn(**more):
        given = options(tmp_path / "model", data, flow.size[0], **changes, **more)
        recipe = text_to_image(given)
        return recipe, np.asarray(recipe.denoising.draw(rows, keys).timesteps)

    _, plain = drawn(timestep_shift=1.0)
    _, three = drawn(timestep_shift=3.0)
    np.testing.assert_allclose(three, 3 * plain / (1 + 2 * plain), rtol=1e-5)
    recipe, by_size = drawn(shift_by_size=True)
    assert pipe.scheduler.config.use_dynamic_shifting
    c, size = recipe.base.components({}), flow.size
    mu = recipe.base.family.schedule_options(c, Call(), size)["mu"]
    expected = pipe.scheduler.time_shift(mu, 1.0, torch.tensor(plain)).numpy()
    np.testing.assert_allclose(by_size, expected, rtol=1e-5)
    assert np.abs(by_size - plain).max() > 1e-3


def test_noise_levels_of_all_sizes_alike_are_not_shifted_by_size(tmp_path, data):
    FLOWS["z-image"].pipeline(tmp_path / "model")
    with pytest.raises(ValueError, match="moves the noise levels of all images alike; leave it"):
        text_to_image(options(tmp_path / "model", data, shift_by_size=True))
    with pytest.raises(ValueError, match=r"timestep_shift=2.0 and shift_by_size are two shifts"):
        options(tmp_path / "model", data, shift_by_size=True, timestep_shift=2.0)


def draw(pipe: Any, call: dict[str, Any]) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "output_type": "np", **call}
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe(prompt="a red apple", generator=generator, **call).images)


def trained_run(
    family: str, folder: Any, data: Any, output: Any, steps: int = 3, **changes: Any
) -> Any:
    config = options(
        folder,
        data,
        FLOWS[family].size[0],
        output=str(output),
        steps=steps,
        lora=LoRAConfig(rank=2, alpha=3.0, targets=FLOWS[family].targets),
        optimizer=OptimizerConfig(learning_rate=0.1),
        **changes,
    )
    train(text_to_image(config), config)
    return output / "model"


@pytest.mark.slow
@pytest.mark.parametrize("family", FLOWS)
def test_pytorch_draws_the_same_with_the_adapters_of_a_run(tmp_path, data, family):
    flow = FLOWS[family]
    theirs = flow.pipeline(tmp_path / "model")
    found = trained_run(family, tmp_path / "model", data, tmp_path / "out", weighting_scheme="mode")
    plain = draw(theirs, flow.call)
    theirs.load_lora_weights(found)
    expected = draw(theirs, flow.call)
    assert np.abs(expected - plain).max() > 0.01
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    ours.load_lora_weights(found)
    assert np.abs(draw(ours, flow.call) - expected).max() < 1e-4


@pytest.mark.slow
def test_adapters_of_peft_are_trained_further(tmp_path, data):
    pipe = FLOWS["z-image"].pipeline(tmp_path / "model")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION, init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.transformer))
    diffusers.ZImagePipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=layers)
    lora = LoRAConfig(path=str(tmp_path / "lora"))
    recipe = text_to_image(options(tmp_path / "model", data, lora=lora))
    recipe.save(recipe.trained(), tmp_path / "out")
    again = text_to_image(
        options(tmp_path / "model", data, lora=LoRAConfig(path=str(tmp_path / "out")))
    )
    jax.tree.map(np.testing.assert_array_equal, again.trained(), recipe.trained())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["z-image", "klein", "flux3", "krea2", "qwen-image21"])
def test_a_run_goes_on_in_the_same_bits(tmp_path, data, family):
    FLOWS[family].pipeline(tmp_path / "model")
    whole = trained_run(family, tmp_path / "model", data, tmp_path / "whole", steps=4)
    part = tmp_path / "part"
    trained_run(family, tmp_path / "model", data, part, steps=2)
    (part / "model").rename(tmp_path / "old")
    parted = trained_run(family, tmp_path / "model", data, part, steps=4)
    # The order of what a file says of itself is random.
    first, second, old = (load_file(f / LORA_FILE) for f in (whole, parted, tmp_path / "old"))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
    assert not all((old[name] == second[name]).all() for name in old)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux3", "krea2", "qwen-image21"])
def test_averages_of_whole_networks_are_shown_and_are_pipelines(tmp_path, data, family):
    flow = FLOWS[family]
    theirs, size = flow.pipeline(tmp_path / "model"), flow.size[0]
    shown = {"every": 2, "steps": 2, "prompts": ("a red apple",), "height": size, "width": size}
    config = options(
        tmp_path / "model",
        data,
        size,
        output=str(tmp_path / "out"),
        steps=2,
        ema=EMAConfig("constant", decay=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        validation=DenoiserValidationConfig(**shown, guidance=flow.call.get("guidance_scale", 1)),
    )
    recipe = text_to_image(config)
    train(recipe, config)
    model = tmp_path / "out" / "model"
    ours = diffusax.DiffusionPipeline.from_pretrained(model)
    drawn = draw(ours, flow.call)
    trained = {"transformer": ours.parts.models["transformer"].params}
    (image,) = recipe.draw(trained, recipe.frozen(), tasks.text_to_image)
    ours.set_progress_bar_config(disable=True)
    call = {**flow.call, "height": size, "width": size}
    expected = ours(prompt="a red apple", num_inference_steps=2, seed=config.seed, **call).images[0]
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    plain = draw(theirs, flow.call)
    network = type(theirs.transformer).from_pretrained(model / "transformer")
    theirs.transformer.load_state_dict(network.state_dict())
    assert np.abs(drawn - draw(theirs, flow.call)).max() < 1e-4
    assert np.abs(drawn - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", FLOWS)
def test_cached_latents_and_captions_have_the_same_loss(tmp_path, data, family):
    FLOWS[family].pipeline(tmp_path / "model")
    cached = CacheConfig(
        model=str(tmp_path / "model"),
        output=str(tmp_path / "cache"),
        text_embeddings=True,
        data=CacheDataConfig(str(data), resolution=FLOWS[family].size[0]),
    )
    assert cache_latents(cached) == 6
    losses = []
    for source, changes in ((data, {}), (tmp_path / "cache", {"data": str(tmp_path / "cache")})):
        size = FLOWS[family].size[0]
        config = options(tmp_path / "model", source, size, caption_dropout=0.5)
        if changes:
            config = dataclasses.replace(config, data=CaptionedDataConfig(changes["data"]))
        recipe = text_to_image(config)
        rows = [
            recipe.example(recipe.source[i], np.random.default_rng((0, 0, i))) for i in range(4)
        ]
        batch = {name: np.stack([own[name] for own in rows]) for name in rows[0]}
        assert ("encoder_hidden_states" in batch) is bool(changes)
        keys = jax.vmap(jax.random.key)(jnp.arange(4))
        frozen = recipe.frozen()
        shapes = jax.tree.map(lambda x: (np.shape(x), str(np.asarray(x).dtype)), frozen)
        wanted = jax.tree.map(lambda x: (x.shape, str(x.dtype)), recipe.frozen_shapes())
        assert shapes == wanted
        losses.append(recipe.loss(recipe.trained(), frozen, batch, keys))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "config", "message"),
    [
        (controlnet, ControlNetConfig, "is FLUX.1, for which diffusax trains no ControlNets"),
        (textual_inversion, TextualInversionConfig, "is FLUX.1, whose encoders take no new words"),
    ],
)
def test_what_a_family_is_not_trained_for_is_said(tmp_path, data, recipe, config, message):
    FLOWS["flux"].pipeline(tmp_path / "model")
    word = {"placeholder_token": "<x>", "initializer_token": "a"}
    given = config(
        model=str(tmp_path / "model"), **(word if config is TextualInversionConfig else {})
    )
    given = dataclasses.replace(
        given, data=dataclasses.replace(given.data, path=str(data), resolution=24)
    )
    with pytest.raises(ValueError, match=message):
        recipe(given)


def test_a_network_that_is_told_where_a_step_leads_to_is_not_trained(tmp_path, data):
    FLOWS["flux3"].pipeline(tmp_path / "model", distilled=True)
    message = "is FLUX.3 klein, distilled so .* train the checkpoint that is not distilled"
    with pytest.raises(ValueError, match=message):
        text_to_image(options(tmp_path / "model", data))


def test_a_scale_that_nothing_is_guided_by_is_refused(tmp_path):
    FLOWS["klein"].pipeline(tmp_path / "model")
    data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
    given = InstructPix2PixValidationConfig(image_guidance=2.0)
    message = r"validation.image_guidance=2.0 does nothing for FLUX.2 klein, .*; leave it out"
    with pytest.raises(ValueError, match=message):
        instruct_pix2pix(edit_options(tmp_path / "model", data, validation=given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("dreambooth", "klein"),
        *(("edits", name) for name in EDITORS),
        ("edits", "krea2-edit-blind"),
        ("edits", "z-image-edit-joint"),
    ],
)
def test_other_recipes_draw_and_write_adapters_for_pytorch(tmp_path, kind, family):
    flow = {**FLOWS, **LOOKING}[family]
    theirs = flow.pipeline(tmp_path / "model")
    common = {
        "output": str(tmp_path / "out"),
        "steps": 2,
        "lora": LoRAConfig(rank=2, targets=flow.targets),
    }
    drawn = {"every": 2, "steps": 2, "prompts": ("a red apple", "a hat")}
    if kind == "edits":
        picture(1, (80, 64)).save(tmp_path / "photo.png")
        seen = {**drawn, "images": (str(tmp_path / "photo.png"),), "height": 64, "width": 96}
        validation = InstructPix2PixValidationConfig(**seen)
        data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(3)])
        config = edit_options(
            tmp_path / "model",
            data,
            flow.size[0],
            validation=validation,
            optimizer=OptimizerConfig(learning_rate=0.1),
            references_layout="joint" if family.endswith("joint") else None,
            **common,
        )
        assert not (recipe := instruct_pix2pix(config)).denoising.conditioning_dropout
        assert recipe.denoising.caption_dropout == config.conditioning_dropout
    else:
        write_image_folder(tmp_path / "subject", 2)
        config = DreamBoothConfig(
            **common,
            optimizer=FineTuningOptimizerConfig(learning_rate=0.1),
            model=str(tmp_path / "model"),
            instance_data=str(tmp_path / "subject"),
            instance_prompt="a red apple",
            class_prompt="an apple",
            class_images=2,
            class_batch_size=2,
            class_steps=1,
            batch_size=2,
            compute_dtype="float32",
        )
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, resolution=24),
            validation=dataclasses.replace(config.validation, **drawn),
        )
        recipe = dreambooth(config)
        assert len(list((tmp_path / "out" / "class").glob("*.png"))) == 2
    train(recipe, config)
    images = recipe.validate(recipe.trained(), recipe.frozen())
    assert len(images) == 2
    if family == "kontext":
        # The image beside its edit is the one that PyTorch draws before the training.
        first = recipe.images[0]
        size = {"height": 64, "width": 96, "max_area": 64 * 96, "max_sequence_length": 512}
        call = {**flow.call, **size, "guidance_scale": config.validation.guidance}
        ours = diffusax.FluxKontextPipeline.from_pretrained(tmp_path / "model")
        expected, found = (draw(pipe, {**call, "image": first}) for pipe in (theirs, ours))
        assert np.abs(found - expected).max() < 1e-4
        edited = recipe._edited(recipe.trained(), recipe.frozen(), recipe.images * 2)
        own = {**call, "image": first, "seed": 0, "prompt": "a red apple"}
        drawn = ours(**own, num_inference_steps=2).images[0]
        assert np.abs(np.asarray(edited[0], int) - np.asarray(drawn, int)).max() <= 1
    with safe_open(tmp_path / "out" / "model" / LORA_FILE, "np") as file:
        layout = file.metadata().get("references_layout")
    last = {"blind": "blind", "image21-edit": "causal"}
    known = next((own for end, own in last.items() if family.endswith(end)), "joint")
    assert layout == (known if kind == "edits" else None)
    plain = draw(theirs, flow.call)
    theirs.load_lora_weights(tmp_path / "out" / "model")
    assert np.abs(draw(theirs, flow.call) - plain).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen-image-edit", "qwen-image21-edit"])
def test_a_dropped_instruction_is_an_empty_one_of_the_same_images(tmp_path, family):
    flow = FLOWS[family]
    flow.pipeline(tmp_path / "model")
    data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
    recipe = instruct_pix2pix(edit_options(tmp_path / "model", data, flow.size[0]))
    rows = [recipe.example(recipe.source[i], np.random.default_rng(0)) for i in range(2)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    originals = batch["original_pixel_values"]
    seen = recipe.base.seen_images([originals.shape[1:3]])
    empty = [seen.tokenize("", [x]) for x in originals]
    without = {**batch, **{name: np.stack([row[name] for row in empty]) for name in empty[0]}}
    trained, frozen = recipe.trained(), recipe.frozen()
    draws = recipe.denoising.draw(batch, jax.vmap(jax.random.key)(jnp.arange(2)))
    some, none = jnp.array([True, False]), jnp.zeros(2, bool)

    @jax.jit
    def loss(batch, dropped):
        own = draws._replace(dropped=Dropped(dropped, none))
        return recipe.denoising.with_draws(trained, frozen, batch, own)

    found, plain, expected = loss(batch, some), loss(batch, none), loss(without, none)
    np.testing.assert_allclose(found, [expected[0], plain[1]], rtol=1e-5)
    assert abs(expected[0] - plain[0]) > 1e-5
    shapes = jax.tree.map(lambda x: (x.shape, str(np.asarray(x).dtype)), frozen)
    wanted = jax.tree.map(lambda x: (x.shape, str(x.dtype)), recipe.frozen_shapes())
    assert shapes == wanted


def test_what_texts_that_speak_of_images_cannot_be_is_said(tmp_path):
    FLOWS["qwen-image-edit"].pipeline(tmp_path / "model")
    data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
    recipe = instruct_pix2pix(edit_options(tmp_path / "model", data))
    row = {**recipe.source[0], recipe.config.data.edit_prompt_column: "a house " * 600}
    with pytest.raises(ValueError, match="tokens with its images; shorten it"):
        recipe.example(row, np.random.default_rng(0))
    options = {"recipe": "edit", "model": str(tmp_path / "model")}
    config = CacheConfig(**options, data=CacheDataConfig(str(data), resolution=24))
    with pytest.raises(ValueError, match="text_embeddings must be on for Qwen-Image-Edit, whose"):
        cache_latents(config)


def test_texts_speak_of_as_many_images_as_rows_have(tmp_path):
    qwen_image_pipeline(tmp_path / "model", PLUS)
    rows = [{**edit_row(i), "other": edit_row(i + 5)["input_image"]} for i in range(3)]
    data = write_parquet(tmp_path / "edits", rows)
    config = edit_options(tmp_path / "model", data)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, reference_columns=("other",))
    )
    recipe = instruct_pix2pix(config)
    rows = [recipe.example(recipe.source[i], np.random.default_rng(0)) for i in range(2)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    assert {"original_pixel_values", "original_pixel_values_2"} < batch.keys()
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    losses = jax.eval_shape(recipe.loss, recipe.shapes(), recipe.frozen_shapes(), batch, keys)
    assert losses.shape == (2,)


def test_texts_are_as_long_and_of_the_layers_that_a_checkpoint_says(tmp_path, data):
    theirs = klein_pipeline(tmp_path / "model")
    own = {"max_sequence_length": 24, "text_encoder_out_layers": [1, 3, 4]}
    index = tmp_path / "model" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text("utf-8")), "_call_defaults": own}))
    config = TextToImageConfig(
        model=str(tmp_path / "model"), data=CaptionedDataConfig(str(data), resolution=32)
    )
    recipe = text_to_image(config)
    batch = {name: x[None] for name, x in recipe.base.tokenize("a red apple").items()}
    params = {"text_encoder": recipe.load("text_encoder")}
    ours = encode_captions(
        recipe.base.family, recipe.networks, params, batch, recipe.denoising.layers
    )
    texts, _ = theirs.encode_prompt("a red apple", **own)
    assert ours.context.shape == (1, 24, texts.shape[-1])
    np.testing.assert_allclose(ours.context, texts, atol=1e-4)


def test_a_layout_goes_on_and_is_that_of_the_family(tmp_path):
    data = write_parquet(tmp_path / "edits", [edit_row(i) for i in range(2)])
    flow = LOOKING["krea2-edit-blind"]
    flow.pipeline(tmp_path / "model")
    config = edit_options(
        tmp_path / "model",
        data,
        lora=LoRAConfig(rank=2),
        references_layout="joint",
    )
    recipe = instruct_pix2pix(config)
    recipe.save(recipe.trained(), tmp_path / "lora")
    again = {"lora": LoRAConfig(path=str(tmp_path / "lora"))}
    message = "was trained with references_layout='joint', and this training has 'blind'; give the"
    with pytest.raises(ValueError, match=message):
        instruct_pix2pix(edit_options(tmp_path / "model", data, **again))
    assert (
        instruct_pix2pix(
            edit_options(tmp_path / "model", data, references_layout="joint", **again)
        ).references_layout
        == "joint"
    )
    # A checkpoint that has learned one goes on with it.
    whole = edit_options(tmp_path / "model", data, references_layout="joint")
    recipe = instruct_pix2pix(whole)
    recipe.save(recipe.trained(), tmp_path / "whole")
    assert instruct_pix2pix(edit_options(tmp_path / "whole", data)).references_layout == "joint"
    FLOWS["klein"].pipeline(tmp_path / "klein")
    message = "references_layout='blind' cannot be for FLUX.2 klein, whose layout is 'joint'; leave"
    with pytest.raises(ValueError, match=message):
        instruct_pix2pix(edit_options(tmp_path / "klein", data, references_layout="blind"))
