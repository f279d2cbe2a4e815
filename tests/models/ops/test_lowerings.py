"""Each lowering of convolution, attention and group norm against a plain float64 one."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from support.effort import first

from diffusax.models.layers.transformer import Attention
from diffusax.models.ops import attention as attention_module
from diffusax.models.ops import attention_kernels as flash
from diffusax.models.ops import conv as conv_module
from diffusax.models.ops import matmul as matmul_module
from diffusax.models.ops import norms
from diffusax.models.ops.attention import attention
from diffusax.models.ops.attention_kernels import Operands
from diffusax.models.ops.conv import conv2d, conv3d
from diffusax.models.ops.matmul import matmul
from diffusax.runtime.devices.mesh import make_mesh

RNG = np.random.default_rng(0)
SAME = ((1, 1), (1, 1))


def reference_conv(x, kernel, stride, padding):
    """Direct sums in float64."""
    kh, kw, _, d = kernel.shape
    x = np.pad(np.float64(x), ((0, 0), *padding, (0, 0)))
    h, w = (x.shape[1] - kh) // stride + 1, (x.shape[2] - kw) // stride + 1
    y = np.zeros((x.shape[0], h, w, d))
    for i in range(kh):
        for j in range(kw):
            taken = x[:, i : i + stride * (h - 1) + 1 : stride]
            taken = taken[:, :, j : j + stride * (w - 1) + 1 : stride]
            y += taken @ np.float64(kernel[i, j])
    return y


def arrays(x_shape, kernel_shape):
    x = RNG.standard_normal(x_shape, np.float32)
    return x, RNG.standard_normal(kernel_shape, np.float32) / np.prod(kernel_shape[:3]) ** 0.5


CONVOLUTIONS = [
    ("direct", (2, 7, 5, 3), (3, 3, 3, 4), 1, SAME),
    ("direct", (1, 8, 9, 1), (3, 3, 1, 2), 2, ((0, 1), (0, 1))),
    ("pointwise", (2, 5, 3, 6), (1, 1, 6, 4), 1, ((0, 0), (0, 0))),
    ("columns", (2, 7, 5, 3), (3, 3, 3, 4), 1, SAME),
    ("columns", (1, 9, 8, 2), (3, 3, 2, 3), 2, ((0, 1), (0, 1))),
    ("patches", (2, 7, 5, 3), (3, 3, 3, 4), 1, SAME),
    ("patches", (1, 9, 8, 2), (3, 3, 2, 3), 2, ((0, 1), (0, 1))),
    ("winograd", (2, 7, 5, 3), (3, 3, 3, 4), 1, SAME),
    ("winograd", (1, 6, 8, 1), (3, 3, 1, 2), 1, ((0, 2), (2, 0))),
    # Its kernels outweigh its map.
    ("winograd", (1, 4, 5, 24), (3, 3, 24, 20), 1, SAME),
]


@pytest.mark.parametrize(("name", "x_shape", "kernel_shape", "stride", "padding"), CONVOLUTIONS)
def test_every_convolution_equals_direct_sums(name, x_shape, kernel_shape, stride, padding):
    x, kernel = arrays(x_shape, kernel_shape)
    actual = conv_module.LOWERINGS[name](jnp.asarray(x), jnp.asarray(kernel), stride, padding)
    np.testing.assert_allclose(actual, reference_conv(x, kernel, stride, padding), atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [((3, 3, 3), 1), ((3, 1, 1), 2), ((2, 3, 1), 1)])
def test_convolutions_over_frames_equal_pytorch(kernel, stride):
    x, w = arrays((2, 5, 6, 7, 4), (*kernel, 4, 3))
    pad = (1, 0), *[(k // 2, k // 2) for k in kernel[1:]]
    padded = np.pad(x, ((0, 0), *pad, (0, 0)))
    given = (torch.tensor(np.float64(a)) for a in (padded, w))
    moved = (a.permute(*order) for a, order in zip(given, ((0, 4, 1, 2, 3), (4, 3, 0, 1, 2))))
    expected = torch.nn.functional.conv3d(*moved, stride=(stride, 1, 1)).permute(0, 2, 3, 4, 1)
    forms = conv_module._over_frames, conv_module._stacked_frames
    for found in (conv3d(x, w, stride=stride, padding=pad), *(f(x, w, stride, pad) for f in forms)):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert conv_module._lowering_over_frames("cpu") != conv_module._lowering_over_frames("tpu")


@pytest.mark.parametrize("channels", [(4, 5), (40, 50)])
def test_winograd_in_bands_equals_one_piece(channels):
    x, kernel = arrays((2, 13, 10, channels[0]), (3, 3, *channels))
    winograd = partial(conv_module.LOWERINGS["winograd"], max_bytes=1)
    actual = winograd(jnp.asarray(x), jnp.asarray(kernel), stride=1, padding=SAME)
    np.testing.assert_allclose(actual, reference_conv(x, kernel, 1, SAME), atol=1e-5)


@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "stride", "name"),
    [
        ((2, 6, 5, 3), (3, 3, 3, 4), 1, "direct"),
        ((2, 6, 6, 3), (3, 3, 3, 4), 2, "direct"),
        ((1, 32, 44, 192), (3, 3, 192, 192), 1, "winograd"),
        ((1, 4, 4, 128), (3, 3, 128, 128), 1, "patches"),
    ],
)
def test_gradients_equal_those_of_direct_sums(x_shape, kernel_shape, stride, name):
    x, kernel = arrays(x_shape, kernel_shape)
    shapes = x_shape, kernel_shape
    assert conv_module.choose_lowering("cpu", jnp.float32, *shapes, stride, SAME) == name

    def ours(x, kernel):
        return jnp.sin(conv2d(x, kernel, stride=stride, padding=SAME)).sum()

    def plain(x, kernel):
        return jnp.sin(conv_module.LOWERINGS["direct"](x, kernel, stride, SAME)).sum()

    for a, b in zip(jax.grad(ours, (0, 1))(x, kernel), jax.grad(plain, (0, 1))(x, kernel)):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
    batched = jax.vmap(lambda x: conv2d(x, kernel, stride=stride, padding=SAME))(x[:, None])
    np.testing.assert_allclose(
        batched[:, 0], conv2d(x, kernel, stride=stride, padding=SAME), atol=1e-5
    )


@pytest.mark.parametrize("shape", [(2, 16, 16, 128), (1, 8, 8, 128), (1, 64, 64, 128)])
def test_bfloat16_convolutions_round_only_their_operands(shape):
    x, kernel = arrays(shape, (3, 3, 128, 128))
    actual = conv2d(jnp.bfloat16(x), jnp.bfloat16(kernel), stride=1, padding=SAME)
    assert actual.dtype == jnp.bfloat16
    expected = reference_conv(x, kernel, 1, SAME)
    error = np.linalg.norm(np.float64(actual) - expected) / np.linalg.norm(expected)
    assert error < 0.01


def reference_attention(q, k, v, *, causal, key_lengths=None, bias=0.0):
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", np.float64(q), np.float64(k)) * q.shape[-1] ** -0.5
    scores = scores + np.float64(bias)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if key_lengths is not None:
        seen = np.arange(k.shape[1]) < np.asarray(key_lengths)[:, None, None, None]
        scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), np.float64(v))


def qkv(t, s, d=8):
    return [RNG.standard_normal((2, n, 3, d), np.float32) for n in (t, s, s)]


def lowering(name, limit):
    """A form of attention; those in chunks hold at most this many scores at once.

    "heads" is the form in chunks, of which each has four heads whole.
    """

    def run(*args, **more):
        of = Operands(*args, **more)
        if name == "heads":
            together = 4 * of.q.shape[1] * of.k.shape[1]
            return attention_module.LOWERINGS["chunks"](of, together=together)
        given = {"chunks": {"limit": limit, "together": 0}, "large_chunks": {"limit": limit}}
        return attention_module.LOWERINGS[name](of, **given.get(name, {}))

    return run


@pytest.mark.parametrize("name", ["whole", "chunks", "heads", "large_chunks", "xla"])
@pytest.mark.parametrize(("t", "s", "causal"), [(7, 7, True), (33, 5, False), (1, 1, False)])
def test_every_attention_equals_the_plain_one(name, t, s, causal):
    q, k, v = map(jnp.asarray, qkv(t, s))
    actual = lowering(name, 10 * s)(q, k, v, 8**-0.5, causal)
    np.testing.assert_allclose(actual, reference_attention(q, k, v, causal=causal), atol=1e-5)


@pytest.mark.parametrize("name", ["whole", "chunks", "heads", "large_chunks", "xla"])
@pytest.mark.parametrize(
    ("t", "s", "causal", "groups", "biased"),
    first(
        [(7, 7, True, 3, True), (33, 5, False, 6, True), (9, 9, True, 2, 0), (8, 6, False, 1, 0)], 2
    ),
)
def test_every_attention_takes_lengths_shared_heads_and_a_bias(name, t, s, causal, groups, biased):
    q, k, v = (RNG.standard_normal((3, n, h, 8), np.float32) for n, h in shapes(t, s, groups))
    more = {"key_lengths": np.array([s, 1, s - 2], np.int32)}
    if biased:
        more["bias"] = RNG.standard_normal((6, t, s), np.float32)
    given = {name: jnp.asarray(x) for name, x in more.items()}
    arrays = map(jnp.asarray, (q, k, v))
    actual = lowering(name, 4 * s)(*arrays, 8**-0.5, causal, **given)
    expected = reference_attention(q, k, v, causal=causal, **more)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def shapes(t, s, groups):
    """Positions and heads of q, k and v, where six heads of queries share `groups` of keys."""
    return (t, 6), (s, groups), (s, groups)


def test_attention_chooses_for_lengths_shared_heads_and_a_bias():
    q, k, v = (RNG.standard_normal((2, n, h, 8), np.float32) for n, h in shapes(9, 9, 2))
    more = {"key_lengths": np.array([9, 4], np.int32), "bias": np.ones((6, 9, 9), np.float32)}
    more["bias"][1] = RNG.standard_normal((9, 9))
    actual = jax.jit(partial(attention, causal=True))(q, k, v, **more)
    expected = reference_attention(q, k, v, causal=True, **more)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for platform in ("cuda", "tpu"):
        shape = (1, 4096, 8, 64)
        args = platform, jnp.dtype("bfloat16"), shape, shape
        assert attention_module.choose_lowering(*args, biased=True) == "xla"


def test_gradients_of_chunked_attention_equal_those_of_the_whole():
    q, k, v = map(jnp.asarray, qkv(33, 20))

    def loss(name):
        return lambda *args: jnp.sin(lowering(name, 200)(*args, 0.4, False)).sum()

    expected = jax.grad(loss("whole"), (0, 1, 2))(q, k, v)
    for name in ("chunks", "heads"):
        for a, b in zip(jax.grad(loss(name), (0, 1, 2))(q, k, v), expected):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", "heads", "xla"])
def test_gradients_with_lengths_shared_heads_and_a_bias_equal_those_of_the_whole(name):
    arrays = [RNG.standard_normal((2, n, h, 8), np.float32) for n, h in shapes(9, 9, 2)]
    arrays.append(RNG.standard_normal((6, 9, 9), np.float32))
    lengths = jnp.array([9, 2], jnp.int32)

    def loss(name):
        form = lowering(name, 30)
        return lambda q, k, v, bias: jnp.sin(form(q, k, v, 0.4, True, lengths, bias)).sum()

    expected = jax.grad(loss("whole"), (0, 1, 2, 3))(*arrays)
    for a, b in zip(jax.grad(loss(name), (0, 1, 2, 3))(*arrays), expected):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_memory_of_attention_does_not_grow_with_the_square():
    t, h = 4096, 5
    shape = jax.ShapeDtypeStruct((2, t, h, 64), jnp.float32)

    def loss(q, k, v):
        return attention(q, k, v).sum()

    scores = 2 * h * t * t * 4
    for f in (attention, jax.grad(loss, (0, 1, 2))):
        analysis = jax.jit(f).lower(shape, shape, shape).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < scores / 8


@pytest.mark.parametrize(
    ("platform", "dtype", "t", "d", "name"),
    [
        ("cpu", "float32", 64, 64, "whole"),
        ("cpu", "bfloat16", 4096, 64, "chunks"),
        ("cuda", "bfloat16", 4096, 64, "cudnn"),
        ("cuda", "float16", 77, 40, "cudnn"),
        ("rocm", "float16", 77, 40, "xla"),
        ("cuda", "bfloat16", 1024, 160, "xla"),
        ("cuda", "float32", 4096, 64, "xla"),
        ("cuda", "float32", 16384, 512, "large_chunks"),
        ("tpu", "bfloat16", 4096, 64, "side_by_side"),
        ("tpu", "float32", 4096, 64, "flash"),
        ("tpu", "float32", 77, 64, "xla"),
        ("tpu", "bfloat16", 1024, 160, "xla"),
        ("tpu", "bfloat16", 1100, 80, "flash"),
    ],
)
def test_attention_is_chosen_by_platform_dtype_and_size(platform, dtype, t, d, name):
    shape = (2, t, 8, d)
    assert attention_module.choose_lowering(platform, jnp.dtype(dtype), shape, shape) == name


@pytest.mark.parametrize(
    ("dtype", "t", "other"),
    [
        ("float16", 77, "xla"),
        ("bfloat16", 77, "whole"),
        ("float16", 4096, "large_chunks"),
        ("bfloat16", 4096, "large_chunks"),
    ],
)
def test_gpus_before_ampere_have_no_attention_of_cudnn(dtype, t, other):
    shape = (4, t, 8, 64)
    for capability, name in [((7, 0), other), ((7, 5), other), ((8, 0), "cudnn"), (None, "cudnn")]:
        args = ("cuda", jnp.dtype(dtype), shape, shape)
        assert attention_module.choose_lowering(*args, capability=capability) == name


# A length for each, because a trace of the same shapes is kept.
@pytest.mark.parametrize(
    ("capability", "t", "called"), [("7.5", 130, False), ("8.6", 132, True), ("gfx90a", 134, True)]
)
def test_attention_is_lowered_for_the_oldest_gpu_that_is_here(capability, t, called, monkeypatch):
    kinds = (capability, "9.0")
    here = [SimpleNamespace(device_kind="a card", compute_capability=c) for c in kinds]
    monkeypatch.setattr(jax, "local_devices", lambda: here)
    assert ("__cudnn$fmha" in lowered_for_cuda(t)) == called


@pytest.mark.parametrize(
    ("kind", "called"), [("Tesla T4", False), ("NVIDIA L4", True), ("another", True)]
)
def test_attention_is_lowered_for_the_gpus_of_the_mesh(kind, called):
    device = jax.sharding.AbstractDevice(kind, 1, "gpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("data",), auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert ("__cudnn$fmha" in lowered_for_cuda(136)) == called


def lowered_for_cuda(t):
    shape = jax.ShapeDtypeStruct((2, t, 8, 64), jnp.float16)
    traced = jax.jit(lambda *qkv: attention(*qkv)).trace(shape, shape, shape)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_convolve_directly(platform):
    choice = conv_module.choose_lowering(
        platform, jnp.float32, (8, 64, 64, 320), (3, 3, 320, 320), 1, SAME
    )
    assert choice == "direct"


@pytest.mark.parametrize(
    ("images", "size", "d", "name"),
    [
        (2, 16, 1280, "columns"),
        (7, 32, 640, "columns"),
        (8, 32, 640, "direct"),
        (2, 8, 1280, "direct"),
        (2, 64, 640, "columns"),
        (2, 64, 320, "columns"),
        (2, 128, 640, "direct"),
    ],
)
def test_choice_of_convolution_on_tpus(images, size, d, name):
    shapes = (images, size, size, 640), (3, 3, 640, d)
    assert conv_module.choose_lowering("tpu", jnp.bfloat16, *shapes, 1, SAME) == name
    if name == "columns":
        assert conv_module.choose_lowering("tpu", jnp.bfloat16, *shapes, 2, SAME) == "direct"
    # Each device of a mesh has images of its own.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4,), ("data",))):
        shapes = (4 * images, size, size, 640), (3, 3, 640, d)
        assert conv_module.choose_lowering("tpu", jnp.bfloat16, *shapes, 1, SAME) == name


@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "stride", "name", "half"),
    [
        ((2, 64, 64, 320), (3, 3, 320, 320), 1, "winograd", "winograd"),
        ((2, 16, 16, 2560), (3, 3, 2560, 1280), 1, "winograd", "winograd"),
        ((8, 16, 16, 160), (3, 3, 160, 160), 1, "direct", "winograd"),
        ((8, 8, 8, 320), (3, 3, 320, 320), 1, "direct", "winograd"),
        ((2, 8, 8, 1280), (3, 3, 1280, 1280), 1, "patches", "patches"),
        ((2, 32, 32, 640), (3, 3, 640, 640), 2, "direct", "patches"),
        ((2, 64, 64, 320), (3, 3, 320, 320), 2, "direct", "direct"),
        ((1, 512, 512, 256), (3, 3, 256, 256), 2, "direct", "direct"),
        ((2, 64, 64, 4), (3, 3, 4, 320), 1, "direct", "direct"),
        ((1, 512, 512, 64), (3, 3, 64, 64), 1, "direct", "direct"),
    ],
)
def test_choice_of_convolution_on_cpu(x_shape, kernel_shape, stride, name, half):
    choose = partial(conv_module.choose_lowering, "cpu")
    assert choose(jnp.float32, x_shape, kernel_shape, stride, SAME) == name
    for dtype in (jnp.bfloat16, jnp.float16):
        assert choose(dtype, x_shape, kernel_shape, stride, SAME) == half


CALLS = {"cuda": "__cudnn$fmha", "tpu": "tpu_custom_call"}


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("t", [4096, 4095])
def test_attention_is_lowered_for_the_platform_that_is_compiled_for(platform, derivative, t):
    shape = jax.ShapeDtypeStruct((2, t, 5, 64), jnp.bfloat16)
    loss = jax.grad(lambda *qkv: attention(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
    traced = jax.jit(loss if derivative else attention).trace(shape, shape, shape)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert [call for call in CALLS.values() if call in text] == [
        call for name, call in CALLS.items() if name == platform
    ]
    assert ("stablehlo.while" in text) == (platform == "cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_convolutions_are_lowered_for_the_platform_that_is_compiled_for(platform):
    x = jax.ShapeDtypeStruct((2, 64, 64, 128), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, 128, 128), jnp.bfloat16)
    traced = jax.jit(partial(conv2d, stride=1, padding=SAME)).trace(x, kernel)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.convolution" in text) == (platform != "cpu")
    assert ("stablehlo.dot_general" in text) == (platform == "cpu")


@pytest.mark.parametrize("size", [(6, 5), pytest.param((64, 48), marks=pytest.mark.slow)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("name", ["centred", "one_pass", "sums"])
def test_group_norms_equal_pytorch(name, offset, shifted, size):
    rng = np.random.default_rng(0)
    x = (offset + rng.normal(size=(2, *size, 24)) * rng.uniform(0.5, 3, 24)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 24)).astype(np.float32)
    shift = rng.normal(size=(2, 24)).astype(np.float32)
    given = map(jnp.asarray, (x, scale, bias, *([shift] if shifted else [])))
    ours = norms.GROUP_NORMS[name](*given, groups=4, eps=1e-5)
    maps = torch.tensor(x.transpose(0, 3, 1, 2))
    if shifted:
        maps = maps + torch.tensor(shift)[:, :, None, None]
    weights = (torch.tensor(y) for y in (scale, bias))
    expected = torch.nn.functional.group_norm(maps, 4, *weights, eps=1e-5)
    # A CPU adds up one number after the other.
    atol = offset * 1.2e-4 * (size == (64, 48)) + (5e-4 if offset else 2e-5)
    np.testing.assert_allclose(np.moveaxis(ours, -1, 1), expected, atol=atol)


@pytest.mark.parametrize("pixels", [1, 45, 64, 1024, 4096, 72 * 128, 2**20])
def test_the_parts_of_a_norm_divide_its_pixels(pixels):
    parts = norms.norm_parts(pixels)
    assert pixels % parts == 0
    assert parts <= 256
    # Powers of two have parts enough for every multiprocessor.
    assert parts >= 32 or pixels < 32 or pixels % 2


@pytest.mark.parametrize("name", ["one_pass", "sums"])
def test_the_gradient_of_a_group_norm_by_sums_is_that_of_the_centred_one(name):
    rng = np.random.default_rng(0)
    sizes = ((2, 6, 5, 24), 24, 24, (2, 24))
    args = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
    weights = rng.normal(size=(2, 6, 5, 24)).astype(np.float32)

    def loss(form, *args):
        return (form(*args, groups=4, eps=1e-5) * weights).sum()

    sums, centred = (
        jax.grad(partial(loss, norms.GROUP_NORMS[name]), (0, 1, 2, 3))(*args)
        for name in (name, "centred")
    )
    for actual, expected in zip(sums, centred, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_queries_keys_and_values_are_products_of_their_own_on_gpus(platform):
    layer = nnx.eval_shape(lambda: Attention(64, heads=2, head_dim=32, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    x = jax.ShapeDtypeStruct((2, 256, 64), jnp.float32)
    traced = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).trace(state, x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (":3 = stablehlo.optimization_barrier" in text) == (platform == "cuda")


@pytest.mark.parametrize("form", matmul_module.PRODUCTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_in_bfloat16_are_rounded_sums_in_float32(form, with_bias):
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((64, 320), (320, 48), (48,))
    )
    exact = np.float32(x) @ np.float32(kernel) + (np.float32(bias) if with_bias else 0)
    given = (x, kernel, bias) if with_bias else (x, kernel)
    actual = matmul_module.PRODUCTS[form](*given)
    assert actual.dtype == jnp.bfloat16
    # A half of the last place for each rounding; on the CPU that of the sum is in bfloat16, too.
    np.testing.assert_allclose(np.float32(actual), exact, rtol=2**-7, atol=2**-3)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_products_on_nvidias_gpus_are_written_in_half_precision(platform):
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((64, 320), (320, 48))]
    text = jax.jit(matmul).trace(*shapes).lower(lowering_platforms=(platform,))
    (product,) = (line for line in text.as_text().splitlines() if "dot_general" in line)
    assert product.rstrip().endswith("xbf16>") == (platform == "cuda")


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cpu_converts_no_kernel_to_float32(rows):
    x, kernel = (jnp.ones(size, jnp.bfloat16) for size in ((rows, 320), (320, 480)))
    compiled = jax.jit(matmul).lower(x, kernel).compile()
    assert "f32[320,480]" not in compiled.as_text()
    assert np.array_equal(compiled(x, kernel), jnp.full((rows, 480), 320, jnp.bfloat16))


def test_odd_lengths_are_padded_for_gradients_alone():
    q, k = (jax.ShapeDtypeStruct((2, t, 5, 64), jnp.bfloat16) for t in (256, 77))
    loss = jax.grad(lambda *qkv: attention(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
    for function, padded in ((attention, False), (loss, True)):
        text = jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmha" in text
        assert ("stablehlo.pad" in text) == padded


def test_gpus_and_tpus_take_one_pass_over_the_maps_of_a_group_norm():
    chosen = {name: norms.choose_group_norm(name) for name in ("cpu", "cuda", "rocm", "tpu")}
    assert chosen == {"cpu": "centred", "cuda": "sums", "rocm": "sums", "tpu": "one_pass"}


@pytest.mark.parametrize(("t", "s", "d"), [(256, 384, 64), (200, 130, 40), (130, 77, 160)])
def test_the_kernel_for_tpus_equals_plain_attention(t, s, d):
    q, k, v = map(jnp.asarray, qkv(t, s, d))
    with pltpu.force_tpu_interpret_mode():
        actual = attention_module.LOWERINGS["flash"](Operands(q, k, v, d**-0.5))
    np.testing.assert_allclose(actual, reference_attention(q, k, v, causal=False), atol=2e-5)


@pytest.mark.parametrize("causal", first([True, False]))
def test_the_kernel_for_tpus_takes_lengths_and_shared_heads_on_a_mesh(causal):
    q, k, v = (RNG.standard_normal((2, 200, h, 64), np.float32) for h in (4, 2, 2))
    lengths = np.array([200, 70], np.int32)
    flash = attention_module.LOWERINGS["flash"]
    with pltpu.force_tpu_interpret_mode(), jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        actual = flash(Operands(*map(jnp.asarray, (q, k, v)), 0.125, causal, jnp.asarray(lengths)))
    expected = reference_attention(q, k, v, causal=causal, key_lengths=lengths)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize(("t", "causal"), [(77, True), (78, True), (78, False)])
def test_the_kernel_for_gpus_is_told_lengths_and_shared_heads(t, causal):
    q, k = (jax.ShapeDtypeStruct((2, t, h, 64), jnp.bfloat16) for h in (8, 2))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def run(q, k, v, lengths):
        return attention_module.LOWERINGS["cudnn"](Operands(q, k, v, 0.125, causal, lengths))

    text = jax.jit(run).trace(q, k, k, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
    assert ("PADDING_CAUSAL" in text) == causal
    assert "PADDING" in text
    assert "tensor<2x78x2x64xbf16>" in text
    # An argument that is not used is left out of the program.
    assert "%arg3: tensor<2xi32>" in text


def test_forward_derivative_of_a_convolution_is_linear_in_both():
    x, kernel = arrays((2, 16, 16, 128), (3, 3, 128, 128))
    dx, dkernel = arrays((2, 16, 16, 128), (3, 3, 128, 128))
    conv = partial(conv2d, stride=1, padding=SAME)
    _, tangent = jax.jvp(conv, (x, kernel), (dx, dkernel))
    expected = reference_conv(dx, kernel, 1, SAME) + reference_conv(x, dkernel, 1, SAME)
    np.testing.assert_allclose(tangent, expected, atol=1e-4)


def test_memory_of_a_large_convolution_is_a_few_maps():
    size, c = 512, 128
    x = jax.ShapeDtypeStruct((1, size, size, c), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, c, c), jnp.float32)
    conv = jax.jit(lambda x, kernel: conv2d(x, kernel, stride=1, padding=SAME))
    analysis = conv.lower(x, kernel).compile().memory_analysis()
    # The padded map, its bands, their results, and 256 MiB of products within a band.
    assert analysis.temp_size_in_bytes < 4 * size * size * c * 4 + 256 * 2**20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_accumulates_and_adds_the_bias_in_float32(dtype):
    x, kernel = (jnp.asarray(a, dtype) for a in arrays((2, 3, 512), (1, 1, 512, 6)))
    bias = jnp.asarray(RNG.standard_normal(6), dtype)
    expected = np.float64(x) @ np.float64(kernel[0, 0]) + np.float64(bias)
    actual = matmul(x, kernel[0, 0], bias)
    assert actual.dtype == dtype
    # Half of a last place: the one rounding is that of the result.
    np.testing.assert_allclose(np.float64(actual), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "queries", "keys"),
    [
        *((77, 80, 128), (1040, 528, 384), (4096, 1024, 512), (4160, 832, 384)),
        *((2310, 784, 640), (18480, 976, 640), (32760, 1024, 512), (75600, 1024, 640)),
    ],
)
def test_a_tpu_pads_positions_little(n, queries, keys):
    assert flash.query_block(n) == queries
    assert flash.key_block(n) == keys
    assert -n % queries <= max(0.02 * n, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpus_move_half_precision_as_bits(dtype):
    """Concatenation in float32 would write twice the bytes; the result is the same anyhow."""
    xs = [jnp.asarray(RNG.standard_normal((3, n)), dtype) for n in (2, 5)]
    xs[0] = xs[0].at[0, 0].set(jnp.nan)
    join = jax.jit(lambda *xs: matmul_module.concatenate(xs, axis=-1))
    expected = jnp.concatenate(xs, axis=-1).astype(jnp.float32)
    np.testing.assert_array_equal(join(*xs).astype(jnp.float32), expected)
    on_cpu, on_tpu = (
        join.trace(*xs).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu")
    )
    assert ("ui16" in on_cpu) == (dtype == "bfloat16")
    assert "ui16" not in on_tpu
