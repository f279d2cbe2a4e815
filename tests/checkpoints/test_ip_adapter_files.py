"""Files of IP-Adapters: what is read, and one clear sentence for what is broken."""

import random
import re
import struct

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.effort import examples
from support.ip_adapters import KINDS, random_tensors, tensors_of

import diffusax
from diffusax.checkpoints.ip_adapter import find_ip_adapter, read_ip_adapter


@pytest.fixture(scope="module")
def unet(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.pipeline("sd")
    ours = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    return theirs.unet, ours.network


def read(source, unet):
    return read_ip_adapter(source, unet[1], np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_dictionaries_are_the_same(unet, tmp_path, kind):
    tensors = tensors_of(unet[0], kind)
    save_file(tensors, tmp_path / "a.safetensors")
    nested = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        nested[part][rest] = tensor
    found = [read(source, unet) for source in (tmp_path / "a.safetensors", tensors, nested)]
    path = "mid_block.attentions.0.transformer_blocks.0.attn2"
    for one in found[1:]:
        assert one.projection == found[0].projection
        np.testing.assert_array_equal(one.layers[path].to_k, found[0].layers[path].to_k)


def test_a_resampler_under_diffusers_names_is_the_same(unet):
    theirs = {"0.to_": "attn.to_", "0.norm1.": "ln0.", "0.norm2.": "ln1.", "1.0.": "ff.0."}
    theirs |= {"1.1.": "ff.1.net.0.proj.", "1.3.": "ff.1.net.2."}
    given, renamed = tensors_of(unet[0], "plus"), {}
    for name, tensor in given.items():
        layer = re.match(r"image_proj\.layers\.\d+\.", name)
        start, rest = name[: layer.end()] if layer else "", name[layer.end() if layer else 0 :]
        for old, new in theirs.items() if layer else ():
            rest = new + rest.removeprefix(old) if rest.startswith(old) else rest
        renamed[start + rest] = tensor
    assert "image_proj.layers.1.attn.to_kv.weight" in renamed
    found, expected = read(renamed, unet), read(given, unet)
    assert found.projection == expected.projection
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_pickles_and_other_kinds_are_refused(unet, tmp_path):
    path = tmp_path / "ip-adapter_sd15.bin"
    torch.save({}, path)
    with pytest.raises(ValueError, match=r"not a safetensors file.*convert it where PyTorch is"):
        find_ip_adapter(path, None, None)
    with pytest.raises(ValueError, match="not a safetensors file"):
        find_ip_adapter(tmp_path, "", "ip-adapter_sd15.bin")
    with pytest.raises(ValueError, match=r"there is no file .*other.safetensors"):
        find_ip_adapter(tmp_path, "", "other.safetensors")
    with pytest.raises(ValueError, match="weight_name must name"):
        find_ip_adapter(tmp_path, "", None)
    with pytest.raises(ValueError, match="must be inside"):
        find_ip_adapter(tmp_path, "..", "a.safetensors")
    face = {
        "image_proj.proj.0.weight": (64, 32),
        "image_proj.proj.2.weight": (128, 64),
        "image_proj.norm.weight": (32,),
        "ip_adapter.1.to_k_ip.weight": (32, 32),
    }
    with pytest.raises(ValueError, match="FaceID adapter, which diffusax does not support"):
        read(random_tensors(face, 0), unet)
    with pytest.raises(ValueError, match="must be a file, a folder"):
        find_ip_adapter(3, None, None)


def test_an_ip_adapter_for_another_family_says_so(unet, tiny_checkpoints, tmp_path):
    other = tiny_checkpoints.pipeline("xl")[1].unet
    save_file(tensors_of(other, "plain"), tmp_path / "xl.safetensors")
    with pytest.raises(ValueError, match=r"xl.safetensors makes tokens of width 56, but this UNet"):
        read(tmp_path / "xl.safetensors", unet)


@pytest.mark.slow
def test_a_pipeline_whose_call_takes_no_images_refuses_them(tiny_checkpoints, tmp_path):
    folder, theirs = tiny_checkpoints.pipeline("xl-instruct")
    save_file(tensors_of(theirs.unet, "plain"), tmp_path / "xl.safetensors")
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    with pytest.raises(ValueError, match="takes no IP-Adapters"):
        ours.load_ip_adapter(tmp_path / "xl.safetensors")


def damage(rng, path, tensors):
    """Damages a file of an IP-Adapter, and returns what was done."""
    name, what = rng.choice(sorted(tensors)), rng.choice(DAMAGES)
    value = tensors[name]
    match what:
        case "missing":
            del tensors[name]
        case "extra":
            tensors[rng.choice(["image_proj.", "ip_adapter.", "ip_adapter.99."]) + "x"] = value
        case "renamed":
            tensors[name + rng.choice([".x", "0", "."])] = tensors.pop(name)
        case "shape":
            wrong = rng.choice(
                [(0,), (3,), (1, 1), (2, 3, 4), (), (7, 0), tuple(value.shape)[::-1]]
            )
            tensors[name] = torch.zeros((*wrong, 2)[rng.randrange(2) :])
        case "dtype":
            tensors[name] = value.to(rng.choice([torch.int64, torch.bool, torch.uint8]))
        case "nan":
            value.view(-1)[rng.randrange(value.numel())] = rng.choice([np.nan, np.inf, -np.inf])
        case "layers":
            tensors[f"image_proj.layers.{rng.choice(['x', 10**9, -1, 4])}.0.to_q.weight"] = value
    save_file({k: v.clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}, path)
    size = path.stat().st_size
    match what:
        case "cut":
            data = path.read_bytes()[: rng.choice([0, 1, 7, 8, 9, size // 2, size - 1])]
            path.write_bytes(data)
        case "no file of this kind":
            path.write_bytes(rng.randbytes(rng.choice([3, 8, 100, 5000])))
        case "huge header":
            data = path.read_bytes()
            length = rng.choice([2**63, 2**40, 2**32, size, 10**9])
            path.write_bytes(struct.pack("<Q", length) + data[8:])
        case "bytes":
            data = bytearray(path.read_bytes())
            for _ in range(3):
                data[rng.randrange(3000)] = rng.randrange(256)
            path.write_bytes(data)
    return f"{what} {name}"


DAMAGES = ("missing", "extra", "renamed", "shape", "dtype", "nan", "layers", "cut",
           "no file of this kind", "huge header", "bytes")  # fmt: skip


def test_a_broken_file_is_one_clear_sentence(unet, tmp_path):
    whole = {kind: tensors_of(unet[0], kind) for kind in KINDS}
    rng, refused, unclear = random.Random(0), 0, []
    for case in range(examples(100, 400)):
        path = tmp_path / f"{case}.safetensors"
        done = damage(rng, path, {k: v.clone() for k, v in whole[KINDS[case % 3]].items()})
        try:
            read(path, unet)
            # Some bytes are weights, and some are of the header's spaces.
            clear = done.startswith("bytes")
        except ValueError as error:
            refused += 1
            clear = str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 2500
        except Exception as error:
            clear, done = False, f"{done}: {error!r}"
        if not clear:
            unclear.append(done)
        path.unlink()
    assert not unclear
    assert refused > 80


def test_nothing_is_changed_by_a_file_that_cannot_be_read(unet, tiny_checkpoints, tmp_path):
    pipe = diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    save_file(tensors_of(unet[0], "plain"), tmp_path / "good.safetensors")
    broken = load_file(tmp_path / "good.safetensors")
    del broken["ip_adapter.1.to_k_ip.weight"]
    save_file(broken, tmp_path / "broken.safetensors")
    files = [tmp_path / "good.safetensors", tmp_path / "broken.safetensors"]
    with pytest.raises(ValueError, match=r"1 missing: ip_adapter.1.to_k_ip.weight"):
        pipe.load_ip_adapter(files, image_encoder_folder=None)
    assert not len(pipe.parts.ip_adapters)
    assert pipe.feature_extractor is None
    with pytest.raises(TypeError, match="no argument 'wieght_name'"):
        pipe.load_ip_adapter(files[0], wieght_name="x")
    with pytest.raises(ValueError, match="lists of one length"):
        pipe.load_ip_adapter(files, weight_name=["a", "b", "c"])
