"""A sampler, a rule, a task, a family and a file, as docs/reference/hooks.md has them."""

import ast
import dataclasses
import re
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeZeroStarGuidance
from support import offline_runs as runs
from support.hooks import PAGE, defined
from support.repository import ROOT
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.samplers import scheduler_from_function

dpm_2m, plain, Projected, ZeroStar, VariationPipeline, EvenPipeline = defined(
    "dpm_2m",
    "plain",
    "AdaptiveProjectedGuidance",
    "ZeroStarGuidance",
    "VariationPipeline",
    "EvenPipeline",
)
CALL = {"prompt": "a red apple", "negative_prompt": "a hat", "output_type": "np"}
CALL |= {"num_inference_steps": 4, "guidance_scale": 20.0}
TOLERANCE = 1e-4


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "smallest"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def ours(folder):
    return quiet(diffusax.StableDiffusionPipeline.from_pretrained(folder))


def quiet(pipe):
    pipe.scheduler = diffusax.DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_sampler_draws_what_pytorchs_does_and_compiles_nothing(ours, theirs):
    before = ours(**CALL, generator=seeded()).images
    config, ddim = theirs.scheduler.config, theirs.scheduler
    theirs.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(config)
    try:
        expected = theirs(**CALL, generator=seeded()).images
    finally:
        theirs.scheduler = ddim
    like = diffusax.DPMSolverMultistepScheduler.from_config(ours.scheduler.config)
    ours.scheduler = scheduler_from_function(dpm_2m, like=like)
    with count_compilations() as compiled:
        found = ours(**CALL, generator=seeded()).images
    assert compiled == []
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert np.abs(found - before).max() > 100 * TOLERANCE


def test_a_checkpoint_with_a_sampler_of_ones_own_opens_in_diffusers(ours, tmp_path):
    ours.scheduler = scheduler_from_function(dpm_2m, like=ours.scheduler)
    ours.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, safety_checker=None)
    assert type(again.scheduler) is diffusers.DDIMScheduler
    assert diffusax.DiffusionPipeline.from_pretrained(tmp_path).scheduler == ours.scheduler.like


RULES = {
    "apg": (
        Projected(eta=0.3, norm_threshold=0.2),
        AdaptiveProjectedGuidance,
        {"eta": 0.3, "adaptive_projected_guidance_rescale": 0.2},
    ),
    "zero": (ZeroStar(zero_init_steps=2), ClassifierFreeZeroStarGuidance, {"zero_init_steps": 2}),
}


def guided_by_pytorch(pipe, guider, steps=4):
    """PyTorch's loop with a guider of diffusers: latents."""
    embeds, negative = pipe.encode_prompt(
        CALL["prompt"], "cpu", 1, True, negative_prompt=CALL["negative_prompt"]
    )
    pipe.scheduler.set_timesteps(steps)
    size = pipe.unet.config.sample_size
    x = torch.randn((1, 4, size, size), generator=seeded()) * pipe.scheduler.init_noise_sigma
    for step, t in enumerate(pipe.scheduler.timesteps):
        guider.set_state(step=step, num_inference_steps=steps, timestep=t)
        with torch.no_grad():
            predictions = [pipe.unet(x, t, e).sample for e in (embeds, negative)]
        x = pipe.scheduler.step(guider.forward(*predictions).pred, t, x).prev_sample
    return x.numpy()


@pytest.mark.parametrize("name", RULES)
def test_the_pages_rules_are_those_of_diffusers(ours, theirs, name):
    rule, guider, options = RULES[name]
    for rescale in (0.0, 0.7):
        if rescale and name == "zero":
            # Zeros have no deviation: diffusers gives NaN.
            assert np.isfinite(ours(**CALL, guide=rule, guidance_rescale=0.7, seed=1).images).all()
            continue
        made = guider(CALL["guidance_scale"], guidance_rescale=rescale, **options)
        expected = guided_by_pytorch(theirs, made)
        call = {**CALL, "output_type": "latent", "guidance_rescale": rescale, "guide": rule}
        found = ours(**call, generator=seeded()).images
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        without = ours(**{**call, "guide": None}, generator=seeded()).images
        assert np.abs(found - without).max() > 20 * TOLERANCE


def test_a_rules_numbers_and_a_functions_weighted_sum(ours):
    whole = ours(**CALL, seed=1).images
    np.testing.assert_allclose(ours(**CALL, seed=1, guide=plain).images, whole, atol=1e-5)
    unbounded = Projected(norm_threshold=np.inf)
    np.testing.assert_allclose(ours(**CALL, seed=1, guide=unbounded).images, whole, atol=1e-4)
    with count_compilations() as compiled:
        other = ours(**CALL, seed=1, guide=Projected(eta=0, norm_threshold=0.1)).images
    assert compiled == []
    assert np.abs(other - whole).max() > 0.01
    alone = ours(**{**CALL, "guidance_scale": 1.0}, seed=1)
    unguided = ours(**CALL, seed=1, guide=Projected(eta=0), guidance_start=1.0)
    np.testing.assert_allclose(unguided.images, alone.images, atol=1e-5)


def test_running_batches_take_samplers_and_rules(ours):
    own = scheduler_from_function(dpm_2m, like=ours.scheduler)
    given = [
        {"seed": 1, "guide": Projected(eta=0.0, norm_threshold=4.0)},
        {"seed": 2, "guide": Projected(eta=0.6), "guidance_scale": 3.0, "num_inference_steps": 3},
        {"seed": 3, "guide": Projected(), "guidance_scale": 1.0},
    ]
    ddim = ours.scheduler
    with diffusax.RunningBatch(ours, lanes=8, smallest=8) as batch:
        futures = [batch.submit(**{**CALL, **call}, sampler=own) for call in given]
        found = [future.result(120).images for future in futures]
        with count_compilations() as compiled:
            last = {**CALL, "seed": 4, "guide": Projected(eta=2.0)}
            found.append(batch.submit(**last).result(120).images)
        assert compiled == []
    ours.scheduler = own
    expected = [ours(**{**CALL, **call}).images for call in given]
    ours.scheduler = ddim
    expected.append(ours(**last).images)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


@pytest.mark.slow
def test_a_picture_has_gradients_to_a_rules_numbers(ours):
    inputs = ours.prepare_inputs(**{**CALL, "num_inference_steps": 2}, seed=1, guide=Projected(0.4))

    @jax.jit
    @jax.value_and_grad
    def brightness(eta, params):
        rule = dataclasses.replace(inputs.plan.guide, eta=eta)
        changed = inputs._replace(plan=inputs.plan._replace(guide=rule))
        return ours.generate_fn(params, changed).mean()

    value, gradient = brightness(0.4, ours.params)
    alone = ours(**{**CALL, "num_inference_steps": 2}, seed=1, guide=Projected(0.4)).images
    np.testing.assert_allclose(value, alone.mean(), rtol=1e-4)
    above, below = (brightness(0.4 + step, ours.params)[0] for step in (0.5, -0.5))
    np.testing.assert_allclose(above - below, gradient, rtol=0.05)


def test_what_is_no_rule_is_told(ours):
    with pytest.raises(ValueError, match=r"guide must be a function .* \(got 7.5\)"):
        ours(**CALL, guide=7.5)
    with pytest.raises(ValueError, match="guide must be a function"):
        ours(**CALL, guide=Projected)
    with pytest.raises(ValueError, match="guide must have numbers as leaves"):
        ours(**CALL, guide=Projected(eta="much"))
    with pytest.raises(ValueError, match=r"guide must return one prediction.* \(got \(2, 16"):
        ours(**CALL, guide=lambda predictions, step: predictions)
    with pytest.raises(ValueError, match=r"guide must return one prediction.* \(got NoneType\)"):
        ours(**CALL, guide=lambda *_: None)
    with pytest.raises(TypeError, match="Mine must have a family"):
        type("Mine", (diffusax.DiffusionPipeline,), {})


def test_a_task_with_arguments_of_its_own(ours, theirs):
    noise = [torch.randn((1, 4, 16, 16), generator=seeded(seed)) for seed in (3, 4)]
    turned = np.cos(0.3 * np.pi / 2) * noise[0] + np.sin(0.3 * np.pi / 2) * noise[1]
    call = {**CALL, "guidance_scale": 3.0}
    call.pop("negative_prompt")
    expected = theirs(**call, latents=turned).images
    pipe = VariationPipeline.from_pipe(ours)
    given = {"variation": 0.3, "variation_seed": 4, "seed": 3, "noise": "torch"}
    np.testing.assert_allclose(pipe(**call, **given).images, expected, atol=TOLERANCE)
    with pytest.raises(TypeError, match="variation_sed"):
        pipe(**call, variation_sed=4)


def test_a_family_that_differs_in_one_function(ours):
    pipe = quiet(EvenPipeline.from_pipe(ours))
    call = {**CALL, "seed": 5}
    texts = call["prompt"], call["negative_prompt"]
    embeds = ours.encode_prompt(texts[0], negative_prompt=texts[1])
    norms = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in embeds]
    even = [x / n * n.mean(1, keepdims=True) for x, n in zip(embeds, norms, strict=True)]
    given = {"prompt_embeds": even[0], "negative_prompt_embeds": even[1]}
    expected = ours(**{**call, "prompt": None, "negative_prompt": None, **given}).images
    np.testing.assert_allclose(pipe(**call).images, expected, atol=1e-5)


FILE = '''
import dataclasses

import diffusax


@dataclasses.dataclass(frozen=True)
class Style:
    words: str = ", in oil"


class OilPipeline(diffusax.StableDiffusionPipeline):
    """Paints."""

    def paint(self, what, **call):
        return self(what + Style().words, **call)
'''


def test_a_pipeline_in_a_file(ours, folder, tmp_path, monkeypatch):
    (tmp_path / "pipeline.py").write_text(FILE)
    call = {k: v for k, v in CALL.items() if k != "prompt"}
    expected = ours("a hat, in oil", **call, seed=2).images
    consent = {"trust_remote_code": True}
    for source in (tmp_path, str(tmp_path / "pipeline.py")):
        given = {"custom_pipeline": source, **consent}
        pipe = quiet(diffusax.DiffusionPipeline.from_pretrained(folder, **given))
        assert type(pipe).__name__ == "OilPipeline"
        np.testing.assert_array_equal(pipe.paint("a hat", **call, seed=2).images, expected)
    load = diffusax.StableDiffusionPipeline.from_pretrained
    with pytest.raises(ValueError, match="trust_remote_code=True if you trust it"):
        load(folder, custom_pipeline=tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True if you trust it"):
        load(folder, custom_pipeline=tmp_path, trust_remote_code="no")
    with pytest.raises(
        ValueError, match=r"must be a \.py file here.* \(got 'lpw_stable_diffusion'"
    ):
        load(folder, custom_pipeline="lpw_stable_diffusion", **consent)
    monkeypatch.setenv("DIFFUSERS_DISABLE_REMOTE_CODE", "1")
    with pytest.raises(ValueError, match="DIFFUSERS_DISABLE_REMOTE_CODE forbids"):
        load(folder, custom_pipeline=tmp_path, **consent)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import diffusax\n", "none"),
        (FILE + FILE.replace("Oil", "Ink"), "OilPipeline, InkPipeline"),
    ],
)
def test_a_file_without_exactly_one_pipeline(folder, tmp_path, code, names):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ValueError, match=rf"one class that derives .* \(got {names}\)"):
        diffusax.DiffusionPipeline.from_pretrained(
            folder, custom_pipeline=tmp_path / "mine.py", trust_remote_code=True
        )


@pytest.mark.slow
def test_large_runs_use_the_pipelines_sampler(ours, tmp_path):
    ours.scheduler = scheduler_from_function(dpm_2m, like=ours.scheduler)
    assert runs.run(ours, [{"prompt": "a cat", "seed": 1}], tmp_path).finished
    ((info, data),) = runs.pictures(tmp_path)
    assert info["sampler"] == "dpm_2m"
    alone = ours("a cat", num_inference_steps=2, seed=1).images[0]
    difference = runs.pixels(data).astype(int) - np.asarray(alone).astype(int)
    assert np.abs(difference).max() <= 1


def imported(code):
    """The names that a program imports from diffusax, with their modules."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffusax"):
            found |= {(node.module, alias.name) for alias in node.names}
    return found


def has(entry, name):
    """Whether a documented entry is a module with a name of its own."""
    module = sys.modules.get(entry)
    return module is not None and name in vars(module)


def test_the_reference_has_what_hooks_need():
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)", pages, re.M))
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    codes.append((ROOT / "tests/support/toy_family.py").read_text("utf-8"))
    hidden = set()
    for module, name in set().union(*map(imported, codes)):
        assert not name.startswith("_")
        whole = f"{module}.{name}"
        parts = [whole.rsplit(".", n)[0] for n in range(3)]
        shown = any(part in documented for part in parts)
        again = any(entry.endswith(f".{name}") or has(entry, name) for entry in documented)
        if not shown and not again and not hasattr(diffusax, name):
            hidden.add(whole)
    assert not hidden
