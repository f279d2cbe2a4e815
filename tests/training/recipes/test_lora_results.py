"""Runs with LoRA: their losses are diffusers', and PyTorch draws the same with what they write."""

import os
import subprocess
import sys
import time
import warnings

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from parity.test_training import BATCH, LR, STEPS, WEIGHT_DECAY, batches, torch_losses
from peft.utils import get_peft_model_state_dict
from safetensors.numpy import load_file
from support.training_runs import PICTURES, RUN, prepared, steps_logged, train_on_devices

import diffusax
from diffusax.cli.console import main
from diffusax.lora.files import WEIGHT_NAME
from diffusax.lora.trained import KOHYA_NAME
from diffusax.training import LoRAConfig, TextToImageConfig, text_to_image
from diffusax.training.optimizers import OptimizerConfig, make_optimizer
from diffusax.training.step.draws import Draws, Dropped
from diffusax.training.step.step import initial_state, make_train_step

DRAW = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "np"}


@pytest.mark.slow
def test_losses_match_diffusers_over_twenty_steps(tmp_path, tiny_checkpoints, pictures):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    # As train_text_to_image_lora.py sets it up.
    pipe.unet.requires_grad_(False)
    pipe.text_encoder.requires_grad_(False)
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=4,
        init_lora_weights="gaussian",
        target_modules=["to_k", "to_q", "to_v", "to_out.0"],
    )
    pipe.unet.add_adapter(lora)
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet))
    pipe.save_lora_weights(tmp_path, unet_lora_layers=layers)

    config = TextToImageConfig(
        model=str(folder),
        data=prepared(pictures),
        compute_dtype="float32",
        lora=LoRAConfig(path=str(tmp_path)),
    )
    recipe = text_to_image(config)
    run = batches(pipe, "epsilon")

    def with_draws(params, frozen, batch, keys):
        none = jnp.zeros(BATCH, bool)
        drawn = (batch["latent_noise"], batch["noise"], batch["timesteps"])
        return recipe.denoising.with_draws(
            params, frozen, batch, Draws(*drawn, Dropped(none, none))
        )

    optimizer = make_optimizer(OptimizerConfig(learning_rate=LR, weight_decay=WEIGHT_DECAY), STEPS)
    step = jax.jit(make_train_step(with_draws, optimizer))
    state, frozen = initial_state(recipe.trained(), optimizer, seed=0), recipe.frozen()
    losses = []
    for batch in run:
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    theirs = torch_losses(pipe, run, None, ("unet",))
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    ups = [layer["up"] for layer in state.params["unet"].values()]
    assert max(float(jnp.abs(up).max()) for up in ups) > 5 * LR


def trained_by_command(output, checkpoint, pictures, *options):
    main(
        [
            *("train", "text-to-image", "--model", str(checkpoint), "--data.path", str(pictures)),
            *("--data.resolution", "32", "--output", str(output), "--steps", "4"),
            *("--batch-size", "4", "--optimizer.learning-rate", "5e-2", "--lora.rank", "2"),
            *("--lora.alpha", "3", "--compute-dtype", "float32", "--report-to"),
            *options,
        ]
    )
    return output


@pytest.fixture(scope="module", params=["sd", pytest.param("xl", marks=pytest.mark.slow)])
def run(request, tmp_path_factory, tiny_checkpoints, pictures):
    """A run of the command line, and the checkpoint that it began from."""
    folder, _ = tiny_checkpoints.pipeline(request.param)
    output = tmp_path_factory.mktemp("run")
    options = ["--lora.format", "both", "--train-text-encoder", "--ema.rule", "power"]
    options += ["--ema.snapshot-every", "2", "--text-encoder-learning-rate", "1e-2"]
    # Of kohya's files diffusers drops a text encoder's attention where out_proj is not among it.
    options += ["--lora.targets", "to_q", "to_v", "conv1", "q_proj", "out_proj", "fc1"]
    return folder, trained_by_command(output, folder, pictures, *options)


def draw(pipe) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    return pipe("a dog", generator=torch.Generator().manual_seed(0), **DRAW).images[0]


def both_draw(folder, file, name) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures of PyTorch without and with the adapters, and ours with them."""
    theirs = diffusers.DiffusionPipeline.from_pretrained(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder, dtype="float32")
    plain = draw(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.load_lora_weights(file, weight_name=name)
    ours.load_lora_weights(file, weight_name=name)
    return plain, draw(theirs), draw(ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", [WEIGHT_NAME, KOHYA_NAME])
def test_pytorch_draws_the_same_with_the_result(run, name):
    folder, output = run
    plain, theirs, ours = both_draw(folder, output / "model", name)
    assert np.abs(plain - theirs).max() > 0.05
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_pytorch_draws_the_same_with_dora(tmp_path, tiny_checkpoints, pictures):
    folder, _ = tiny_checkpoints.pipeline("sd")
    options = ["--lora.dora", "--lora.targets", "to_q", "to_v", "conv1"]
    trained_by_command(tmp_path, folder, pictures, *options)
    plain, theirs, ours = both_draw(folder, tmp_path / "model", WEIGHT_NAME)
    assert np.abs(plain - theirs).max() > 0.05
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_a_folder_holds_adapters_alone_and_says_how_to_load_them(run, capsys):
    folder, output = run
    for name in ("model", "model_ema"):
        files = {path.name for path in (output / name).iterdir()}
        assert files == {WEIGHT_NAME, KOHYA_NAME, "README.md"}
    card = (output / "model_ema" / "README.md").read_text()
    assert f'from_pretrained("{folder}")' in card
    assert f'pipe.load_lora_weights("{(output / "model_ema").resolve()}")' in card
    assert "- lora\n" in card
    main(["ema", str(output), "--length", "0.08"])
    made = load_file(output / "model_ema_0.08" / WEIGHT_NAME)
    last = load_file(output / "model" / WEIGHT_NAME)
    assert made.keys() == last.keys()
    assert any((made[key] != last[key]).any() for key in made)
    # The state is that of adapters alone, too: that of networks would have three copies of each.
    size = sum(f.stat().st_size for f in (output / "checkpoints").rglob("*") if f.is_file())
    networks = (folder / "unet", *folder.glob("text_encoder*"))
    assert size < sum(f.stat().st_size for path in networks for f in path.iterdir())


@pytest.mark.slow
def test_killed_runs_end_in_the_same_bits(tmp_path, checkpoint, pictures):
    own = ["lora.rank=2", "lora.dropout=0.2", "steps=16", "batch_size=2"]

    def start(output):
        command = [sys.executable, str(RUN), str(checkpoint), str(pictures), str(output), *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=os.environ, **pipes)

    def finish(process):
        text, _ = process.communicate(timeout=900)
        assert process.returncode == 0, text

    finish(start(tmp_path / "whole"))
    broken = tmp_path / "broken"
    for step in (3, 7):
        killed = start(broken)
        while max(steps_logged(broken), default=0) < step:
            assert killed.poll() is None, killed.communicate()[0]
            time.sleep(0.001)
        killed.kill()
        killed.wait()
        assert max(steps_logged(broken)) < 16
    finish(start(broken))
    for name in ("model", "model_ema"):
        expected = load_file(tmp_path / "whole" / name / WEIGHT_NAME)
        for key, value in load_file(broken / name / WEIGHT_NAME).items():
            np.testing.assert_array_equal(value, expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=-1", "data=2,fsdp=2,tensor=2"])
def test_eight_devices_train_as_one_does(tmp_path, checkpoint, pictures, mesh):
    own = ["lora.rank=2", "lora.dropout=0.2", "lora.dora=true", "train_text_encoder=true"]
    expected = train_on_devices(tmp_path / "one", checkpoint, pictures, 1, *own)
    result = train_on_devices(
        tmp_path / "eight", checkpoint, pictures, 8, *own, f"mesh={mesh}", "accumulate=2", *PICTURES
    )
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    theirs = load_file(tmp_path / "one" / "model" / WEIGHT_NAME)
    for key, value in load_file(tmp_path / "eight" / "model" / WEIGHT_NAME).items():
        # Adam divides by the gradient's size, so that rounding errors of tiny gradients count.
        np.testing.assert_allclose(value, theirs[key], atol=4e-3, err_msg=key)
