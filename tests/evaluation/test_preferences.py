"""Scores of preference against PyTorch's networks on the same weights and images."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from support.data_sets import picture
from support.evaluation_rows import VISION, build_dino
from support.open_clip_model import OpenCLIP
from support.tiny import TEXT, randomize
from transformers import CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from diffusax.evaluation import DINO, Aesthetic, HPSv2, PickScore

TEXTS = ["a cat", "two dogs on a bicycle", ""]
PICTURES = [picture(seed, (40 + 9 * seed, 45)) for seed in range(3)]


def tokens(folder):
    return CLIPTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")


@torch.no_grad()
@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_pickscore_is_that_of_its_model_card(tiny_clip, tmp_path, own_tokenizer):
    folder, model = tiny_clip
    checkpoint = tmp_path / "pickscore"
    shutil.copytree(folder, checkpoint)
    if not own_tokenizer:
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / "tokenizer.json").unlink(missing_ok=True)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(PICTURES, return_tensors="pt")
    images = model.get_image_features(**pixels).pooler_output
    texts = model.get_text_features(**tokens(folder)).pooler_output
    images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
    expected = (model.logit_scale.exp() * (images * texts).sum(-1)).numpy()
    scorer = PickScore.from_pretrained(checkpoint, processor=folder, batch_size=2)
    np.testing.assert_allclose(scorer.score(PICTURES, TEXTS), expected, atol=1e-4)
    assert np.ptp(expected) > 0.1


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory):
    """A folder with a tiny CLIP's config and tokenizer, and OpenCLIP's model of that config."""
    folder = tmp_path_factory.mktemp("clip_h")
    config = transformers.CLIPConfig(
        text_config={**TEXT, "hidden_act": "gelu"},
        vision_config={**VISION, "hidden_act": "gelu"},
        projection_dim=16,
    )
    from support.clip_vocabulary import write_clip_vocabulary

    write_clip_vocabulary(folder)
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": ["CLIPModel"]})
    )
    return folder, randomize(OpenCLIP(config), 3)


def whole_pixels(image, side=30):
    """The image in the middle of a black square, normalised as CLIP's are."""
    scale = side / max(image.size)
    size = [round(length * scale) for length in image.size]
    square = Image.new("RGB", (side, side))
    corner = tuple((side - length) // 2 for length in size)
    square.paste(image.resize(size, Image.Resampling.BICUBIC), corner)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    return (torch.tensor(np.asarray(square)).permute(2, 0, 1) / 255 - mean) / std


@torch.no_grad()
def test_hpsv2_is_that_of_openclip(open_clip, tmp_path):
    folder, model = open_clip
    file = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 1, "name": "x", "state_dict": model.state_dict()}, file)
    images = model.encode_image(torch.stack([whole_pixels(image) for image in PICTURES]))
    expected = (images * model.encode_text(tokens(folder).input_ids)).sum(-1).numpy()
    for source in (tmp_path, file):
        scorer = HPSv2.from_pretrained(source, processor=folder, batch_size=2)
        np.testing.assert_allclose(scorer.score(PICTURES, TEXTS), expected, atol=1e-4)
    assert np.ptp(expected) > 0.01


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_aesthetic_score_is_that_of_its_layers(tiny_clip, tmp_path, kind):
    folder, clip = tiny_clip
    torch.manual_seed(0)
    widths = (16, 32, 24, 8, 4, 1)
    layers = [torch.nn.Linear(c, d) for c, d in itertools.pairwise(widths)]
    dropouts = [torch.nn.Dropout(p) for p in (0.2, 0.2, 0.1)]
    mlp = torch.nn.Module()
    mlp.layers = torch.nn.Sequential(
        *[layer for pair in zip(layers, dropouts) for layer in pair], *layers[3:]
    )
    mlp.eval()
    file = tmp_path / f"predictor.{kind}"
    (torch.save if kind == "pth" else save_file)(mlp.state_dict(), file)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(PICTURES, return_tensors="pt")
    x = clip.get_image_features(**pixels).pooler_output
    expected = mlp.layers(x / x.norm(dim=-1, keepdim=True))[:, 0].numpy()
    scorer = Aesthetic.from_pretrained(file, clip=folder, batch_size=2)
    np.testing.assert_allclose(scorer.score(PICTURES), expected, atol=1e-4)
    assert np.ptp(expected) > 1e-3
    again = Aesthetic.from_pretrained(tmp_path, weight_name=file.name, clip=scorer.clip)
    np.testing.assert_array_equal(again.score(PICTURES), scorer.score(PICTURES))


def test_mistakes_are_one_sentence(tiny_clip, open_clip, tmp_path):
    folder, _ = tiny_clip
    with pytest.raises(ValueError, match=r"has no file HPS_v2\.1_compressed\.pt"):
        HPSv2.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file .*nothing\.pt"):
        HPSv2.from_pretrained(tmp_path / "nothing.pt")
    state = open_clip[1].state_dict()
    del state["visual.proj"]
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ValueError, match=r"1 missing: visual_projection\.weight"):
        HPSv2.from_pretrained(tmp_path / "part.pt", processor=open_clip[0])
    torch.save({"layers.0.weight": torch.zeros(2, 16)}, tmp_path / "half.pth")
    with pytest.raises(ValueError, match="no weight and bias of one width for layer 0"):
        Aesthetic.from_pretrained(tmp_path / "half.pth", clip=folder)
    torch.save(torch.nn.Sequential(torch.nn.Linear(16, 2)).state_dict(), tmp_path / "two.pth")
    with pytest.raises(ValueError, match="must lead from the 16 features of the CLIP to one score"):
        Aesthetic.from_pretrained(tmp_path / "two.pth", clip=folder)


def files_of(folder, *, tokenizer=True):
    names = ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json")
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if tokenizer or file.name not in names
    }


def test_the_usual_checkpoints_come_from_the_hub(hub, tiny_clip, open_clip, tmp_path):
    folder, _ = tiny_clip
    torch.save({"state_dict": open_clip[1].state_dict()}, tmp_path / "hps.pt")
    torch.save(torch.nn.Sequential(torch.nn.Linear(16, 1)).state_dict(), tmp_path / "a.pth")
    hps, layers = ((tmp_path / name).read_bytes() for name in ("hps.pt", "a.pth"))
    build_dino(tmp_path / "dino")
    state = hub(
        {
            "models/yuvalkirstain/PickScore_v1": files_of(folder, tokenizer=False),
            "models/laion/CLIP-ViT-H-14-laion2B-s32B-b79K": {
                **files_of(open_clip[0]),
                "model.safetensors": b"large",
            },
            "models/xswu/HPSv2": {"HPS_v2.1_compressed.pt": hps, "HPS_v2_compressed.pt": b"old"},
            "models/openai/clip-vit-large-patch14": files_of(folder),
            "models/trl-lib/ddpo-aesthetic-predictor": {"aesthetic-model.pth": layers},
            "models/facebook/dinov2-base": files_of(tmp_path / "dino"),
        }
    )
    own = {"cache_dir": tmp_path / "cache"}
    for scorer in (PickScore.from_pretrained(**own), HPSv2.from_pretrained(**own)):
        assert scorer.score(PICTURES, TEXTS).shape == (3,)
    assert Aesthetic.from_pretrained(**own).score(PICTURES).shape == (3,)
    assert DINO.from_pretrained(**own).images(PICTURES).shape == (3, 24)
    # Of the CLIP whose config and tokenizer are read, no weights are fetched.
    assert state.requested.count("model.safetensors") == 3
    assert "HPS_v2_compressed.pt" not in state.requested
