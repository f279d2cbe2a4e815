"""Edits over image guidance, against pictures drawn by the pipeline and measured by PyTorch."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.data_sets import picture
from support.effort import first
from support.evaluation_rows import write_edits
from torch.nn.functional import cosine_similarity
from transformers import CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import diffusax
from diffusax.cli import main
from diffusax.cli.evaluate_edits import write_plot
from diffusax.evaluation import EditScores, Mean
from diffusax.runtime.programs.compilations import count_compilations

STEPS, GUIDANCE = 2, 5.0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_edits(tmp_path_factory.mktemp("edits") / "edits.parquet", 5)


def evaluate(tmp_path, model, clip, data, *args):
    """Runs the command; the lines of metrics.jsonl."""
    command = ["evaluate", "instruct-pix2pix", model, "--data", data, "--clip", clip]
    command += ["--steps", STEPS, "--guidance", GUIDANCE, "--output", tmp_path / "out", *args]
    main(list(map(str, command)))
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@torch.no_grad()
def expected_scores(clip, pictures, edited, rows, *, range_from=0.0):
    """Means and standard errors by transformers, pixels in [range_from, 1]."""
    folder, model = clip
    options = {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}
    plain = CLIPImageProcessorPil.from_pretrained(folder, **options)
    own = CLIPImageProcessorPil.from_pretrained(folder)
    mean, std = (torch.tensor(x)[:, None, None] for x in (own.image_mean, own.image_std))
    tokenizer = CLIPTokenizer.from_pretrained(folder)

    def images(pictures):
        pixels = plain(pictures, return_tensors="pt")["pixel_values"]
        pixels = (range_from + (1 - range_from) * pixels - mean) / std
        x = model.get_image_features(pixels).pooler_output
        return x / x.norm(dim=1, keepdim=True)

    def texts(column):
        ids = tokenizer([row[column] for row in rows], padding=True, return_tensors="pt")
        x = model.get_text_features(**ids).pooler_output
        return x / x.norm(dim=1, keepdim=True)

    image_0, image_1 = images(pictures), images(edited)
    text_0, text_1 = texts("before"), texts("after")
    found = {
        "image_similarity": cosine_similarity(image_0, image_1),
        "direction_similarity": cosine_similarity(image_1 - image_0, text_1 - text_0),
        "text_similarity": cosine_similarity(image_1, text_1),
    }
    errors = {f"{k}_error": x.std() / len(x) ** 0.5 for k, x in found.items()}
    return {k: float(x.mean()) for k, x in {**found, **errors}.items()}


def chosen_rows(rows, size):
    """What the data set says, the pictures as they are edited: squares from the middle."""
    texts = [
        {
            "edit": f"turn {i} of them into pears",
            "before": f"a photo of {i} apples",
            "after": f"a photo of {i} pears",
        }
        for i in rows
    ]
    width = size * 40 // 32
    left = round((width - size) / 2)
    pictures = [
        picture(i)
        .resize((width, size), Image.Resampling.LANCZOS)
        .crop((left, 0, left + size, size))
        for i in rows
    ]
    return texts, pictures


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), first([("sd-instruct", 64), ("xl-instruct", 64)]))
def test_scores_are_those_of_pictures_drawn_in_python(
    tiny_checkpoints, tiny_clip, data, tmp_path, capsys, kind, size
):
    model, _ = tiny_checkpoints.pipeline(kind)
    args = ["--image-guidance", 1, 1.5, "--resolution", size, "--seed", 7, "--batch-size", 2]
    lines = evaluate(tmp_path, model, tiny_clip[0], data, *args)
    rows, pictures = chosen_rows(range(5), size)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    sides = {"height": size, "width": size} if kind == "xl-instruct" else {}
    assert [line["image_guidance"] for line in lines] == [1.0, 1.5]
    for line in lines:
        # In other company than the command's, and in batches of its size, which compile nothing.
        edited = [
            pipe(
                [row["edit"], "nothing"],
                image=[image, pictures[0]],
                seed=[7 + i, 0],
                num_inference_steps=STEPS,
                guidance_scale=GUIDANCE,
                image_guidance_scale=line["image_guidance"],
                **sides,
            ).images[0]
            for i, (row, image) in enumerate(zip(rows, pictures))
        ]
        expected = expected_scores(tiny_clip, pictures, edited, rows)
        # A pixel that is rounded the other way in a batch moves a cosine by some 1e-5.
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, abs=3e-5), name
        settings = {"samples": 5, "steps": STEPS, "resolution": size, "seed": 7, "guidance": 5.0}
        assert settings.items() <= line.items()
    out = tmp_path / "out"
    shown = capsys.readouterr().out
    assert (out / "table.md").read_text() in shown
    assert " 1.5 | " in shown
    assert f"{lines[1]['image_similarity']:.4f} ± " in shown
    with Image.open(out / "edits.png") as sheet:
        # Four rows of a picture and two edits.
        assert sheet.width == 3 * (size + 4) - 4
        assert sheet.height > 4 * size


@pytest.mark.slow
def test_official_pixel_range_is_that_of_the_authors_script(
    tiny_checkpoints, tiny_clip, data, tmp_path
):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    args = ["--image-guidance", 1.2, "--resolution", 64, "--samples", 2, "--batch-size", 2]
    args += ["--negative-prompt", "a drawing"]
    (line,) = evaluate(
        tmp_path, model, tiny_clip[0], data, *args, "--official-pixel-range", "--sheet", 0
    )
    assert line["official_pixel_range"]
    assert not (tmp_path / "out" / "edits.png").exists()
    order = np.random.default_rng(0).permutation(5)[:2]
    numbers = sorted(map(int, order))
    rows, pictures = chosen_rows(numbers, 64)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    edited = pipe(
        [row["edit"] for row in rows],
        image=pictures,
        negative_prompt=["a drawing"] * 2,
        seed=numbers,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        image_guidance_scale=1.2,
    ).images
    theirs = expected_scores(tiny_clip, pictures, edited, rows, range_from=-1.0)
    ours = expected_scores(tiny_clip, pictures, edited, rows)
    for name, value in theirs.items():
        assert line[name] == pytest.approx(value, abs=1e-5), name
    assert abs(theirs["image_similarity"] - ours["image_similarity"]) > 1e-4


def test_other_scales_and_other_rows_compile_nothing(tiny_checkpoints, tiny_clip, data, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    args = ["--resolution", 64, "--batch-size", 2, "--sheet", 0]
    evaluate(tmp_path, model, tiny_clip[0], data, *args, "--image-guidance", 1)
    with count_compilations() as compiled:
        evaluate(tmp_path, model, tiny_clip[0], data, *args, "--image-guidance", 1.1, 2, 3)
    assert not compiled


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("image_similarity", "direction_similarity", "text_similarity")
    found = [EditScores(1 + i, dict.fromkeys(names, Mean(0.1 * i, 0.01)), []) for i in range(3)]
    assert write_plot(found, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width > 600


def failure(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "instruct-pix2pix", *map(str, args)])
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_mistakes_are_one_sentence(tiny_checkpoints, tiny_clip, data, tmp_path, capsys):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    given = [model, "--clip", tiny_clip[0], "--output", tmp_path / "out"]
    missing = failure(capsys, *given, "--data", data, "--caption-column", "caption")
    assert "no column 'caption'; it has edit_prompt, edited_prompt, input_image" in missing
    assert "samples=9 cannot be chosen of the 5 rows" in failure(
        capsys, *given, "--data", data, "--samples", 9
    )
    assert "image_guidance" in failure(capsys, *given, "--data", data, "--image-guidance", 0.5)
    other, _ = tiny_checkpoints.pipeline("sd")
    options = ["--data", data, "--clip", tiny_clip[0], "--output", tmp_path / "out"]
    assert "8 input channels" in failure(capsys, other, *options, "--resolution", 64)
