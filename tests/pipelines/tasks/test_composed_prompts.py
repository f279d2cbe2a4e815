"""A1111's `[a:b:0.5]`, `[a|b]` and AND: beside a loop over PyTorch diffusers' UNet and samplers."""

import numpy as np
import pytest
import torch
from support.pairs import slow

import diffusax
from diffusax.pipelines.plan.arguments import check_call
from diffusax.runtime.programs.compilations import count_compilations

STEPS, SCALE = 6, 3.0
CALL = {"num_inference_steps": STEPS, "guidance_scale": SCALE, "seed": 4, "output_type": "latent"}
CALL |= {"prompt_weighting": True}
PROMPT = "a [red|blue] apple in [a hat:a car:0.5] AND [a dog:2] :0.6 AND a tree:-0.3"
NEGATIVE = "[ugly::3] text"


def texts(row):
    """The prompts at a row, by A1111's rules: a change comes a row after its number."""
    step = max(row, 1)
    first = f"a {('red', 'blue')[(step - 1) % 2]} apple in {'a hat' if step <= 3 else 'a car'} "
    second = " " if step <= 2 else " a dog"
    return [(first, 1.0), (second, 0.6), (" a tree", -0.3)], f"{'ugly' if step <= 3 else ''} text"


@torch.no_grad()
def by_hand(theirs, texts):
    """The latents of a loop over live networks: predictions c_i and u of the texts at each row."""
    wide = hasattr(theirs, "text_encoder_2")
    size = theirs.unet.config.sample_size
    x = torch.randn((1, 4, size, size), generator=torch.Generator().manual_seed(CALL["seed"]))
    theirs.scheduler.set_timesteps(STEPS)
    x = x * theirs.scheduler.init_noise_sigma

    def predict(text, x, t):
        found = theirs.encode_prompt(
            text, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        added = {}
        if wide:
            ids = torch.tensor([[4.0 * size, 4 * size, 0, 0, 4 * size, 4 * size]])
            added = {"added_cond_kwargs": {"text_embeds": found[2], "time_ids": ids}}
        return theirs.unet(x, t, found[0], **added).sample

    for row, t in enumerate(theirs.scheduler.timesteps):
        parts, negative = texts(row)
        given = theirs.scheduler.scale_model_input(x, t)
        u = predict(negative, given, t)
        eps = u + sum(SCALE * w * (predict(text, given, t) - u) for text, w in parts)
        x = theirs.scheduler.step(eps, t, x).prev_sample
    return x.numpy()


@pytest.mark.parametrize(
    ("class_name", "kind"),
    [("StableDiffusionPipeline", "sd"), slow("StableDiffusionXLPipeline", "xl")],
)
def test_parts_and_changes_are_those_of_a_loop_over_pytorchs_unet(pairs, class_name, kind):
    pair = pairs(class_name, kind)
    with pair.sampler("ddim"):
        expected = by_hand(pair.reference, texts)
        found = pair.ours(PROMPT, negative_prompt=NEGATIVE, noise="torch", **CALL).images.numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.fixture(scope="module")
def pipe(pairs):
    return pairs("StableDiffusionPipeline", "sd").ours


def test_other_prompts_compile_nothing(pipe):
    call = {**CALL, "negative_prompt": "a"}
    for prompt in ("[a b:c:2]", "a AND b AND c"):
        pipe(prompt, **call)
    with count_compilations() as compiled:
        found = [
            pipe(prompt, **{**call, "negative_prompt": negative}).images.numpy()
            for prompt, negative in (
                ("[a dog:a cat:4] [x|y|z]", "a"),
                ("a dog :2 AND [cat:dog:0.5] :-1 AND y", "b"),
                ("a dog", "[b|c]"),
            )
        ]
    assert compiled == []
    assert all(np.isfinite(images).all() for images in found)


@pytest.mark.slow
def test_a_running_batch_generates_what_calls_do(pipe):
    prompts = [PROMPT, "[a dog:a cat:0.5]", "a dog", "a AND b AND c AND d AND e"]
    expected = [pipe(prompt, negative_prompt=NEGATIVE, **CALL).images.numpy() for prompt in prompts]
    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        futures = [batch.submit(one, negative_prompt=NEGATIVE, **CALL) for one in prompts]
        found = [future.result(120).images.numpy() for future in futures]
    for one, other in zip(found, expected):
        assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


def test_a_weight_of_a_whole_prompt_multiplies_guidance(pipe):
    found = pipe("a dog: 2", **CALL).images
    expected = pipe("a dog", **{**CALL, "guidance_scale": 2 * SCALE}).images
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_a_callbacks_guidance_scale_counts_for_all_parts(pipe):
    def raised(pipe, step, timestep, tensors):
        pipe._guidance_scale = 5.0

    both = "a dog :0.5 AND a cat"
    found = pipe(both, **CALL, callback_on_step_end=raised).images.numpy()
    run = pipe.task(pipe.parts, check_call({**CALL, "prompt": both}))
    assert run.reweigh(5.0) == pytest.approx((-5.0, 6.5))
    assert np.abs(found - pipe(both, **CALL).images.numpy()).max() > 1e-3


@pytest.mark.parametrize(
    ("prompt", "call", "said"),
    [
        (["a AND b", "c"], {}, "with different numbers or weights"),
        ("a AND b", {"guide": lambda y, step: y[0]}, "cannot be together with guide"),
    ],
)
def test_what_cannot_be_joined_is_refused(pipe, prompt, call, said):
    with pytest.raises(ValueError, match=said):
        pipe(prompt, **CALL, **call)
