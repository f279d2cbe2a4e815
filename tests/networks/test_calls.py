"""Models called as diffusers' and transformers' objects are, beside those, all weights random."""

import inspect
import re

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from support.effort import first
from support.tiny import ASYMMETRIC, TEXT, VAE, randomize
from support.tiny_unconditional import UNET

import diffusax
from diffusax.evaluation.inception import InceptionConfig, InceptionV3
from diffusax.models.network import Network
from diffusax.networks import Model
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.random.torch_random import TorchGenerator

# Float32 sums in another order.
TOLERANCE = 2e-5


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(actual, expected, tolerance=TOLERANCE):
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    assert expected.std() > 0
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


def tensors(tree):
    return jax.tree.map(torch.tensor, tree)


@pytest.fixture(scope="module")
def sd(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.pipeline("sd")
    return theirs, diffusax.StableDiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def control(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.controlnet("sd")
    return theirs, diffusax.ControlNetModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def given():
    """Latents, timesteps, context and a control image."""
    picture = np.abs(normal(2, 3, 32, 32, seed=2)).clip(0, 1)
    return normal(2, 4, 8, 8), np.array([37, 500]), normal(2, 7, 32, seed=1), picture


CALLS = [
    *((name, "__call__") for name in ("UNet2DConditionModel", "UNet2DModel")),
    *((name, "__call__") for name in ("ControlNetModel", "T2IAdapter")),
    *(
        (name, method)
        for name in ("AutoencoderKL", "AsymmetricAutoencoderKL", "AutoencoderTiny")
        for method in ("encode", "decode", "__call__")
    ),
]


@pytest.mark.parametrize(("name", "own"), CALLS)
def test_arguments_their_order_and_defaults_are_diffusers(name, own):
    cls, method = getattr(diffusers, name), "forward" if own == "__call__" else own
    ours = inspect.signature(getattr(getattr(diffusax, name), own)).parameters
    theirs = inspect.signature(inspect.unwrap(getattr(cls, method))).parameters
    keywords = [n for n, p in ours.items() if p.kind is p.KEYWORD_ONLY]
    assert keywords == (["hooks"] if name.startswith("UNet") else [])
    described = [[(p.name, p.default) for p in found.values()] for found in (ours, theirs)]
    assert described[0][: len(described[1])] == described[1]
    assert len(described[0]) == len(described[1]) + len(keywords)


@torch.no_grad()
def test_a_unet_and_a_controlnet_are_called_as_in_diffusers(sd, control, given):
    x, t, context, picture = given
    theirs, ours = sd
    expected = control[0](*tensors((x, t, context, picture)), conditioning_scale=0.7)
    actual = control[1](x, t, context, controlnet_cond=picture, conditioning_scale=0.7)
    close(actual.mid_block_res_sample, expected.mid_block_res_sample)
    for ours_down, theirs_down in zip(*(o.down_block_res_samples for o in (actual, expected))):
        close(ours_down, theirs_down)
    down, mid = control[1](x, t, context, picture, 0.7, return_dict=False)
    np.testing.assert_array_equal(mid, actual[1])

    residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    actual = ours.unet(x, t, encoder_hidden_states=context, **residuals)
    expected = theirs.unet(*tensors((x, t, context)), **tensors(jax.tree.map(np.array, residuals)))
    assert isinstance(actual.sample, jax.Array)
    close(actual.sample, expected.sample)
    assert actual[0] is actual.sample
    (plain,) = ours.unet(x, 37, context, return_dict=False)
    close(plain, theirs.unet(*tensors((x, 37, context))).sample)
    assert np.abs(plain - actual.sample).max() > 0.1


@torch.no_grad()
@pytest.mark.slow
def test_guess_mode_equals_diffusers(control, given):
    x, t, context, picture = given
    expected = control[0](*tensors((x, t, context, picture)), guess_mode=True, return_dict=False)
    actual = control[1](x, t, context, picture, guess_mode=True, return_dict=False)
    for ours, theirs in zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True):
        close(ours, theirs)


@torch.no_grad()
@pytest.mark.slow
def test_a_unet_of_sdxl(tiny_checkpoints):
    folder, theirs = tiny_checkpoints.pipeline("xl")
    unet = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    x, context = normal(2, 4, 8, 8), normal(2, 7, 56)
    added = {"text_embeds": normal(2, 16), "time_ids": 100 * np.abs(normal(2, 6, seed=2))}
    expected = theirs.unet(*tensors((x, 5, context)), added_cond_kwargs=tensors(added)).sample
    close(unet(x, 5, context, added_cond_kwargs=added).sample, expected)
    with pytest.raises(ValueError, match="added_cond_kwargs must have time_ids for this network"):
        unet(x, 5, context, added_cond_kwargs={"text_embeds": added["text_embeds"]})


@torch.no_grad()
@pytest.mark.parametrize("classes", first([None, 7]))
def test_a_unet_without_a_context(tmp_path, classes):
    theirs = diffusers.UNet2DModel(**UNET, num_class_embeds=classes)
    randomize(theirs).save_pretrained(tmp_path)
    ours = diffusax.UNet2DModel.from_pretrained(tmp_path)
    x, t = normal(2, 3, 16, 16), np.array([37, 500])
    labels = {} if classes is None else {"class_labels": np.array([1, 5])}
    expected = theirs(*tensors((x, t)), **tensors(labels)).sample
    close(ours(x, t, **labels).sample, expected)
    (found,) = ours(torch.tensor(x), t[1], **labels, return_dict=False)
    assert isinstance(found, torch.Tensor)
    close(found[1], expected[1])
    with pytest.raises(ValueError, match=r"channels come second here: sample\.transpose"):
        ours(np.moveaxis(x, 1, -1), 5)


@torch.no_grad()
def test_a_t2i_adapter_is_called_as_in_diffusers(tiny_checkpoints, sd, given):
    folder, theirs = tiny_checkpoints.t2i_adapter("sd")
    ours = diffusax.T2IAdapter.from_pretrained(folder)
    x, t, context, picture = given
    maps, expected = ours(picture), theirs(torch.tensor(picture))
    for own, other in zip(maps, expected, strict=True):
        close(own, other)
    steered = sd[1].unet(x, t, context, down_intrablock_additional_residuals=maps).sample
    options = {"down_intrablock_additional_residuals": expected}
    close(steered, sd[0].unet(*tensors((x, t, context)), **options).sample)


@torch.no_grad()
def test_an_autoencoder_is_called_as_in_diffusers(sd):
    theirs, ours = sd[0].vae, sd[1].vae
    x, z = normal(2, 3, 32, 32).clip(-1, 1), normal(2, 4, 8, 8)
    expected, actual = theirs.encode(torch.tensor(x)).latent_dist, ours.encode(x).latent_dist
    for name in ("mean", "std", "var", "logvar"):
        close(getattr(actual, name), getattr(expected, name))
    close(actual.mode(), expected.mode())
    close(actual.kl(), expected.kl())
    close(actual.nll(z), expected.nll(torch.tensor(z)))
    close(ours.encode(x, return_dict=False)[0].mean, expected.mean)
    for output in (ours.decode(z).sample, ours.decode(z)["sample"], ours.decode(z, False)[0]):
        close(output, theirs.decode(torch.tensor(z)).sample)
    close(ours(x).sample, theirs(torch.tensor(x)).sample)


@torch.no_grad()
@pytest.mark.parametrize(
    ("generator", "reference"),
    [
        (lambda: 5, lambda: torch.Generator().manual_seed(5)),
        (lambda: torch.Generator().manual_seed(5), lambda: torch.Generator().manual_seed(5)),
        (lambda: [5, 6], lambda: [torch.Generator().manual_seed(s) for s in (5, 6)]),
        (lambda: TorchGenerator(5), lambda: torch.Generator().manual_seed(5)),
    ],
    ids=["seed", "generator", "list", "ours"],
)
def test_latents_are_sampled_with_pytorchs_numbers(sd, generator, reference):
    x = normal(2, 3, 32, 32).clip(-1, 1)
    ours, theirs = generator(), reference()
    expected = sd[0].vae.encode(torch.tensor(x)).latent_dist
    actual = sd[1].vae.encode(x).latent_dist
    close(actual.sample(ours), expected.sample(theirs))
    if hasattr(ours, "randn") or hasattr(ours, "initial_seed"):
        # A generator goes on where it stopped.
        close(actual.sample(generator=ours), expected.sample(theirs))


def test_latents_are_sampled_with_a_random_key_too(sd):
    found = sd[1].vae.encode(normal(2, 3, 32, 32).clip(-1, 1)).latent_dist
    key = jax.random.key(3)
    noise = jax.random.normal(key, found.mean.shape)
    np.testing.assert_allclose(found.sample(key), found.mean + found.std * noise, atol=1e-6)
    assert np.abs(found.sample() - found.sample()).max() > 0.01
    with pytest.raises(ValueError, match=r"generator must be a seed, .* \(got str\)"):
        found.sample("5")
    with pytest.raises(ValueError, match="generator has 3 entries for 2 images; give one or 2"):
        found.sample([1, 2, 3])


@torch.no_grad()
@pytest.mark.slow
def test_tiles_equal_diffusers(sd):
    """diffusers rounds tiles otherwise where a quarter of one is not whole; here it is."""
    theirs, ours = sd[0].vae, sd[1].vae
    z = normal(1, 4, 24, 20)
    whole = np.asarray(ours.decode(z).sample)
    theirs.enable_tiling()
    ours.enable_tiling()
    try:
        actual, expected = ours.decode(z).sample, theirs.decode(torch.tensor(z)).sample
    finally:
        theirs.disable_tiling()
        ours.disable_tiling()
    close(actual, expected)
    assert np.abs(actual - whole).max() > 1e-3


@torch.no_grad()
@pytest.mark.slow
def test_the_other_autoencoders_are_called_as_in_diffusers(tmp_path):
    x, z = normal(1, 3, 32, 32).clip(-1, 1), normal(1, 4, 8, 8)
    mask = (normal(1, 1, 32, 32) > 0).astype(np.float32)
    theirs = randomize(diffusers.AsymmetricAutoencoderKL(**ASYMMETRIC))
    theirs.save_pretrained(tmp_path / "asymmetric")
    ours = diffusax.AsymmetricAutoencoderKL.from_pretrained(tmp_path / "asymmetric")
    expected = theirs.decode(torch.tensor(z), None, *tensors((x, mask))).sample
    close(ours.decode(z, None, x, mask).sample, expected)
    close(ours.decode(z).sample, theirs.decode(torch.tensor(z)).sample)
    close(ours(x, mask).sample, theirs(*tensors((x, mask))).sample)
    close(ours.encode(x).latent_dist.mean, theirs.encode(torch.tensor(x)).latent_dist.mean)

    theirs = randomize(diffusers.AutoencoderTiny())
    theirs.save_pretrained(tmp_path / "tiny")
    ours = diffusax.AutoencoderTiny.from_pretrained(tmp_path / "tiny")
    close(ours.encode(x).latents, theirs.encode(torch.tensor(x)).latents)
    close(ours.decode(z).sample, theirs.decode(torch.tensor(z)).sample)


IDS = np.array([[98, 5, 6, 99, 99], [98, 7, 99, 99, 99]])


@torch.no_grad()
@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPTextModelWithProjection"])
def test_text_encoders_are_called_as_in_transformers(tmp_path, name):
    config = transformers.CLIPTextConfig(**{**TEXT, "vocab_size": 100, "eos_token_id": 99})
    theirs = randomize(getattr(transformers, name)(config))
    theirs.save_pretrained(tmp_path)
    ours = getattr(diffusax, name).from_pretrained(tmp_path)
    expected = theirs(torch.tensor(IDS), output_hidden_states=True)
    actual = ours(IDS, output_hidden_states=True)
    assert list(actual) == list(expected)
    for own, other in zip(actual.to_tuple(), expected.to_tuple(), strict=True):
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (own, other))):
            close(a, b)
    plain = ours(jnp.asarray(IDS), attention_mask=np.ones_like(IDS))
    assert plain.hidden_states is None
    close(plain[0], expected[0])
    close(ours(IDS, return_dict=False)[1], expected[1])
    with pytest.raises(ValueError, match="attention_mask must be None or ones"):
        ours(IDS, attention_mask=np.array([[1, 1, 1, 1, 0]] * 2))
    with pytest.raises(ValueError, match="the token 100, but the text encoder's vocab_size is 100"):
        ours(jnp.asarray(IDS + 1))


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}


@torch.no_grad()
@pytest.mark.parametrize("name", first(["CLIPVisionModelWithProjection", "CLIPVisionModel"]))
def test_image_encoders_are_called_as_in_transformers(tmp_path, name):
    theirs = randomize(getattr(transformers, name)(transformers.CLIPVisionConfig(**VISION)))
    theirs.save_pretrained(tmp_path)
    ours, x = getattr(diffusax, name).from_pretrained(tmp_path), normal(2, 3, 32, 32)
    expected = theirs(torch.tensor(x), output_hidden_states=True)
    actual = ours(x, output_hidden_states=True)
    assert list(actual) == list(expected)
    close(actual[0], expected[0])
    close(actual.last_hidden_state, expected.last_hidden_state)
    close(actual.hidden_states[-2], expected.hidden_states[-2])
    with pytest.raises(ValueError, match=r"pixel_values must have 32x32 .* \(got 16x16\)"):
        ours(x[..., ::2, ::2])


@torch.no_grad()
@pytest.mark.slow
def test_both_encoders_of_clip_are_called_as_in_transformers(tmp_path):
    text = {**TEXT, "vocab_size": 100, "eos_token_id": 99}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    theirs = randomize(transformers.CLIPModel(config))
    theirs.save_pretrained(tmp_path)
    ours, x = diffusax.CLIPModel.from_pretrained(tmp_path), normal(3, 3, 32, 32)
    expected, actual = theirs(torch.tensor(IDS), torch.tensor(x)), ours(IDS, x)
    for name in ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"):
        close(actual[name], expected[name])


@torch.no_grad()
def test_tensors_go_in_and_come_out(sd, given):
    """A program that holds PyTorch's tensors goes on with tensors."""
    theirs, ours = sd
    x, t, context, _ = tensors(given)
    sample = ours.unet(x, t[0], encoder_hidden_states=context).sample
    assert isinstance(sample, torch.Tensor)
    close(sample.numpy(), theirs.unet(x, t[0], context).sample)
    assert ours.unet(x, t[0], context.bfloat16()).sample.dtype == torch.float32
    image = given[3] * 2 - 1
    torch.manual_seed(8)
    expected = theirs.vae.encode(torch.tensor(image)).latent_dist.sample()
    torch.manual_seed(8)
    found = ours.vae.encode(torch.tensor(image)).latent_dist
    close(found.sample().numpy(), expected)
    assert all(isinstance(y, torch.Tensor) for y in (found.mean, found.std, found.kl()))
    ids = torch.tensor([[49406, 320, 49407]])
    assert isinstance(ours.text_encoder(ids)[0], torch.Tensor)
    assert isinstance(ours.vae.decode(x).sample, torch.Tensor)


CHANNELS_SECOND = r"; channels come second here: {}\.transpose\(0, 3, 1, 2\)$"


def last(x):
    return x.transpose(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p, c, x, t, s, i: p.unet(last(x[:, :, :6]), t, s),
            "sample must have shape .*" + CHANNELS_SECOND,
        ),
        (
            lambda p, c, x, t, s, i: p.unet(x[0], t, s),
            r"sample must have shape \(batch, 4, height, width\) .got float32 of shape .4, 8, 8..$",
        ),
        (lambda p, c, x, t, s, i: p.unet(x, t, s[:1]), "encoder_hidden_states must have one entry"),
        (lambda p, c, x, t, s, i: p.unet(x, [1, 2, 3], s), "timestep must be one number or one"),
        (
            lambda p, c, x, t, s, i: p.unet(x, t, s, attention_mask=np.ones(3)),
            "attention_mask must be None: Stable Diffusion's networks attend to all tokens$",
        ),
        (
            lambda p, c, x, t, s, i: p.unet(x, t, s, cross_attention_kwargs={"scale": 0.5}),
            "cross_attention_kwargs must be None or .. here .got scale.; LoRAs",
        ),
        (
            lambda p, c, x, t, s, i: p.unet(x, t, s, down_block_additional_residuals=[x]),
            "down_block_additional_residuals must have 4 entries, .* .got 1.$",
        ),
        (
            lambda p, c, x, t, s, i: p.unet(x, t, s, down_block_additional_residuals=[x] * 4),
            r"down_block_additional_residuals\[0\] must have shape \(batch, 32, height, width\)",
        ),
        (
            lambda p, c, x, t, s, i: c(x, t, s, last(i)),
            "controlnet_cond must have shape .*" + CHANNELS_SECOND,
        ),
        (
            lambda p, c, x, t, s, i: c(x, t, s, i[..., :16, :16]),
            "controlnet_cond must have 4 pixels for each latent",
        ),
        (lambda p, c, x, t, s, i: p.vae.encode(last(i)), "x must have .*" + CHANNELS_SECOND),
        (lambda p, c, x, t, s, i: p.vae.decode(last(x[:, :, :6])), "z must .*" + CHANNELS_SECOND),
        (lambda p, c, x, t, s, i: p.text_encoder(s), "input_ids must be integers of shape"),
    ],
)
def test_a_wrong_input_is_one_sentence(sd, control, given, call, message):
    with pytest.raises(ValueError, match="must") as caught:
        call(sd[1], control[1], *given)
    assert re.match(message.replace("{}", message.split()[0]), str(caught.value))


def test_a_loop_compiles_once(sd, given):
    unet, (x, _, context, _) = sd[1].unet, given
    unet(x, 0, context)
    with count_compilations() as compiled:
        for t in (1, 2.5, np.int64(7), np.float32(9)):
            unet(x, t, context)
    assert compiled == []


@pytest.mark.parametrize("name", ["unet", "vae", "text_encoder"])
def test_parameters_are_counted(sd, name):
    theirs, ours = getattr(sd[0], name), getattr(sd[1], name)
    assert ours.num_parameters() == ours.num_parameters(only_trainable=True)
    assert ours.num_parameters() == theirs.num_parameters() == ours.num_params
    without = ours.num_parameters(exclude_embeddings=True)
    assert without == theirs.num_parameters(exclude_embeddings=True)
    assert (without < ours.num_parameters()) == (name == "text_encoder")
    assert ours.device in jax.devices()


@pytest.mark.parametrize("name", ["unet", "vae", "text_encoder"])
def test_networks_are_made_of_configs(sd, name):
    own = getattr(sd[1], name)
    cls = getattr(diffusax, own.class_name)
    config = getattr(sd[0], name).config
    for given in (own.config, config):
        made = cls.from_config(given)
        assert isinstance(made, Model)
        assert made.network == own.network
        assert made.num_parameters() == own.num_parameters()
    with pytest.raises(ValueError, match="config must be a mapping of options"):
        cls.from_config(3)


def test_a_config_is_read_and_changed(tmp_path):
    diffusers.AutoencoderKL(**VAE).save_pretrained(tmp_path)
    config = diffusax.AutoencoderKL.load_config(tmp_path)
    assert config == diffusers.AutoencoderKL.load_config(tmp_path)
    made = diffusax.AutoencoderKL.from_config(config, scaling_factor=0.3, dtype="bfloat16", seed=1)
    assert made.config.scaling_factor == 0.3
    assert made.dtype == jnp.bfloat16
    assert diffusax.AutoencoderKL(**VAE).network == diffusax.AutoencoderKL.from_config(VAE).network
    with pytest.raises(ValueError, match="config is for a AutoencoderKL, not a UNet2DConditionMod"):
        diffusax.UNet2DConditionModel.from_config(config)
    with pytest.raises(ValueError, match="has no option 'made_up'"):
        diffusax.AutoencoderKL.from_config(config, made_up=1)


def test_a_model_without_such_a_call_runs_as_its_module():
    assert type(Model(Network(InceptionV3, InceptionConfig()), None)) is Model
