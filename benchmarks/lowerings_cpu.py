"""GFLOP/s of each lowering of convolution and attention at Stable Diffusion's shapes, on the CPU.

What `choose_lowering` in models/ops/conv.py and models/ops/attention.py picks is marked by a star.
Rates count the products of the plain form, so Winograd's fewer ones may pass the machine's peak.
    python benchmarks/lowerings_cpu.py --dtype float32 bfloat16
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from machine import describe

from diffusax.models.ops import attention, conv
from diffusax.models.ops.attention_kernels import Operands
from diffusax.runtime.devices.lowering import compiler_options

SAME = ((1, 1), (1, 1))
# b h c d stride: the UNet at 64x64 latents with guidance, the autoencoder at 512x512, then batches
# in the training of small UNets.
CONVOLUTIONS = (
    (2, 64, 4, 320, 1),
    (2, 64, 320, 320, 1),
    (2, 64, 960, 320, 1),
    (2, 64, 320, 320, 2),
    (2, 32, 640, 640, 1),
    (2, 32, 1920, 640, 1),
    (2, 32, 640, 640, 2),
    (2, 16, 1280, 1280, 1),
    (2, 16, 2560, 1280, 1),
    (2, 8, 1280, 1280, 1),
    (2, 64, 320, 4, 1),
    (1, 512, 128, 128, 1),
    (1, 256, 256, 256, 1),
    (8, 16, 160, 160, 1),
    (8, 8, 320, 320, 1),
    (64, 8, 192, 192, 1),
    (64, 4, 192, 192, 1),
)
# b t s h d: SD 2's levels, cross-attention, SD 1's widest heads, the autoencoder's single head, a
# batch in the training of a small transformer.
ATTENTIONS = (
    (2, 4096, 4096, 5, 64),
    (2, 4096, 77, 5, 64),
    (2, 1024, 1024, 10, 64),
    (2, 256, 256, 20, 64),
    (2, 4096, 4096, 8, 40),
    (1, 4096, 4096, 1, 512),
    (64, 148, 148, 6, 32),
)


def main() -> None:
    """Prints a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(describe())
    for dtype in args.dtype:
        for shape in CONVOLUTIONS:
            time_convolution(shape, dtype, args.repeats)
        for shape in ATTENTIONS:
            time_attention(shape, dtype, args.repeats)


def time_convolution(shape: tuple[int, ...], dtype: str, repeats: int) -> None:
    """One 3x3 convolution in every form that fits it."""
    b, h, c, d, stride = shape
    x, kernel = draw((b, h, h, c), dtype), draw((3, 3, c, d), dtype)
    names = ["direct", "winograd"] if stride == 1 else ["direct"]
    if b * h * h * c * 9 * 4 < 2**30:
        names.append("patches")
    chosen = conv.choose_lowering("cpu", dtype, x.shape, kernel.shape, stride, SAME)
    forms = {
        name: lambda x, k, form=conv.LOWERINGS[name]: form(x, k, stride, SAME) for name in names
    }
    gflop = 2 * b * (h // stride) ** 2 * 9 * c * d / 1e9
    report(f"{dtype} conv {shape}", forms, (x, kernel), gflop, chosen, repeats)


def time_attention(shape: tuple[int, ...], dtype: str, repeats: int) -> None:
    """One attention in every form that runs on a CPU."""
    b, t, s, h, d = shape
    q, k, v = (draw((b, n, h, d), dtype) for n in (t, s, s))
    chosen = attention.choose_lowering("cpu", dtype, q.shape, k.shape)
    forms = {
        name: lambda q, k, v, form=attention.LOWERINGS[name]: form(Operands(q, k, v, d**-0.5))
        for name in ("whole", "chunks", "xla")
    }
    gflop = 4 * b * h * t * s * d / 1e9
    report(f"{dtype} attention {shape}", forms, (q, k, v), gflop, chosen, repeats)


def draw(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


def report(
    label: str,
    forms: dict[str, Callable[..., jax.Array]],
    args: tuple[jax.Array, ...],
    gflop: float,
    chosen: str,
    repeats: int,
) -> None:
    """The best rate of `repeats` turns of each form."""
    programs = {name: repeated(form) for name, form in forms.items()}
    seconds = dict.fromkeys(programs, float("inf"))
    for turn in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn > 0:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    rates = (
        f"{name}{'*' if name == chosen else ''} {gflop * _ITERATIONS / took:.0f}"
        for name, took in seconds.items()
    )
    print(f"{label}: {', '.join(rates)} GFLOP/s", flush=True)


_ITERATIONS = 3


def repeated(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`form` run several times in one program, as a sampler does.

    A program's results and temporaries are fresh pages, which at these sizes cost as much as the
    computation. Each turn changes the arguments, so that nothing can be computed ahead.
    """

    @partial(jax.jit, compiler_options=compiler_options() or None)
    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        def body(_: jax.Array, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            y = jax.lax.optimization_barrier(form(*args))
            nudge = y.ravel()[-1] * 1e-6
            return tuple(a.at[(0,) * a.ndim].add(nudge.astype(a.dtype)) for a in args)

        return jax.lax.fori_loop(0, _ITERATIONS, body, args)

    return run


if __name__ == "__main__":
    main()
