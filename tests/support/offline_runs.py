"""Runs over many prompts in processes of their own, and what they have written."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
from PIL import Image

from diffusax import offline
from diffusax.cli.generate_many import LEFT_OUT

SETTINGS = {"batch_size": 3, "steps": 2, "images_per_shard": 4}


def settings(**given):
    """Those of runs in this process."""
    return offline.Settings(**{**SETTINGS, **given})


def run(pipe, rows, out, shard=None, **given):
    """A run in this process."""
    return offline.generate(pipe, rows, out, settings(**given), shard=shard, progress=False)


def start(prompts, out, *args, **variables):
    """A run as a process; what one compiles, however quickly, serves the next.

    variables: of its environment.
    """
    command = [sys.executable, "-m", "diffusax", "generate", "--prompts", prompts, "--out", out]
    return subprocess.Popen(
        [*map(str, command), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **variables},
    )


def finish(process, code=LEFT_OUT):
    """What a run said that has ended with this code; all files of prompts here have bad lines."""
    text, _ = process.communicate(timeout=300)
    assert process.returncode == code, text
    return text


def wait_for(process, condition, seconds=120):
    """Until the condition holds; False if the process ends before."""
    limit = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < limit
        time.sleep(0.005)
    return True


def until(process, condition):
    """Waits for the condition, before which the process must not end."""
    if not wait_for(process, condition):
        raise AssertionError(f"ended with {process.returncode}:\n{process.communicate()[0]}")


def settled(out):
    """How many batches and shards there are."""
    out = Path(out)
    return len(list(out.glob("work/*/*.json"))) + 1000 * len(shards(out))


def shards(out):
    """The finished shards, in order."""
    return sorted(path for path in Path(out).glob("[0-9]*") if not path.name.endswith(".partial"))


def kill(process):
    """As a machine that goes away."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def pictures(out):
    """(what is noted, the PNG file) of each picture, shard by shard, in the order written."""
    return [found for shard in shards(out) for found in _read(shard)]


def files(out):
    """The bytes of all finished shards by name."""
    whole = {}
    for shard in shards(out):
        for file in sorted(shard.iterdir()) if shard.is_dir() else [shard]:
            whole[str(file.relative_to(out))] = file.read_bytes()
    return whole


def pixels(data):
    """A PNG file as an array."""
    return np.asarray(Image.open(io.BytesIO(data)))


def errors(out):
    """What errors.jsonl says."""
    return [json.loads(line) for line in (Path(out) / "errors.jsonl").read_text().splitlines()]


def _read(shard):
    if shard.is_dir():
        rows = [json.loads(line) for line in (shard / "metadata.jsonl").read_text().splitlines()]
        return [(row, (shard / row.pop("file_name")).read_bytes()) for row in rows]
    if shard.suffix == ".tar":
        with tarfile.open(shard) as file:
            found = {member.name: file.extractfile(member).read() for member in file}
        keys = [name[: -len(".json")] for name in found if name.endswith(".json")]
        assert len(found) == 2 * len(keys)
        return [(json.loads(found[f"{key}.json"]), found[f"{key}.png"]) for key in keys]
    rows = pyarrow.parquet.read_table(shard).to_pylist()
    return [(row, row.pop("image")["bytes"]) for row in rows]
