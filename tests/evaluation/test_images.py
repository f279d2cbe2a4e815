"""FID's network, and the command, against PyTorch and NumPy on the same weights and pictures."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.data_sets import picture
from support.fid_inception import random_inception
from torch.nn.functional import cosine_similarity
from transformers import CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import diffusax
from diffusax.cli import main
from diffusax.evaluation import Aesthetic, Inception, PickScore, statistics
from diffusax.evaluation.features import inception_pixels


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    """The file of a random Inception v3, and the network in PyTorch."""
    file = tmp_path_factory.mktemp("inception") / "inception.safetensors"
    network = random_inception()
    save_file(network.state_dict(), file)
    return file, network


def pixels(image):
    return torch.tensor(np.asarray(image).transpose(2, 0, 1)[None] / 255, dtype=torch.float32)


def write_pictures(folder, numbers):
    folder.mkdir()
    for number in numbers:
        picture(number, (40 + number, 50)).save(folder / f"{number:02}.png")
    rows = [{"file_name": f"{number:02}.png", "text": f"{number} apples"} for number in numbers]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("size", [(40, 50), (299, 299), (411, 37), (600, 301)])
def test_pictures_are_resized_as_torch_does(size):
    image = picture(0, size)
    expected = torch.nn.functional.interpolate(
        pixels(image), size=(299, 299), mode="bilinear", align_corners=False
    )[0].permute(1, 2, 0)
    np.testing.assert_allclose(inception_pixels(image), expected, atol=3e-5)


@pytest.mark.slow
@torch.no_grad()
def test_features_of_inception_are_those_of_pytorch(inception):
    file, theirs = inception
    network = Inception.from_file(file, batch_size=2)
    pictures = [picture(0, (60, 80)), picture(1, (400, 300))]
    expected = [theirs(pixels(image)) for image in pictures]
    features = torch.cat([feature for feature, _ in expected]).numpy()
    actual = network.images(pictures)
    assert np.abs(actual - features).max() <= 1e-5 * np.abs(features).max()
    # Far apart, so that a network that ignores its input would not pass.
    assert np.abs(features[0] - features[1]).max() > 1e-2 * np.abs(features).max()
    prepared = np.stack([inception_pixels(image) for image in pictures])
    # As old as the published one.
    older = {"_use_new_zipfile_serialization": False}
    torch.save(theirs.state_dict(), file.with_suffix(".pth"), **older)
    again = Inception.from_file(file.with_suffix(".pth"), batch_size=2)
    np.testing.assert_array_equal(again.images(pictures), actual)
    logits = torch.cat([logit for _, logit in expected]).numpy()
    actual = np.asarray(network.model.run(prepared).logits)
    assert np.abs(actual - logits).max() <= 1e-5 * np.abs(logits).max()


def test_other_weights_are_an_error(inception, tmp_path):
    tensors = load_file(inception[0])
    tensors["fc.weight"] = torch.zeros(1000, 2048)
    tensors["AuxLogits.fc.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "torchvision.safetensors")
    with pytest.raises(ValueError, match=r"is not FID's Inception v3: .*AuxLogits.*fc\.weight"):
        Inception.from_file(tmp_path / "torchvision.safetensors")
    (tmp_path / "inception.pth").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"inception\.pth holds a pickle that cannot"):
        Inception.from_file(tmp_path / "inception.pth")


def evaluate(output, *args):
    command = ["evaluate", "text-to-image", "--output", output, "--batch-size", 2, *args]
    main(list(map(str, command)))
    return json.loads((output / "metrics.json").read_text())


@torch.no_grad()
def clip_scores(clip, pictures, texts):
    folder, model = clip
    shown = CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")
    ids = CLIPTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    images, captions = model.get_image_features(**shown), model.get_text_features(**ids)
    cosines = cosine_similarity(images.pooler_output, captions.pooler_output)
    return 100 * cosines.clip(min=0).numpy()


@pytest.mark.slow
@torch.no_grad()
def test_a_folder_is_measured_as_pytorch_does(inception, tiny_clip, tmp_path, capsys, caplog):
    file, network = inception
    mine = write_pictures(tmp_path / "mine", range(3))
    reference = write_pictures(tmp_path / "reference", range(10, 12))
    args = ["--images", mine, "--clip", tiny_clip[0], "--inception", file]
    found = evaluate(tmp_path / "out", *args, "--reference", reference)
    assert "2 images do not fill the covariance of 2048 features" in caplog.text

    pictures = [Image.open(mine / f"{number:02}.png") for number in range(3)]
    scores = clip_scores(tiny_clip, pictures, [f"{number} apples" for number in range(3)])
    assert found["pictures"] == 3
    assert found["clip_score"] == pytest.approx(scores.mean(), rel=1e-5, abs=1e-5)
    error = scores.std(ddof=1) / 3**0.5
    assert found["clip_score_error"] == pytest.approx(error, rel=1e-4, abs=1e-5)

    def gaussian(folder):
        x = torch.cat([network(pixels(Image.open(f)))[0] for f in sorted(folder.glob("*.png"))])
        x = x.numpy().astype(np.float64)
        return x.mean(0), x - x.mean(0)

    (mu_a, a), (mu_b, b) = gaussian(mine), gaussian(reference)
    a, b = a / (len(a) - 1) ** 0.5, b / (len(b) - 1) ** 0.5
    # tr (A B)^(1/2) for A = a^T a and B = b^T b is the sum of the singular values of a b^T.
    shared = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    expected = np.square(mu_a - mu_b).sum() + np.square(a).sum() + np.square(b).sum() - 2 * shared
    assert found["fid"] == pytest.approx(expected, rel=1e-4)
    shown = capsys.readouterr().out
    assert f"FID {found['fid']:.3f}" in shown
    assert f"CLIP score {found['clip_score']:.3f} ± " in shown

    # What was written of the pictures can be compared with.
    kept = statistics(None, str(tmp_path / "out" / "statistics.npz"))
    np.testing.assert_allclose(kept.mu, mu_a, atol=1e-5 * np.abs(mu_a).max())
    np.testing.assert_allclose(kept.sigma, a.T @ a, atol=1e-4 * np.square(a).sum(0).max())


def test_a_model_is_measured_on_its_prompts(tiny_checkpoints, tiny_clip, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd")
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    args = ["--model", model, "--prompts", tmp_path / "prompts.txt", "--clip", tiny_clip[0]]
    args += ["--samples", 3, "--steps", 2, "--guidance", 3, "--seed", 5, "--negative-prompt", "x"]
    found = evaluate(tmp_path / "out", *args)
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    texts = ["a cat", "a dog", "a cat"]
    options = {"num_inference_steps": 2, "guidance_scale": 3, "negative_prompt": ["x"] * 2}
    pictures = [
        pipe([text, "y"], seed=[seed, 0], **options).images[0]
        for seed, text in zip((5, 6, 7), texts)
    ]
    scores = clip_scores(tiny_clip, pictures, texts)
    assert found["pictures"] == 3
    assert found["clip_score"] == pytest.approx(scores.mean(), abs=3e-3)
    assert scores.mean() > 0.1


def test_what_people_prefer_is_measured(tiny_clip, tmp_path, capsys):
    folder = write_pictures(tmp_path / "pictures", range(3))
    torch.save(torch.nn.Sequential(torch.nn.Linear(16, 1)).state_dict(), tmp_path / "a.pth")
    args = ["--images", folder, "--scores", "pickscore", "aesthetic", "--pickscore", tiny_clip[0]]
    args += ["--aesthetic", tmp_path / "a.pth", "--aesthetic-clip", tiny_clip[0]]
    found = evaluate(tmp_path / "out", *args)
    pictures = [Image.open(folder / f"{number:02}.png") for number in range(3)]
    texts = [f"{number} apples" for number in range(3)]
    scores = PickScore.from_pretrained(tiny_clip[0]).score(pictures, texts)
    assert found["pickscore"] == pytest.approx(scores.mean(), abs=1e-4)
    assert found["pickscore_error"] == pytest.approx(scores.std(ddof=1) / 3**0.5, abs=1e-4)
    beauty = Aesthetic.from_pretrained(tmp_path / "a.pth", clip=tiny_clip[0]).score(pictures)
    assert found["aesthetic"] == pytest.approx(beauty.mean(), abs=1e-4)
    assert found["pickscore_model"] == str(tiny_clip[0])
    assert f"PickScore {found['pickscore']:.4f} ± " in capsys.readouterr().out


def test_mistakes_are_one_sentence(tiny_clip, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    folder = write_pictures(tmp_path / "pictures", range(2))
    clip = ["--clip", tiny_clip[0]]
    for args, message in (
        ([], "give either --model with --prompts, or --images"),
        (["--model", "emoji", "--images", folder], "give either --model with --prompts"),
        (["--model", "emoji", *clip], "--model and --prompts go together"),
        (["--images", folder], "nothing to measure with; give --clip, --inception or both"),
        (["--images", folder, *clip, "--reference", folder], "--reference needs --inception"),
        (["--images", folder, *clip, "--samples", 3], "samples=3 is more than the 2 rows"),
        (["--images", folder, *clip, "--caption-column", "x"], "has no column 'x'"),
        (["--model", "emoji", *clip, "--prompts", prompts], "line 2: it has no prompt"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, ["evaluate", "text-to-image", "--output", tmp_path / "o", *args])))
        assert stop.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
