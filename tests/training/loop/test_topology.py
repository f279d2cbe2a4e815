import shutil

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from diffusax.cli.console import main
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs.topology import DoesNotFitError, compile_there, topology_mesh
from diffusax.training import (
    AutoencoderConfig,
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    EditDataConfig,
    EMAConfig,
    ImageDataConfig,
    InstructPix2PixConfig,
    LoRAConfig,
    TextToImageConfig,
    autoencoder,
    cache_latents,
    instruct_pix2pix,
    text_to_image,
)
from diffusax.training.data.batches import Batches
from diffusax.training.loop.program import abstract_arguments

SIZE = {"resolution": 32}


def shapes(tree):
    return jax.tree.map(lambda x: (np.shape(x), x.dtype.name), tree)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory, checkpoint, pictures):
    """A cache of latents and of text embeddings."""
    folder = tmp_path_factory.mktemp("cache") / "latents"
    data = CacheDataConfig(str(pictures), **SIZE)
    cache_latents(
        CacheConfig(model=str(checkpoint), output=str(folder), data=data, text_embeddings=True)
    )
    return folder


@pytest.mark.parametrize("name", ["captions", "text encoder", "edits", "cached", "decoder", "lora"])
def test_shapes_are_known_without_the_parameters(name, checkpoint, pictures, edits, embedded):
    captions = CaptionedDataConfig(str(pictures), **SIZE)
    recipe, config = {
        "captions": (text_to_image, TextToImageConfig(model=str(checkpoint), data=captions)),
        "text encoder": (
            text_to_image,
            TextToImageConfig(model=str(checkpoint), data=captions, train_text_encoder=True),
        ),
        "lora": (
            text_to_image,
            TextToImageConfig(
                model=str(checkpoint), data=captions, lora=LoRAConfig(rank=2, dora=True)
            ),
        ),
        "edits": (
            instruct_pix2pix,
            InstructPix2PixConfig(
                model=str(checkpoint),
                data=EditDataConfig(str(edits), **SIZE),
                ema=EMAConfig(rule="ramp", start=0.5),
            ),
        ),
        "cached": (
            text_to_image,
            TextToImageConfig(model=str(checkpoint), data=CaptionedDataConfig(str(embedded))),
        ),
        "decoder": (
            autoencoder,
            AutoencoderConfig(
                model=str(checkpoint),
                decoder_only=True,
                data=ImageDataConfig(str(pictures), **SIZE),
            ),
        ),
    }[name]
    recipe = recipe(config)
    mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
    state, frozen, batch = abstract_arguments(recipe, config, mesh)
    assert shapes(frozen) == shapes(recipe.frozen())
    assert shapes(state.params) == shapes(recipe.trained())
    assert (state.ema is not None) == (name == "edits")
    batches = Batches(recipe.source, recipe.example, batch_size=config.batch_size, seed=0)
    assert shapes(batch) == shapes(next(batches))
    batches.close()


@pytest.fixture(scope="module")
def configs_alone(checkpoint, tmp_path_factory):
    """The checkpoint without its weights."""
    folder = tmp_path_factory.mktemp("configs") / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_steps_with_a_cache_are_compiled_without_weights(configs_alone, embedded):
    model, data = str(configs_alone), CaptionedDataConfig(str(embedded))
    config = TextToImageConfig(model=model, data=data)
    with pytest.raises(ValueError, match="vae has no safetensors file"):
        text_to_image(config)
    recipe = text_to_image(config, compile_only=True)
    mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
    _, frozen, batch = abstract_arguments(recipe, config, mesh)
    assert set(frozen) == {"empty"}
    assert {"moments", "encoder_hidden_states"} <= set(batch)


@pytest.mark.slow
def test_dreambooth_with_caches_is_compiled_without_weights(
    configs_alone, embedded, tmp_path, capsys
):
    pytest.importorskip("libtpu")
    options = ["--model", str(configs_alone), "--instance-data", str(embedded)]
    options += ["--instance-prompt", "a sks dog", "--class-prompt", "a dog"]
    options += ["--class-data", str(embedded), "--output", str(tmp_path / "out")]
    options += ["--lora.rank", "2", "--batch-size", "1", "--topology", "v5e:1"]
    main(["train", "dreambooth", *options])
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.startswith("1 of TPU v5 lite")
    assert line.startswith("training step, 1 examples")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_step_is_compiled_for_tpus_that_are_not_here(checkpoint, edits, tmp_path, capsys):
    pytest.importorskip("libtpu")
    options = ["--model", str(checkpoint), "--data.path", str(edits), "--data.resolution", "32"]
    options += ["--output", str(tmp_path / "out"), "--batch-size", "8", "--ema.rule", "ramp"]
    options += ["--mesh", "data=2,fsdp=2", "--topology", "v5e:2x2"]
    main(["train", "instruct-pix2pix", *options])
    head, _, line = capsys.readouterr().out.splitlines()
    assert head.startswith("4 of TPU v5 lite")
    assert line.startswith("training step, 8 examples")
    *numbers, fits = line.split()[4:]
    assert fits == "yes"
    assert len(numbers) == 5
    assert float(numbers[-1]) > 0
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_an_error_with_the_size():
    pytest.importorskip("libtpu")
    mesh = topology_mesh("v5e:2x2", "data=1")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((70_000, 70_000), np.float32, sharding=place)
    lowered = jax.jit(lambda x: x + 1).trace(x).lower(lowering_platforms=("tpu",))
    with pytest.raises(DoesNotFitError, match=r"36\.\d+G.*15\.75G"):
        compile_there(lowered)


def test_a_chip_of_v4_is_one_device():
    pytest.importorskip("libtpu")
    assert topology_mesh("v4:2x2x4").size == 16
    # The chips of TPU7x are two devices each, and four of them are a host's.
    assert topology_mesh("tpu7x:2x2x1").local_mesh.size == 8


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_one_chip_is_a_topology_of_its_own(chip):
    pytest.importorskip("libtpu")
    mesh = topology_mesh(f"{chip}:1", "data=-1")
    assert mesh.size == 1
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=place)
    lowered = jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=("tpu",))
    assert "HloModule" in compile_there(lowered).as_text()
    with pytest.raises(ValueError, match="does not fit 1 devices"):
        topology_mesh(f"{chip}:1", "fsdp=4")


def test_a_program_for_devices_elsewhere_is_not_cached(tmp_path):
    pytest.importorskip("libtpu")
    mesh = topology_mesh("v5e:2x2", "data=1")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=place)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        lowered = jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=("tpu",))
        compile_there(lowered)
        assert not list(tmp_path.iterdir())
        compile_there(lowered, effort=None)
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
