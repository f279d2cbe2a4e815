"""Language models against transformers, live, all weights random."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from full_size import QWEN3_4B, T5_XXL
from jax.sharding import AbstractMesh, PartitionSpec
from safetensors.torch import load_file, save_file
from support.effort import first
from support.many_devices import run_on_devices
from support.runs import RUNS
from support.tiny import randomize
from support.tiny_language import QWEN3, T5, build
from transformers.models.t5.modeling_t5 import T5Attention

import diffusax
from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.interop.torch.models import to_model
from diffusax.models import Network, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel
from diffusax.models.adapters.low_rank import Adapters, LowRank, kernel_shapes
from diffusax.models.encoders.qwen3 import TENSOR_RULES
from diffusax.models.encoders.t5 import distance_buckets
from diffusax.models.network import cast_params
from diffusax.networks import load_network
from diffusax.runtime.devices.mesh import AXES, param_sharding

LENGTHS = np.array([13, 5, 1], np.int32)
IDS = np.random.default_rng(0).integers(0, 101, (3, 13)).astype(np.int32)
MASK = np.arange(13) < LENGTHS[:, None]


def save(folder, kind, **changes):
    model = build(kind, **changes)
    model.save_pretrained(folder)
    return model


def assert_close(actual, expected, tolerance=1e-5):
    expected = expected.float().numpy()
    assert actual.shape == expected.shape
    assert (
        np.abs(np.asarray(actual, np.float32) - expected).max()
        <= tolerance * np.abs(expected).max()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "changes"),
    first(
        [
            ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
            ("T5EncoderModel", {}),
            ("UMT5EncoderModel", {}),
            ("T5EncoderModel", {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-3}),
            ("Qwen3Model", {}),
            ("Qwen3ForCausalLM", {"tie_word_embeddings": False, "num_key_value_heads": 6}),
            ("Qwen3VLForConditionalGeneration", {"tie_word_embeddings": True}),
        ],
        4,
    ),
)
def test_every_output_equals_transformers(tmp_path, kind, changes):
    theirs = save(tmp_path, kind, **changes)
    ours = getattr(diffusax, kind).from_pretrained(tmp_path)
    assert ours.class_name == kind
    for mask in (None, torch.tensor(MASK)):
        expected = theirs(torch.tensor(IDS), attention_mask=mask, output_hidden_states=True)
        actual = ours(torch.tensor(IDS), attention_mask=mask, output_hidden_states=True)
        first = "logits" if "For" in kind else "last_hidden_state"
        assert actual.keys() == (first, "hidden_states")
        assert isinstance(actual[0], torch.Tensor)
        assert_close(actual[0], expected[0])
        for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "T5EncoderModel"])
def test_chosen_layers_are_those_of_hidden_states_and_the_rest_is_not_computed(tmp_path, kind):
    save(tmp_path, kind)
    model = load_network(tmp_path)

    def states(layers):
        return model.apply(model.params, IDS, LENGTHS, method="hidden_states", layers=layers)

    everything = states(None)
    assert len(everything) == 4
    for layers in [(-2,), (0, 3, 1), (2, 2), (-1,)]:
        jax.tree.map(
            np.testing.assert_array_equal, states(layers), tuple(everything[i] for i in layers)
        )
    texts = [str(jax.make_jaxpr(lambda i=i: states((i,)))()) for i in range(4)]
    counts = np.array([text.count("dot_general") for text in texts])
    assert counts[0] == 0
    first, *others = np.diff(counts)
    # What the first layer traces, the others share.
    assert first >= others[0] == others[1] > 0
    for index in (4, -5):
        with pytest.raises(ValueError, match=rf"layers must be from -4 to 3.* \(got {index}\)"):
            states((index,))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "T5EncoderModel"])
def test_an_object_of_transformers_is_taken_over(kind):
    theirs = build(kind)
    model = to_model("text_encoder", theirs)
    assert isinstance(model.network, Network)
    expected = theirs(torch.tensor(IDS), torch.tensor(MASK))[0]
    assert_close(model(IDS, attention_mask=MASK)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", first(["Qwen3Model", "T5EncoderModel"]))
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(tmp_path, kind):
    errors = []
    theirs = build(kind)
    for seed in range(3):
        randomize(theirs.float(), seed).save_pretrained(tmp_path)
        exact = theirs(torch.tensor(IDS), torch.tensor(MASK)).last_hidden_state
        half = theirs.to(torch.bfloat16)(torch.tensor(IDS), torch.tensor(MASK)).last_hidden_state
        actual = load_network(tmp_path, dtype="bfloat16").run(IDS, LENGTHS).last_hidden_state
        assert actual.dtype == jnp.bfloat16
        found = np.asarray(actual, np.float32), half.float().numpy()
        errors.append([np.linalg.norm(x - exact.numpy()) for x in found])
    ours, reference = np.linalg.norm(errors, axis=0)
    # One error is a random walk of some hundred roundings; three differ by a few percent.
    assert 0 < ours <= 1.1 * reference


@torch.no_grad()
def test_float16_survives_outputs_that_exceed_it(tmp_path):
    theirs = build("T5EncoderModel")
    for block in theirs.encoder.block[:2]:
        block.layer[1].DenseReluDense.wo.weight *= 50_000
    theirs.save_pretrained(tmp_path)
    expected = theirs(torch.tensor(IDS), output_hidden_states=True)
    assert expected.hidden_states[1].abs().max() > 100_000
    actual = load_network(tmp_path, dtype="float16").run(IDS)
    assert_close(actual.hidden_states[2], expected.hidden_states[2], 0.01)
    assert_close(actual.last_hidden_state, expected.last_hidden_state, 0.01)


@pytest.mark.parametrize("buckets", first([32, 8, 33]))
def test_buckets_of_distances_equal_transformers(buckets):
    positions = torch.arange(700)
    for far in (10, 128, 300):
        expected = T5Attention._relative_position_bucket(
            positions[None] - positions[:, None], num_buckets=buckets, max_distance=far
        )
        np.testing.assert_array_equal(distance_buckets(700, buckets, far), expected)


def test_checkpoints_with_and_without_the_head_s_prefix_are_read(tmp_path):
    save(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    expected = load_network(tmp_path).run(IDS).last_hidden_state
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    data, tensors = json.loads(config.read_text()), load_file(file)
    plain = {name.removeprefix("model."): x for name, x in tensors.items()}
    for kind in ("Qwen3ForCausalLM", "Qwen3Model"):
        config.write_text(json.dumps({**data, "architectures": [kind]}))
        # Some have the tied head, too.
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        for named in (tensors, plain, tensors | head):
            save_file(named, file)
            model = load_network(tmp_path)
            assert model.class_name == kind
            np.testing.assert_array_equal(model.run(IDS).last_hidden_state, expected)


@pytest.mark.parametrize("layout", [4, 5])
def test_configs_of_transformers_4_and_5_are_read(layout):
    four = {
        **{k: v for k, v in QWEN3.items() if k != "rope_parameters"},
        **{"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": None, "hidden_act": "silu"},
        **{"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28},
        **{"eos_token_id": 99, "use_cache": True, "architectures": ["Qwen3ForCausalLM"]},
    }
    given = four if layout == 4 else transformers.Qwen3Config(**QWEN3).to_dict()
    config = config_from_dict(Qwen3Config, given)
    assert (config.rope_theta, config.num_key_value_heads) == (1e6, 2)
    assert config_from_dict(Qwen3Config, {"num_attention_heads": 6}).num_key_value_heads == 6


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (Qwen3Config, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (Qwen3Config, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        (Qwen3Config, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        (Qwen3Config, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (Qwen3Config, {"num_key_value_heads": 5}, "must be divisible by num_key_value_heads=5"),
        (Qwen3Config, {"head_dim": 7}, "head_dim=7 must be even"),
        (Qwen3Config, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (T5Config, {"feed_forward_proj": "gated-silu"}, "feed_forward_proj='gated-silu'"),
        (T5Config, {"relative_attention_max_distance": 2}, "relative_attention_max_distance"),
        (T5Config, {"model_type": "umt5"}, "model_type='umt5'"),
    ],
)
def test_config_of_a_language_model_that_is_not_supported_is_an_error(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(config, changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3Model", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("T5EncoderModel", {}),
        ("UMT5EncoderModel", {}),
    ],
)
def test_saved_in_several_files_it_opens_in_transformers(tmp_path, kind, changes):
    theirs = build(kind, **changes)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    assert len(list((tmp_path / "in").glob("model-*.safetensors"))) > 1
    model = load_network(tmp_path / "in")
    save_network(model, tmp_path / "out", max_shard_size=10_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    again, report = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    assert load_network(tmp_path / "out").config == model.config
    options = QWEN3 if kind.startswith("Qwen3") else T5
    for key in (*options, *changes):
        assert getattr(again.config, key) == getattr(theirs.config, key), key


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "T5EncoderModel"])
def test_every_layer_takes_adapters(tmp_path, kind):
    save(tmp_path, kind)
    model = load_network(tmp_path)
    rng = np.random.default_rng(1)

    def last(params, **options):
        output = model.apply(params, IDS, LENGTHS, **options)
        return output.last_hidden_state if output.logits is None else output.logits

    layers, changed = {}, jax.tree.map(lambda x: x, model.params)
    for path, (c, d) in kernel_shapes(model.network).items():
        down, up = rng.normal(size=(c, 2)), 0.1 * rng.normal(size=(2, d))
        layers[path] = LowRank(np.float32(down), np.float32(up), np.zeros(2, np.int32))
        leaf = changed
        for part in path.split("."):
            leaf = leaf[part]
        leaf["kernel"] = leaf["kernel"] + np.float32(down @ up)
    actual = last(model.params, adapters=Adapters(layers, np.ones((1, 1), np.float32)))
    expected = last(changed)
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(actual - last(model.params)).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("layers.0.self_attn.q_proj.kernel", (128, 256), ("fsdp", "tensor")),
        ("layers.0.self_attn.o_proj.kernel", (256, 128), ("tensor", "fsdp")),
        ("layers.0.mlp.up_proj.kernel", (128, 512), ("fsdp", "tensor")),
        ("layers.0.mlp.down_proj.kernel", (512, 128), ("tensor", "fsdp")),
        ("embed_tokens.embedding", (1000, 128), ("fsdp",)),
    ],
)
def test_meshes_split_heads_and_inner_widths(name, shape, spec):
    mesh = AbstractMesh((1, 2, 2), AXES)
    found = param_sharding(mesh, name, shape, TENSOR_RULES).spec
    assert tuple(found)[: len(spec)] == spec
    assert found == PartitionSpec(*found)


@pytest.mark.slow
def test_meshes_compute_the_same():
    assert len(run_on_devices(RUNS / "language_on_meshes.py")) == 20


@pytest.mark.parametrize(
    ("kind", "mask", "message"),
    [
        ("T5EncoderModel", MASK[:, ::-1], "must be ones followed by zeros, 3 rows of 13"),
        ("T5EncoderModel", np.ones((3, 12)), "must be 3 rows of 13 zeros and ones"),
        ("Qwen3Model", np.ones((3, 12)), "must be 3 rows of 13 zeros and ones"),
        ("Qwen3Model", MASK * np.array([[1], [0], [1]]), ".* a one at least in each"),
    ],
)
def test_a_mask_of_another_form_is_an_error(tmp_path, kind, mask, message):
    save(tmp_path, kind)
    with pytest.raises(ValueError, match=f"attention_mask {message}"):
        getattr(diffusax, kind).from_pretrained(tmp_path)(IDS, attention_mask=mask)


def test_a_token_that_is_not_in_the_table_is_an_error(tmp_path):
    save(tmp_path, "T5EncoderModel")
    with pytest.raises(ValueError, match=r"token 101, .*vocab_size is 101"):
        diffusax.T5EncoderModel.from_pretrained(tmp_path)(np.array([[1, 101]]))


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (Network(Qwen3Model, Qwen3Config(**QWEN3_4B)), 4_022_468_096),
        (Network(T5EncoderModel, T5Config(**T5_XXL)), 4_762_310_656),
    ],
)
def test_full_size_networks_have_as_many_parameters_as_published(network, count):
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(network.shapes)) == count
    half = jax.eval_shape(lambda p: cast_params(p, jnp.bfloat16), network.shapes)
    ids = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    output = jax.eval_shape(network.apply, half, ids).last_hidden_state
    assert (output.shape[:2], output.dtype) == ((1, 512), jnp.bfloat16)
