"""Training's reading of pictures: Parquet files on the disk against the same ones on a Hub.

The Hub is a server in a process of its own on this machine, so the network is as fast as it can be;
--delay holds each answer back, as a server that is far away does. Batches are read and pictures
decoded and cropped as in training, without a model.
    python benchmarks/streaming_cpu.py
"""

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import describe

ROOT = Path(__file__).parents[1]
REPO = "someone/pictures"


def main() -> None:
    """Prints a line for each way of reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--side", type=int, default=128, help="pixels of the square pictures")
    parser.add_argument("--group", type=int, default=100, help="rows of a row group")
    parser.add_argument("--window", type=int, default=4, help="row groups mixed at a time")
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0, 0.05], help="seconds")
    args = parser.parse_args()
    print(describe("grain", "pyarrow", "huggingface_hub"))
    with tempfile.TemporaryDirectory() as folder:
        files = write_shards(Path(folder) / "local", args)
        size = sum(file.stat().st_size for file in files)
        print(f"{args.rows} pictures, {size / 1e6:.1f} MB, row groups of {args.group}")
        measure("local, unpacked first", folder, size, path=str(files[0].parent))
        for delay in args.delay:
            with served(files, delay) as address:
                for window in (0, args.window):
                    name = f"streamed, {delay * 1e3:.0f} ms, window {window}"
                    options = {"streaming": True, "streaming_window": window}
                    measure(name, folder, size, path=REPO, endpoint=address, **options)


def measure(name: str, folder: str, size: int, endpoint: str | None = None, **options) -> None:
    """One epoch with an empty cache, one from the cache."""
    from huggingface_hub import constants

    from diffusax.training.data.batches import Batches
    from diffusax.training.data.examples import read_pixels
    from diffusax.training.data.opening import open_data
    from diffusax.training.data.options import DataConfig

    if endpoint:
        constants.ENDPOINT = endpoint
        constants.HUGGINGFACE_CO_URL_TEMPLATE = (
            endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
    os.environ["DIFFUSAX_CACHE"] = tempfile.mkdtemp(dir=folder)
    config = DataConfig(resolution=64, **options)
    for state in ("cold", "warm"):
        start = time.perf_counter()
        source = open_data(config, ("image", "text"))

        def prepare(row, rng):
            return {"pixels": read_pixels(config, 64, "image", row, rng)}

        batches = Batches(source, prepare, batch_size=20, seed=0, threads=config.threads)
        first = None
        for _ in range(len(source) // 20):
            next(batches)
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
        batches.close()
        print(
            f"{name:30} {state}: {len(source) / seconds:7.0f} rows/s {size / seconds / 1e6:7.1f} "
            f"MB/s, first batch after {first:.2f} s",
            flush=True,
        )


def write_shards(folder: Path, args: argparse.Namespace) -> list[Path]:
    """Noise as JPEG, in four files."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    rng = np.random.default_rng(0)

    def jpeg() -> bytes:
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (args.side, args.side, 3), np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        return file.getvalue()

    files = []
    for i in range(4):
        rows = [
            {"image": {"bytes": jpeg(), "path": None}, "text": f"number {n}"}
            for n in range(i * args.rows // 4, (i + 1) * args.rows // 4)
        ]
        files.append(folder / f"train-{i:05}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), files[-1], row_group_size=args.group)
    return files


class served:
    """The address of a Hub with the files, in a process of its own."""

    def __init__(self, files: list[Path], delay: float):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(files, delay, theirs), daemon=True)

    def __enter__(self) -> str:
        self.process.start()
        return self.pipe.recv()

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.join()


def _serve(files: list[Path], delay: float, pipe) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.hub_server import Hub, running

    def late(self, *, body: bool) -> None:
        time.sleep(delay)
        Hub.answer(self, body=body)

    contents = {f"data/{file.name}": file.read_bytes() for file in files}
    with running({f"datasets/{REPO}": contents}, answer=late) as (address, _):
        pipe.send(address)
        pipe.recv()


if __name__ == "__main__":
    main()
