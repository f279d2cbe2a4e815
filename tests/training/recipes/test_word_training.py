"""Textual inversion beside the loop of diffusers' script, on the same draws; and its result."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.data_sets import picture
from support.effort import first
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax
from diffusax.training import (
    TextualInversionConfig,
    TextualInversionDataConfig,
    TextualInversionOptimizerConfig,
    textual_inversion,
    train,
)
from diffusax.training.data.batches import Batches

STEPS, BATCH, LR = 20, 3, 1e-3
WORD = "<toy>"
KINDS = {"sd1": ("toy", 1), "sd2": ("red dog", 3), "xl": ("toy", 2)}
"""The initial token and the number of vectors for each kind of checkpoint."""
KEYS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}


class Run(NamedTuple):
    folder: Path
    """The checkpoint."""
    config: TextualInversionConfig
    recipe: Any
    losses: list[float]
    """Those of our twenty steps."""
    rows: dict[str, np.ndarray]
    """The embeddings in the file that they end in."""

    @property
    def result(self) -> Path:
        return Path(self.config.output) / "model"


@pytest.fixture(scope="module", params=first(KINDS))
def run(request, tiny_checkpoints, tmp_path_factory) -> Run:
    """A run of twenty steps on five pictures."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "xl":
        model = tiny_checkpoints.pipeline("xl")[0]
    else:
        model = folder / "checkpoint"
        options = {"unet": SMALLEST_UNET, "vae": SMALLEST_VAE, "style": request.param}
        if request.param == "sd2":
            options["scheduler"] = diffusers.DDIMScheduler(
                beta_schedule="scaled_linear", clip_sample=False, prediction_type="v_prediction"
            )
        build_stable_diffusion(model, **options)
    (folder / "pictures").mkdir()
    for i in range(5):
        picture(i).save(folder / "pictures" / f"{i}.png")
    initializer, count = KINDS[request.param]
    config = TextualInversionConfig(
        model=str(model),
        output=str(folder / "out"),
        placeholder_token=WORD,
        initializer_token=initializer,
        num_vectors=count,
        save_pipeline=True,
        steps=STEPS,
        batch_size=BATCH,
        log_every=1,
        report_to=(),
        compute_dtype="float32",
        data=TextualInversionDataConfig(str(folder / "pictures"), resolution=16),
        optimizer=TextualInversionOptimizerConfig(learning_rate=LR),
    )
    recipe = textual_inversion(config)
    train(recipe, config)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    with safe_open(folder / "out" / "model" / "learned_embeds.safetensors", "numpy") as file:
        rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Run(model, config, recipe, losses, rows)


def opened(folder: Path, **options: Any) -> Any:
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def encoders(pipe: Any) -> list[tuple[str, Any, Any]]:
    """The text encoders of a pipeline of PyTorch, with their names and tokenizers."""
    found = [("", "text_encoder"), ("_2", "text_encoder_2")]
    return [
        (name, getattr(pipe, name), getattr(pipe, f"tokenizer{n}"))
        for n, name in found
        if getattr(pipe, name, None) is not None
    ]


def batches_and_draws(run: Run) -> list[tuple[dict, Any]]:
    """The batches of the run, and the random numbers of its steps."""
    batches = Batches(run.recipe.source, run.recipe.example, batch_size=BATCH, seed=run.config.seed)
    draw = jax.jit(run.recipe.denoising.draw)
    found = []
    for step in range(STEPS):
        batch = next(batches)
        key = jax.random.fold_in(jax.random.key(run.config.seed), step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(BATCH))
        found.append((batch, draw(batch, keys)))
    batches.close()
    return found


def learn_as_diffusers(run: Run) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loop of diffusers' textual_inversion.py and textual_inversion_sdxl.py."""
    pipe = opened(run.folder)
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    initializer, count = run.config.initializer_token, run.config.num_vectors
    names = [WORD, *(f"{WORD}_{i}" for i in range(1, count))]
    tables, kept, ids = {}, {}, {}
    for name, encoder, tokenizer in encoders(pipe):
        initial = tokenizer.encode(initializer, add_special_tokens=False)
        assert tokenizer.add_tokens(names) == count
        ids[name] = tokenizer.convert_tokens_to_ids(names)
        encoder.requires_grad_(False)
        encoder.resize_token_embeddings(len(tokenizer))
        tables[name] = encoder.get_input_embeddings().weight
        for i, token in enumerate(ids[name]):
            tables[name].data[token] = tables[name].data[initial[i % len(initial)]].clone()
        kept[name] = tables[name].data.clone()
        tables[name].requires_grad_(True)
    for frozen in (pipe.unet, pipe.vae):
        frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(tables.values(), lr=LR, weight_decay=1e-2)
    losses = []
    for batch, draws in batches_and_draws(run):
        loss = diffusers_loss(pipe, scheduler, batch, draws)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, table in tables.items():
            others = torch.ones(len(table), dtype=torch.bool)
            others[min(ids[name]) : max(ids[name]) + 1] = False
            with torch.no_grad():
                table[others] = kept[name][others]
        losses.append(loss.item())
    return losses, {n: t.detach()[min(ids[n]) : max(ids[n]) + 1].numpy() for n, t in tables.items()}


def diffusers_loss(pipe: Any, scheduler: Any, batch: dict, draws: Any) -> torch.Tensor:
    def tensor(x: Any) -> torch.Tensor:
        x = np.asarray(x)
        return torch.tensor(np.moveaxis(x, -1, 1).copy() if x.ndim == 4 else x)

    pixels = tensor(batch["pixel_values"].astype(np.float32) / 127.5 - 1)
    with torch.no_grad():
        latent_dist = pipe.vae.encode(pixels).latent_dist
    latents = latent_dist.mean + latent_dist.std * tensor(draws.latent_noise)
    latents = latents * pipe.vae.config.scaling_factor
    noise, timesteps = tensor(draws.noise), tensor(draws.timesteps).long()
    noisy = scheduler.add_noise(latents, noise, timesteps)
    ids = [
        torch.tensor(batch[name]).long() for name in ("input_ids", "input_ids_2") if name in batch
    ]
    added = None
    if len(ids) == 1:
        hidden = pipe.text_encoder(ids[0])[0]
    else:
        outputs = [
            encoder(i, output_hidden_states=True)
            for (_, encoder, _), i in zip(encoders(pipe), ids, strict=True)
        ]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        sizes = tensor(batch["time_ids"]).float()
        added = {"text_embeds": outputs[1][0], "time_ids": sizes}
    predicted = pipe.unet(noisy, timesteps, hidden, added_cond_kwargs=added).sample
    if scheduler.config.prediction_type == "epsilon":
        target = noise
    else:
        target = scheduler.get_velocity(latents, noise, timesteps)
    return torch.nn.functional.mse_loss(predicted.float(), target.float())


def test_losses_and_rows_are_those_of_diffusers_script_over_twenty_steps(run):
    losses, rows = learn_as_diffusers(run)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    named = rows if len(rows) > 1 else {WORD: rows["text_encoder"]}
    named = {KEYS.get(name, name): array for name, array in named.items()}
    assert set(run.rows) == set(named)
    began = {name: params["embedding"] for name, params in run.recipe.trained().items()}
    for (key, expected), before in zip(named.items(), began.values(), strict=True):
        np.testing.assert_allclose(run.rows[key], expected, atol=1e-5)
        assert np.abs(expected - before).mean() > 5 * LR


def test_tokens_are_those_of_diffusers_tokenizer(run):
    tokenizers = [tokenizer for _, _, tokenizer in encoders(opened(run.folder))]
    names = [WORD, *(f"{WORD}_{i}" for i in range(1, run.config.num_vectors))]
    for name, tokenizer in zip(("input_ids", "input_ids_2"), tokenizers):
        tokenizer.add_tokens(names)
        text = "a dark photo of the " + " ".join(names)
        expected = tokenizer(text, padding="max_length", max_length=77).input_ids
        np.testing.assert_array_equal(
            run.recipe.base.tokenize(f"a dark photo of the {WORD}")[name], expected
        )


def test_pytorch_diffusers_loads_the_word_and_draws_the_same(run):
    theirs = opened(run.folder)
    if len(run.rows) == 1:
        theirs.load_textual_inversion(run.result)
    else:
        for name, encoder, tokenizer in encoders(theirs):
            rows = torch.tensor(run.rows[KEYS[name]])
            theirs.load_textual_inversion(
                rows, token=WORD, text_encoder=encoder, tokenizer=tokenizer
            )
    ours = diffusax.DiffusionPipeline.from_pretrained(run.folder)
    ours.load_textual_inversion(run.result)
    side = theirs.unet.config.sample_size
    latents = np.random.default_rng(0).standard_normal((1, 4, side, side), np.float32)
    call = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "np"}
    expected = theirs(f"my {WORD} here", latents=torch.tensor(latents), **call).images
    plain = opened(run.folder)("my toy here", latents=torch.tensor(latents), **call).images
    assert np.abs(expected - plain).max() > 1e-3
    np.testing.assert_allclose(
        ours(f"my {WORD} here", latents=latents, **call).images, expected, atol=1e-4
    )


def test_all_other_rows_of_the_saved_pipeline_keep_their_bits(run):
    before, after = opened(run.folder), opened(run.result)
    pairs = zip(encoders(before), encoders(after), strict=True)
    for (name, old, _), (_, new, tokenizer) in pairs:
        rows = run.rows[WORD if len(run.rows) == 1 else KEYS[name]]
        table, own = (e.get_input_embeddings().weight.detach().numpy() for e in (old, new))
        np.testing.assert_array_equal(own[: len(table)], table)
        np.testing.assert_array_equal(own[len(table) :], rows)
        assert tokenizer.convert_tokens_to_ids(WORD) == len(table)
        tensors = new.state_dict()
        for key, tensor in old.state_dict().items():
            if "token_embedding" not in key:
                assert torch.equal(tensors[key], tensor), key


def test_the_card_says_how_to_load_the_word(run):
    card = (run.result / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert "- textual_inversion" in front
    assert "usage" not in front
    code = text.split("```python\n")[1].split("```")[0]
    assert f'pipe.load_textual_inversion("{run.result}")' in code
    names: dict[str, Any] = {}
    exec(code.split("pipe(")[0], names)
    assert WORD in names["pipe"].tokenizer.words
