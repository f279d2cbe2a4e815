"""Hooks in pipelines' calls beside PyTorch's, with whole loops in both."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.tree_util import Partial
from safetensors.torch import save_file
from support.attention_processors import CrossProcessor, JointProcessor, outputs, processed
from support.ip_adapters import EMBED, tensors_of
from support.many_devices import run_on_devices
from support.pairs import with_ddim
from support.repository import ROOT
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion
from support.tiny_transformers import flux_pipeline
from support.tiny_unconditional import build_unconditional

import diffusax
from diffusax.runtime.programs.compilations import count_compilations

RUNS = ROOT / "tests" / "support" / "runs"
TOLERANCE = 1e-4
CALL = {"prompt": ["a red apple", "a hat"], "num_inference_steps": 4, "output_type": "np"}
CALL |= {"guidance_scale": 5.0}
CROSS = r".*\.attn2\.attention_probs"
WEIGHTS = np.ones(77, np.float32)
WEIGHTS[[2, 3]] = 6, 0.1


def keep_prompted(probs, at):
    """The maps of the prompts, averaged over heads."""
    return probs, probs[:: at.branches].mean(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reweighting:
    """Prompt-to-prompt's reweighting of the prompts' maps in the first rows of a run."""

    weights: jax.Array
    rows: int

    def __call__(self, probs, at):
        prompted = probs[:: at.branches]
        changed = prompted * self.weights
        changed /= changed.sum(-1, keepdims=True)
        changed = jnp.where(at.row < self.rows, changed, prompted)
        return probs.at[:: at.branches].set(changed), changed.mean(1)


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


def close(found, expected, tolerance=TOLERANCE):
    expected = np.asarray(expected)
    assert np.shape(found) == expected.shape
    np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooked") / "sd"
    unet = {**SMALLEST_UNET, "mid_block_type": "UNetMidBlock2DCrossAttn"}
    build_stable_diffusion(folder, unet=unet, vae=SMALLEST_VAE)
    return with_ddim(folder)


def cross_attentions(unet):
    return {n: m for n, m in unet.named_modules() if n.endswith("attn2")}


@contextlib.contextmanager
def all_processed(unet, make):
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(processed(layer, make()))
            for name, layer in cross_attentions(unet).items()
        }


def test_maps_and_features_by_row_are_pytorchs_and_reading_changes_nothing(pipes):
    theirs, ours = pipes
    plain = ours(**CALL, generator=seeded()).images
    with all_processed(theirs.unet, CrossProcessor) as read, outputs(theirs.unet.mid_block) as mid:
        expected = theirs(**CALL, generator=seeded()).images
    hooks = {CROSS: keep_prompted, "mid_block": lambda x, at: (x, x)}
    found = ours(**CALL, generator=seeded(), hooks=hooks)
    np.testing.assert_array_equal(found.images, plain)
    close(found.images, expected)
    assert len(found.kept) == len(read) + 1
    for name, processor in read.items():
        # diffusers has the negative prompts first.
        maps = torch.stack(processor.maps)[:, 2:].mean(2)
        close(found.kept[f"{name}.attention_probs"], maps)
    features = torch.stack(mid).permute(0, 1, 3, 4, 2)
    found = found.kept["mid_block"]
    close(found[:, ::2], features[:, 2:])
    close(found[:, 1::2], features[:, :2])


def test_an_edit_within_the_loop_is_that_of_processors_and_other_numbers_compile_nothing(pipes):
    theirs, ours = pipes

    class Edited(CrossProcessor):
        def read(self, *given):
            edits = len(self.maps) < 2
            self.edit = self.reweighed if edits else None
            return super().read(*given)

        @staticmethod
        def reweighed(probs):
            own = probs[2:] * torch.from_numpy(WEIGHTS)
            return torch.cat([probs[:2], own / own.sum(-1, keepdim=True)])

    with all_processed(theirs.unet, Edited):
        expected = theirs(**CALL, generator=seeded()).images
    found = ours(**CALL, generator=seeded(), hooks={CROSS: Reweighting(WEIGHTS, 2)})
    close(found.images, expected)
    plain = ours(**CALL, generator=seeded()).images
    assert np.abs(plain - expected).max() > 100 * TOLERANCE
    with count_compilations() as compiled:
        none = ours(**CALL, generator=seeded(), hooks={CROSS: Reweighting(WEIGHTS, 0)})
    assert compiled == []
    close(none.images, plain, 1e-5)
    # A bar and a callback cut the loop into pieces, in which what is kept goes on.
    ours.set_progress_bar_config(disable=False)
    call = {**CALL, "hooks": {CROSS: Reweighting(WEIGHTS, 2)}, "return_dict": False}
    pieces, _, kept = ours(**call, generator=seeded(), callback_on_step_end=lambda *given: given[3])
    ours.set_progress_bar_config(disable=True)
    close(pieces, found.images, 1e-5)
    for name, rows in found.kept.items():
        close(kept[name], rows, 1e-6)


def test_edits_alone_compile_nothing_for_other_numbers_of_steps(pipes):
    _, ours = pipes

    def edit(weights, probs, at):
        return probs * weights, None

    hooks = {CROSS: Partial(edit, WEIGHTS)}
    assert ours(**CALL, seed=0, hooks=hooks).kept == {}
    with count_compilations() as compiled:
        ours(**{**CALL, "num_inference_steps": 5}, seed=0, hooks=hooks)
    assert compiled == []


def test_gradients_through_the_loop_are_pytorchs(pipes):
    theirs, ours = pipes
    call = {**CALL, "prompt": "a red apple", "num_inference_steps": 2}
    leaf = torch.from_numpy(WEIGHTS.copy()).requires_grad_()

    def edit(probs):
        own = probs[1:] * leaf
        return torch.cat([probs[:1], own / own.sum(-1, keepdim=True)])

    embeds, negative = theirs.encode_prompt(call["prompt"], "cpu", 1, True)
    size = theirs.unet.config.sample_size
    x = torch.randn((1, 4, size, size), generator=seeded())
    start = x.numpy()
    theirs.scheduler.set_timesteps(2)
    context = torch.cat([negative, embeds]).detach()
    with all_processed(theirs.unet, lambda: CrossProcessor(edit)):
        for t in theirs.scheduler.timesteps:
            y = theirs.unet(torch.cat([x, x]), t, context).sample
            without, with_prompt = y.chunk(2)
            x = theirs.scheduler.step(without + 5 * (with_prompt - without), t, x).prev_sample
    (y**2).mean().backward()
    expected = leaf.grad.numpy()

    del call["output_type"]
    hooks = {CROSS: Reweighting(WEIGHTS, 2), "conv_out": lambda x, at: (x, x)}
    inputs = ours.prepare_inputs(**call, latents=start, hooks=hooks)

    def loss(hooks):
        plan = inputs.plan._replace(hooks=hooks)
        _, kept = ours.generate_fn(ours.params, inputs._replace(plan=plan))
        return (kept["conv_out"][-1] ** 2).mean(), kept

    gradient = jax.jit(jax.grad(loss, has_aux=True, allow_int=True))
    gradients, kept = gradient(inputs.plan.hooks)
    assert np.abs(expected).max() > 1e-4
    close(gradients[CROSS].weights / np.abs(expected).max(), expected / np.abs(expected).max())
    assert {x.shape[:2] for name, x in kept.items() if name != "conv_out"} == {(2, 1)}


def test_flux_reads_and_changes_joint_attention(tmp_path):
    theirs = flux_pipeline(tmp_path)
    ours = diffusax.FluxPipeline.from_pretrained(tmp_path)
    for pipe in (theirs, ours):
        pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a red apple", "height": 24, "width": 40, "output_type": "np"}
    call |= {"num_inference_steps": 3, "max_sequence_length": 32}
    plain = ours(**call, generator=seeded()).images
    name = "single_transformer_blocks.1.attn"

    def silence(probs):
        # What image tokens read of the text's second and third.
        changed = probs.clone()
        changed[:, :, 32:, 1:3] = 0
        return changed / changed.sum(-1, keepdim=True)

    def silent(probs, at):
        changed = probs.at[:, :, 32:, 1:3].set(0)
        return changed / changed.sum(-1, keepdims=True), probs[:, :, 32:, :32]

    with processed(theirs.transformer.get_submodule(name), JointProcessor(silence)) as processor:
        expected = theirs(**call, generator=seeded()).images
    found = ours(**call, generator=seeded(), hooks={rf"{name}.attention_probs": silent})
    close(found.images, expected)
    assert np.abs(plain - expected).max() > 10 * TOLERANCE
    maps = torch.stack(processor.maps)[:, :, :, 32:, :32]
    close(found.kept[f"{name}.attention_probs"], maps)


def test_a_running_batch_runs_calls_with_hooks_alone(pipes):
    _, ours = pipes
    hooks = {CROSS: Reweighting(WEIGHTS, 2)}
    expected = ours(**CALL, seed=3, hooks=hooks)
    plain = ours(**CALL, seed=4).images
    with diffusax.RunningBatch(ours, lanes=4) as batch:
        futures = [batch.submit(**CALL, seed=4), batch.submit(**CALL, seed=3, hooks=hooks)]
        beside, found = (future.result() for future in futures)
    close(beside.images, plain, 1e-5)
    close(found.images, expected.images, 1e-5)
    assert np.abs(found.images - plain).max() > 100 * TOLERANCE
    for name, rows in expected.kept.items():
        close(found.kept[name], rows, 1e-5)


def test_hooks_see_the_words_beside_an_ip_adapters_images(pipes, tmp_path):
    theirs, ours = pipes
    save_file(tensors_of(theirs.unet, "plain"), tmp_path / "plain.safetensors")
    pipe = diffusax.StableDiffusionPipeline.from_pipe(ours)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_ip_adapter(tmp_path / "plain.safetensors")
    embeds = [np.random.default_rng(0).standard_normal((4, 1, EMBED)).astype(np.float32)]
    call = {**CALL, "seed": 0, "ip_adapter_image_embeds": embeds, "num_inference_steps": 2}
    found = pipe(**call, hooks={CROSS: lambda probs, at: (1 * probs, probs)})
    close(found.images, pipe(**call).images, 1e-5)
    assert (
        np.abs(found.images - ours(**{**call, "ip_adapter_image_embeds": None}).images).max() > 0.01
    )
    assert {maps.shape[-1] for maps in found.kept.values()} == {77}


@pytest.mark.slow
def test_hooks_on_meshes_are_those_on_one_device(tmp_path):
    folder = tmp_path / "sd"
    unet = {**SMALLEST_UNET, "mid_block_type": "UNetMidBlock2DCrossAttn"}
    build_stable_diffusion(folder, unet=unet, vae=SMALLEST_VAE)
    meshes = ("data=4", "data=2,tensor=2", "data=2,context=2")
    assert run_on_devices(RUNS / "hooks_on_mesh.py", folder, *meshes) == ["equal"]


def test_pipelines_without_texts_have_hooks(tmp_path):
    build_unconditional(tmp_path)
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    call = {"batch_size": 2, "num_inference_steps": 3, "seed": 0, "output_type": "np"}
    found = pipe(**call, hooks={"mid_block": lambda x, at: (x, x.mean((1, 2)))})
    np.testing.assert_array_equal(found.images, pipe(**call).images)
    assert found.kept["mid_block"].shape[:2] == (3, 2)


def test_what_leaves_layers_out_or_has_none_refuses_hooks(pipes):
    _, ours = pipes
    hooks = {"mid_block": lambda x, at: (x, None)}
    ours.unet.enable_cache(diffusax.DeepCacheConfig())
    try:
        with pytest.raises(ValueError, match="call disable_cache first"):
            ours(**CALL, hooks=hooks)
    finally:
        ours.unet.disable_cache()
    with pytest.raises(ValueError, match="is never called"):
        ours(**CALL, hooks={"mid": hooks["mid_block"]})
