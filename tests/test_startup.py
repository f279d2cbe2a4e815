"""What the first call in a process must not wait for."""

import subprocess
import sys

UNNEEDED = [
    "anyio",
    "diffusax.batch",
    "diffusax.cli",
    "diffusax.evaluation",
    "diffusax.hub_data",
    "diffusax.interop",
    "diffusax.offline",
    "diffusax.pipelines.pipeline.ahead",
    "diffusax.runtime.programs.cost",
    "diffusax.runtime.programs.saved",
    "diffusax.runtime.programs.topology",
    "diffusax.serving",
    "diffusax.training",
    "diffusers",
    "fastapi",
    "grain",
    "httpx",
    "httpx2",
    "huggingface_hub.errors",
    "huggingface_hub.hf_api",
    "jax.experimental.pallas",
    "jinja2",
    "orbax",
    "pyarrow",
    "requests",
    "scipy",
    "starlette",
    "tensorboard",
    "tensorstore",
    "torch",
    "torchax",
    "transformers",
    "tyro",
    "uvicorn",
]
PROGRAM = """
import sys
import diffusax
pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
pipe("a red apple", num_inference_steps=1, height=32, width=32)
names = sys.argv[1:]
print([n for n in names if any(m == n or m.startswith(n + ".") for m in sys.modules)])
"""


def test_a_first_call_imports_nothing_that_it_does_not_need():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *UNNEEDED], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
