"""Options from files, pairs and the command line."""

import pytest
import yaml

from diffusax.training import TextToImageConfig, read_config
from diffusax.training.command import parse_config
from diffusax.training.config import write_config


def test_pairs_win_over_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-4\nsteps: 20\nvalidation_prompts: [a, b]\n")
    config = read_config(TextToImageConfig, tmp_path / "a.yaml", ["steps=1e3", "snr-gamma=5"])
    assert (config.lr, config.steps, config.snr_gamma) == (1e-4, 1000, 5.0)
    assert config.validation_prompts == ("a", "b")


def test_the_command_line_wins_over_both(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 1e-4\nema: ramp\n")
    args = ["--config", str(tmp_path / "a.yaml"), "--set", "lr=1e-3", "--set", "steps=7"]
    config = parse_config(TextToImageConfig, [*args, "--lr", "0.5", "--random-flip"], prog="x")
    assert (config.lr, config.steps, config.ema, config.random_flip) == (0.5, 7, "ramp", True)


def test_the_resolved_options_read_back_the_same(tmp_path):
    config = TextToImageConfig(lr=3e-5, validation_prompts=("a", "b"), snr_gamma=None, fsdp=-1)
    write_config(config, tmp_path / "c.yaml")
    assert read_config(TextToImageConfig, tmp_path / "c.yaml") == config
    assert set(yaml.safe_load((tmp_path / "c.yaml").read_text())) == set(vars(config))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("batchsize=3", "no option 'batchsize'; did you mean batch_size?"),
        ("steps=many", "steps must be of type int"),
        ("steps=1.5", "steps must be of type int"),
        ("random_flip=3", "random_flip must be of type bool"),
        ("model=[1]", "model must be of type str"),
        ("lr", "--set takes name=value"),
        ("accumulate=3", "batch_size=16 must be divisible by accumulate=3"),
        ("ema=mean", "ema='mean' is not known"),
    ],
)
def test_mistakes_name_the_option(pair, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        read_config(TextToImageConfig, None, [pair])


def test_a_file_that_is_no_mapping(tmp_path):
    (tmp_path / "a.yaml").write_text("- lr\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        read_config(TextToImageConfig, tmp_path / "a.yaml")
    with pytest.raises(ValueError, match=r"nothing.yaml"):
        read_config(TextToImageConfig, tmp_path / "nothing.yaml")
