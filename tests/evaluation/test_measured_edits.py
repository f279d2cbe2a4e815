"""`diffusax evaluate edits`: the scores of edits, with any editor, and runs that go on."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.data_sets import picture, png
from support.effort import first
from support.evaluation_rows import build_dino, write_edits
from support.qwen_edits import EDIT, make_areas_smaller
from support.tiny_transformers import flux_pipeline, klein_pipeline, qwen_image_pipeline
from torch.nn.functional import cosine_similarity

import diffusax
from diffusax.cli import main
from diffusax.evaluation import DINO, Edits, EditSettings, pixel_distances
from diffusax.evaluation.preferences import AESTHETIC_FILE, HPS_FILE

STEPS = 2


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dino")
    return folder, build_dino(folder)


@pytest.fixture(scope="module")
def scorers(tmp_path_factory, tiny_clip):
    """The options that name tiny networks for all scores."""
    from support.open_clip_model import OpenCLIP
    from support.tiny import randomize

    folder, clip = tiny_clip
    files = tmp_path_factory.mktemp("scorers")
    torch.save({"state_dict": randomize(OpenCLIP(clip.config)).state_dict()}, files / HPS_FILE)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 1))
    torch.save(layers.state_dict(), files / AESTHETIC_FILE)
    networks = ["--pickscore", folder, "--hps", files, "--hps-processor", folder]
    return [*networks, "--aesthetic", files, "--aesthetic-clip", folder]


def evaluate(output, model, data, clip, dino, *args):
    """Runs the command; the lines of metrics.jsonl and of rows.jsonl."""
    command = ["evaluate", "edits", model, "--data", data, "--output", output, "--steps", STEPS]
    command += ["--clip", clip, "--dino", dino, "--batch-size", 2, *args]
    main(list(map(str, command)))
    return lines(output / "metrics.jsonl"), lines(output / "rows.jsonl")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.no_grad()
def dino_similarity(model, images, others):
    """By transformers, as DINO's and MagicBrush's scripts prepare images."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def features(image):
        short, (width, height) = 48, image.size
        long = int(short * max(width, height) / min(width, height))
        size = (short, long) if width <= height else (long, short)
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = ((length - 42) // 2 for length in image.size)
        pixels = np.array(image.crop((left, top, left + 42, top + 42)))
        x = (torch.tensor(pixels).permute(2, 0, 1) / 255 - mean) / std
        return model(x[None]).last_hidden_state[:, 0]

    pairs = zip(images, others, strict=True)
    return np.array([float(cosine_similarity(*map(features, pair))) for pair in pairs])


@pytest.mark.parametrize("name", ["Dinov2Model", "ViTModel"])
def test_dino_similarity_is_that_of_transformers(tmp_path, name):
    model = build_dino(tmp_path, name)
    images = [picture(seed, (50 + 7 * seed, 40)) for seed in range(3)]
    features = DINO.from_pretrained(tmp_path, batch_size=2).images(images)
    expected = dino_similarity(model, images[:2], images[1:])
    np.testing.assert_allclose((features[:2] * features[1:]).sum(-1), expected, atol=1e-4)
    # The older of these checkpoints have no safetensors.
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    again = DINO.from_pretrained(tmp_path, batch_size=2).images(images)
    np.testing.assert_array_equal(again, features)


def test_only_a_dino_measures_so(tiny_clip):
    with pytest.raises(
        ValueError, match="holds a CLIPModel; DINO's similarity needs a Dinov2Model"
    ):
        DINO.from_pretrained(tiny_clip[0])


def test_pixel_distances_are_magicbrushs():
    image, other = picture(0, (20, 30)), picture(1, (40, 32))
    a, b = (np.asarray(x, np.float64) / 255 for x in (image.resize((40, 32)), other))
    expected = [[np.abs(a - b).mean(), np.square(a - b).mean()]]
    np.testing.assert_allclose(pixel_distances([image], [other]), expected, rtol=1e-12)


def test_all_scores_are_measured_and_a_run_goes_on(
    tiny_checkpoints, tiny_clip, dino, scorers, tmp_path
):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    data = write_edits(tmp_path / "edits.parquet", 3, edited=True)
    args = ["--resolution", 64, "--seed", 5, "--save-images", "--sheet", 1, *scorers]
    args += ["--scores", "clip", "dino", "pixels", "pickscore", "hps", "aesthetic"]
    given = model, data, tiny_clip[0], dino[0]
    (means,), rows = evaluate(tmp_path / "out", *given, *args)
    out = tmp_path / "out"
    names = "image_similarity direction_similarity text_similarity dino_similarity l1 l2"
    names += " target_image_similarity target_dino_similarity target_l1 target_l2"
    names += " pickscore hps aesthetic"
    assert set(names.split()) == {*rows[0]} - {"row", "image_guidance"}
    for name in names.split():
        values = np.array([row[name] for row in rows])
        assert means[name] == pytest.approx(values.mean(), rel=1e-6)
        assert means[f"{name}_error"] == pytest.approx(values.std(ddof=1) / 3**0.5, rel=1e-5)
        assert np.ptp(values) > 1e-5, name
    edits = Edits(EditSettings(data=str(data)), 64)
    edited = [Image.open(out / "images" / "edited" / f"{i:06}.png") for i in range(3)]
    originals, targets = [edit.image for edit in edits], [edit.target for edit in edits]
    assert np.array_equal(targets[1], np.asarray(edits.shapes.cut([picture(101)])[0]))
    for prefix, others in (("", originals), ("target_", targets)):
        by_row = {
            f"{prefix}l1": pixel_distances(edited, others)[:, 0],
            f"{prefix}l2": pixel_distances(edited, others)[:, 1],
            f"{prefix}dino_similarity": dino_similarity(dino[1], edited, others),
        }
        for name, expected in by_row.items():
            assert [row[name] for row in rows] == pytest.approx(expected, abs=1e-4), name
    with (out / "metrics.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["hps"]) == means["hps"]
    assert "PickScore" in (out / "table.md").read_text()

    # A row that is there is not measured again, and one whose line was not whole is.
    kept = {**rows[0], "l1": 7.0}
    broken = json.dumps(rows[1])[:-9]
    (out / "rows.jsonl").write_text(f"{json.dumps(kept)}\n{broken}")
    (again,), found = evaluate(out, *given, *args)
    assert found[0] == kept
    assert [row["row"] for row in found] == [0, 1, 2]
    assert again["l2"] == pytest.approx(means["l2"], abs=1e-6)
    assert again["l1"] == pytest.approx((7 + rows[1]["l1"] + rows[2]["l1"]) / 3, abs=1e-6)
    with pytest.raises(SystemExit):
        evaluate(out, *given, *args, "--seed", 6)


EDITORS = {
    "klein": (lambda folder: klein_pipeline(folder, layers=28), lambda width, height: {}),
    "kontext": (
        lambda folder: flux_pipeline(folder, "FluxKontextPipeline"),
        lambda width, height: {"max_area": width * height, "_auto_resize": False},
    ),
    # Its own scale guides only with a negative prompt.
    "qwen": (
        lambda folder: qwen_image_pipeline(folder, EDIT),
        lambda width, height: {"true_cfg_scale": 4.0, "negative_prompt": ""},
    ),
}


@pytest.mark.parametrize("kind", first([*EDITORS]))
def test_an_editor_that_looks_at_images_is_measured(
    tiny_clip, dino, tmp_path, capsys, monkeypatch, kind
):
    make_areas_smaller(monkeypatch.setattr)
    build, own = EDITORS[kind]
    build(tmp_path / "model")
    data = write_edits(tmp_path / "edits.parquet", 2, captions=False)
    args = ["--resolution", 96, "--shapes", "own", "--save-images", "--scores", "pixels", "clip"]
    given = data, tiny_clip[0], dino[0]
    _, rows = evaluate(tmp_path / "out", tmp_path / "model", *given, *args)
    assert {*rows[0]} == {"row", "image_guidance", "l1", "l2", "image_similarity"}
    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    for i in range(2):
        edited = Image.open(tmp_path / "out" / "images" / "edited" / f"{i:06}.png")
        width, height = edited.size
        assert width > height
        assert width * height <= 96 * 96
        expected = pipe(
            prompt=f"turn {i} of them into pears",
            image=_cut(i, edited.size),
            seed=i,
            num_inference_steps=STEPS,
            height=height,
            width=width,
            **own(width, height),
        ).images[0]
        assert np.abs(np.asarray(expected, int) - np.asarray(edited, int)).max() <= 1
    with pytest.raises(SystemExit):
        evaluate(tmp_path / "o", tmp_path / "model", *given, *args, "--image-guidance", 1.5)
    said = " ".join(capsys.readouterr().err.split())
    assert f"does nothing for {type(pipe).__name__}" in said


def _cut(seed, size):
    from diffusax.evaluation.edits import Shapes

    width, height = size
    return Shapes(((height, width),)).cut([picture(seed)])[0]


def test_rows_may_have_other_columns_and_several_images(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "source_img": {"bytes": png(picture(i)), "path": None},
            "instruction": f"add {i} pears",
            "target_img": {"bytes": png(picture(9 + i)), "path": None},
        }
        for i in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "magicbrush.parquet")
    settings = EditSettings(data=str(tmp_path / "magicbrush.parquet"))
    edit = Edits(settings, 16, required=False)[1]
    assert (edit.instruction, edit.before, edit.after) == ("add 1 pears", None, None)
    assert edit.target.size == edit.image.size == (16, 16)
    with pytest.raises(ValueError, match="no column"):
        Edits(settings, 16)


def test_records_may_show_several_images(tmp_path):
    names = ("c.png", "d.png", "e.png")
    for seed, name in enumerate(names):
        picture(seed).save(tmp_path / name)
    record = dict(zip(("control_path_0", "control_path_1", "image_path"), names))
    (tmp_path / "edits.jsonl").write_text(json.dumps({**record, "caption": "mix them"}))
    settings = EditSettings(data=str(tmp_path))
    edit = Edits(settings, 16, references=2, required=False)[0]
    assert (len(edit.images), edit.instruction) == (2, "mix them")
    assert edit.target is not None
    with pytest.raises(ValueError, match="holds 2 images, and this model looks at 1"):
        Edits(settings, 16, required=False)[0]
