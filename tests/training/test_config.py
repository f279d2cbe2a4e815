"""Options from files, pairs and the command line."""

import re

import pytest
import yaml
from support.repository import ROOT

from diffusax.cli.train import read_recipe
from diffusax.training import (
    AutoencoderConfig,
    ControlNetConfig,
    DenoiserValidationConfig,
    EMAConfig,
    InstructPix2PixConfig,
    OptimizerConfig,
    TextToImageConfig,
    read_config,
)
from diffusax.training.options import from_values, to_yaml

EXAMPLES = ROOT / "examples"


def test_pairs_win_over_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "optimizer: {learning_rate: 1e-4}\nsteps: 20\nvalidation: {prompts: [a, b]}\n"
    )
    config = read_config(TextToImageConfig, tmp_path / "a.yaml", ["steps=1e3", "snr-gamma=5"])
    assert (config.optimizer.learning_rate, config.steps, config.snr_gamma) == (1e-4, 1000, 5.0)
    assert config.validation.prompts == ("a", "b")


def test_the_command_line_wins_over_both(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "optimizer: {learning_rate: 1e-4}\nema: {rule: ramp, decay: 0.9}\n"
    )
    args = ["--config", str(tmp_path / "a.yaml"), "--set", "optimizer.learning-rate=1e-3"]
    args += ["--set", "steps=7", "--set", "ema.start=0.5"]
    args += ["--optimizer.learning-rate", "0.5", "--data.random-flip", "--ema.decay", "0.8"]
    config = read_recipe("text-to-image", args)
    assert config.ema == EMAConfig(rule="ramp", decay=0.8, start=0.5)
    assert (config.optimizer.learning_rate, config.steps) == (0.5, 7)
    assert config.data.random_flip


def test_what_a_file_turns_on_the_command_line_turns_off(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {random_flip: true}\nvalidation: {prompts: [a, b]}\n")
    args = ["--config", str(tmp_path / "a.yaml")]
    args += ["--data.no-random-flip", "--validation.prompts", "c"]
    config = read_recipe("text-to-image", args)
    assert (config.data.random_flip, config.validation.prompts) == (False, ("c",))


def test_the_resolved_options_read_back_the_same(tmp_path):
    config = TextToImageConfig(
        optimizer=OptimizerConfig(learning_rate=3e-5, max_grad_norm=float("inf")),
        validation=DenoiserValidationConfig(prompts=("a", "b")),
        report_to=(),
        mesh="fsdp=-1",
    )
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert read_config(TextToImageConfig, tmp_path / "c.yaml") == config
    assert set(yaml.safe_load((tmp_path / "c.yaml").read_text())) == set(vars(config))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("batchsize=3", "no option 'batchsize'; did you mean batch_size?"),
        ("7=3", "no option '7'"),
        ("ema_start=3", "no option 'ema_start'; did you mean ema.start?"),
        ("learning_rate=3", "no option 'learning_rate'; did you mean optimizer.learning_rate?"),
        ("lr_warmup_steps=3", "did you mean optimizer.warmup_steps?"),
        ("validate_every=3", "did you mean validation.every?"),
        ("image_column=3", "did you mean data.image_column?"),
        ("timestep_bias_portion=3", "did you mean timestep_bias.portion?"),
        ("ema.strat=3", "TextToImageConfig has no option 'ema.strat'; did you mean ema.start?"),
        ("emma.start=3", "no option 'emma'; did you mean ema?"),
        ("ema=ramp", "ema must be a group of options, such as ema.rule (got 'ramp')"),
        ("steps.x=1", "steps must be a whole number from 1 up to 2147483647 (got {'x': 1})"),
        ("steps=many", "steps must be a whole number from 1 up to 2147483647 (got 'many')"),
        ("steps=1.5", "steps must be a whole number"),
        ("steps=.inf", "steps must be a whole number"),
        ("steps=0", "steps must be a whole number from 1"),
        ("steps=[1", "--set steps=[1 is not YAML"),
        ("steps=true", "steps must be a whole number"),
        ("seed=1180591620717411303424", "seed must be a whole number from 0 up to 4294967295"),
        ("seed=-1", "seed must be"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate must be a number from 0"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate must be a number from 0"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate must be a number from 0"),
        ("data.workers=-1", "data.workers must be"),
        (
            "data.resolution=4",
            "data.resolution must be a whole number from 8 up to 8192 or nothing (got 4)",
        ),
        ("noise_offset=.nan", "noise_offset must be"),
        ("snr_gamma=-1", "snr_gamma must be"),
        ("peak_tflops=0", "peak_tflops must be a number above 0"),
        ("validation.every=-1", "validation.every must be"),
        ("validation.steps=0", "validation.steps must be"),
        ("validation.guidance=nan", "validation.guidance must be"),
        ("validation.prompts=[1, {a: 2}]", "validation.prompts must be a list, and each of it a"),
        ("report_to=paper", "report_to must be a list, and each of it one of tensorboard, wandb"),
        ("report_to=[none, wandb]", "report_to=none,wandb is none and others; give one"),
        ("compute_dtype=float64", "compute_dtype must be one of float32, bfloat16"),
        ("mesh=fsdp:0", "mesh must be"),
        ("data.random_flip=3", "data.random_flip must be true or false"),
        ("model=[1]", "model must be a text"),
        ("output=", "output must be a text that is not empty"),
        ("seed", "--set takes name=value"),
        ("accumulate=3", "batch_size=16 must be divisible by accumulate=3"),
        ("ema.rule=mean", "ema.rule must be one of none, constant"),
        ("ema.start=1.5", "ema.start must be a whole number from 0 up to 2147483647 or a number"),
    ],
)
def test_mistakes_name_the_option(pair, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_config(TextToImageConfig, None, [pair])
    assert "\n" not in str(caught.value)


def test_a_run_may_report_to_none():
    assert read_config(TextToImageConfig, None, ["report_to=none"]).report_to == ()
    given = ["--model", "m", "--data.path", "d", "--report-to", "none"]
    assert read_recipe("text-to-image", given).report_to == ()


def test_a_mistake_does_not_print_all_of_a_long_value():
    value: list = []
    for _ in range(8):
        value = [value] * 9
    with pytest.raises(ValueError, match="steps must be") as caught:
        from_values(TextToImageConfig, {"steps": value})
    assert len(str(caught.value)) < 300


def test_a_whole_number_and_a_fraction_stay_what_they_are():
    for text, kind in (("1", int), ("1.0", float), ("0.7", float), ("700", int)):
        (from_yaml,) = (read_config(TextToImageConfig, None, [f"ema.start={text}"]).ema.start,)
        (from_line,) = (read_recipe("text-to-image", ["--ema.start", text]).ema.start,)
        assert (type(from_yaml), type(from_line)) == (kind, kind)
        assert from_yaml == from_line == float(text)


def test_a_file_that_is_no_mapping(tmp_path):
    (tmp_path / "a.yaml").write_text("- steps\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        read_config(TextToImageConfig, tmp_path / "a.yaml")
    with pytest.raises(ValueError, match=r"nothing.yaml"):
        read_config(TextToImageConfig, tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    "path",
    [*EXAMPLES.glob("emoji*/*.yaml"), *EXAMPLES.glob("instruct*/*.yaml")],
    ids=lambda path: path.stem,
)
def test_files_of_options_in_the_examples_are_read(path):
    kinds = {
        "instruct_pix2pix": InstructPix2PixConfig,
        "text_to_image": TextToImageConfig,
        "controlnet": ControlNetConfig,
        "autoencoder": AutoencoderConfig,
        "decoder": AutoencoderConfig,
    }
    kind = kinds[path.stem if path.stem in kinds else path.parent.name]
    config = read_config(kind, path)
    assert config.model
    assert config.data.path
