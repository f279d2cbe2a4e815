"""LoRAs in runs over many prompts: a column, tags in prompts, equal files however they are made."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.adapted import random_adapter
from support.offline_runs import files, pictures, pixels, run

import diffusax
from diffusax import offline
from diffusax.models.adapters.low_rank import kernel_shapes

CALL = {"num_inference_steps": 2, "seed": 5}
ROWS = [
    {"prompt": "a cat", "seed": 5, "adapters": {"style": 0.8}},
    {"prompt": "a dog <lora:face:0.5>", "seed": 5, "adapters": {"style": None}},
    {"prompt": "a fox", "seed": 5},
    {"prompt": "an owl", "seed": 5, "adapters": json.dumps({"style": -0.4, "face": 0.3})},
    {"prompt": "a bee", "adapters": {"nobody": 1.0}},
    {"prompt": "a bee", "adapters": "style"},
    {"prompt": "an ant <lora:face:much>"},
]


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd", "a")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for seed, name in enumerate(("style", "face")):
        layers = {}
        for component in ("unet", "text_encoder"):
            network = pipe.parts.networks[component]
            some = [p for p in kernel_shapes(network) if p.endswith(("to_q", "to_v", "q_proj"))]
            layers |= random_adapter(network, component, 4, some, seed).components
        pipe.add_adapter(name, layers)
    return pipe


def test_each_line_has_the_loras_that_it_names(pipe, tmp_path, caplog):
    assert run(pipe, ROWS, tmp_path / "all") == offline.Summary(drawn=4, errors=3, finished=True)
    found = {info["line"]: pixels(data).astype(int) for info, data in pictures(tmp_path / "all")}
    calls = [
        ("a cat", {"style": 0.8}),
        ("a dog", {"face": 0.5}),
        ("a fox", None),
        ("an owl", {"style": -0.4, "face": 0.3}),
    ]
    for line, (prompt, adapters) in enumerate(calls, 1):
        expected = np.asarray(pipe(prompt, **CALL, adapters=adapters).images[0]).astype(int)
        assert np.abs(found[line] - expected).max() <= 1
        if adapters:
            plain = np.asarray(pipe(prompt, **CALL).images[0]).astype(int)
            assert np.abs(found[line] - plain).max() > 2
    messages = [json.loads(x)["error"] for x in (tmp_path / "all/errors.jsonl").open()]
    assert "adapters has the name 'nobody'" in messages[0]
    assert "adapters must be JSON (got 'style')" in messages[1]
    assert "<lora:face:much> must have a number from -100 to 100 as weight" in messages[2]
    # An image's bits do not follow from what else is in the run.
    run(pipe, [ROWS[0], *["x"] * 2, ROWS[3]], tmp_path / "some")
    name = "000000/000000001.png"
    assert files(tmp_path / "all")[name] == files(tmp_path / "some")[name]


def test_a_table_and_other_loras(pipe, tmp_path):
    table = pyarrow.Table.from_pylist(ROWS[:3])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    run(pipe, ROWS[:3], tmp_path / "list")
    run(pipe, tmp_path / "rows.parquet", tmp_path / "table")
    made = {k: v for k, v in files(tmp_path / "list").items() if k.endswith(".png")}
    assert made == {k: v for k, v in files(tmp_path / "table").items() if k.endswith(".png")}
    pipe.set_adapters("style", 0.5)
    try:
        with pytest.raises(ValueError, match="active adapters"):
            run(pipe, ROWS[:3], tmp_path / "list")
    finally:
        pipe.set_adapters([])


def test_what_is_merged_is_refused(pipe, tmp_path):
    whole = {"lora_unet_conv_in.diff_b": np.ones(32, np.float32)}
    pipe.load_lora_weights(whole, adapter_name="whole")
    pipe.set_adapters([])
    try:
        done = run(pipe, ["a", {"prompt": "b", "adapters": {"whole": 1.0}}], tmp_path)
        assert done == offline.Summary(drawn=1, errors=1, finished=True)
        assert "call fuse_lora before the run" in (tmp_path / "errors.jsonl").read_text()
    finally:
        pipe.delete_adapters("whole")


def test_lines_whose_text_changes_or_is_joined_are_left_out(pipe, tmp_path):
    rows = ["a [cat:dog:0.5]", "a cat AND a dog"]
    done = run(pipe, rows, tmp_path, prompt_weighting=True)
    assert (done.drawn, done.errors) == (0, 2)
    messages = [json.loads(x)["error"] for x in (tmp_path / "errors.jsonl").open()]
    assert all("runs over many prompts do not read" in message for message in messages)
