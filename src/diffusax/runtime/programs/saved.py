"""Saves executables to files, which fit one machine, set of versions and shapes, and loads them."""

import functools
import hashlib
import logging
import pickle
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding

from diffusax._version import __version__
from diffusax.boundary.files import load_json, write_json, written_whole
from diffusax.runtime.devices.lowering import compiler_options
from diffusax.runtime.programs.cache import without_compilation_cache
from diffusax.runtime.programs.program import (
    PROGRAMS,
    Executable,
    Request,
    compile_request,
    digest,
    key,
    lower,
    streams,
)
from diffusax.runtime.switches import in_mesh

log = logging.getLogger(__name__)

_INDEX = "programs.json"


def save_executables(folder: str | Path) -> list[Path]:
    """Writes the executables that this process compiled ahead of time.

    Args:
        folder: the folder for one file each, and an index of them.

    Returns:
        The files.

    Raises:
        ValueError: there are no executables.
    """
    folder = Path(folder)
    found = {
        (name, digest(request_key)): (request_key, executable)
        for name, program in PROGRAMS.items()
        for request_key, executable in program.executables.items()
        if executable.request is not None
    }
    if not found:
        raise ValueError("no program was compiled ahead of time; call compile first")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for (name, short), (request_key, executable) in found.items():
        file = f"{name}-{short}.executable"
        data = _write(folder / file, request_key, _serializable(executable))
        files[file] = {"program": name, "sha256": hashlib.sha256(data).hexdigest()}
    index = folder / _INDEX
    before = load_json(index) if index.is_file() else {}
    kept = before.get("files", {}) if before.get("environment") == environment() else {}
    write_json(index, {"environment": environment(), "files": {**kept, **files}})
    return [folder / file for file in files]


def load_executables(folder: str | Path) -> int:
    """Reads executables, so that calls with their shapes compile nothing.

    Load only files that you trust: like pickles, they can run any code.

    Returns:
        The number that were read. Those that are damaged, or were made by other versions or for
        another device, are left out with a warning.

    Raises:
        ValueError: the folder holds no index of executables.
    """
    folder = Path(folder)
    if not (folder / _INDEX).is_file():
        raise ValueError(f"{folder} holds no {_INDEX}; save_compiled writes one")
    index: dict[str, Any] = load_json(folder / _INDEX)
    here, there = environment(), index.get("environment", {})
    other = [f"{k} {there.get(k)}, here {v}" for k, v in here.items() if there.get(k) != v]
    if other:
        log.warning("%s was made for %s; nothing of it is used", folder, "; ".join(other))
        return 0
    count = 0
    for file, about in index.get("files", {}).items():
        try:
            data = (folder / Path(file).name).read_bytes()
            if hashlib.sha256(data).hexdigest() != about["sha256"]:
                raise ValueError("its checksum is wrong")
            _take(about["program"], data)
            count += 1
        except Exception as error:
            log.warning("%s is not used: %s", folder / file, " ".join(str(error).split())[:200])
    return count


def compile_to_file(request: Request, path: Path, mesh: Mesh | None = None) -> None:
    """Compiles a program for the request, for later calls, and writes the executable to a file.

    Raises:
        OSError: the file cannot be written; calls use the executable all the same.
    """
    if jax.default_backend() == "cpu":
        compiled = _compiled_for_file(request, mesh)
    else:
        compiled = compile_request(request, mesh)
    request_key = key(request)
    # The request would keep its arrays alive.
    request.program.keep(request_key, Executable(compiled))
    _write(path, request_key, compiled)


def load_from_file(name: str, path: Path) -> None:
    """Reads an executable of the program of this name, so that calls with its shapes use it.

    Load only files that you trust: like pickles, they can run any code. That a file fits this
    machine and these versions is the caller's to know, see `environment`.
    """
    _take(name, path.read_bytes())


def environment() -> dict[str, Any]:
    """Returns what an executable depends on besides its program: versions and devices."""
    device = jax.local_devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        kind = f"{kind} {_cpu_features()}"
    flags = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
    return {
        "diffusax": __version__,
        "sources": _sources(),
        "flags": [str(getattr(jax.config, flag)) for flag in flags],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "platform version": device.client.platform_version,
        "device": kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def _serializable(executable: Executable) -> jax.stages.Compiled:
    """Returns an executable that this process has compiled in a form that can be written."""
    if jax.default_backend() != "cpu" or executable.request is None:
        return executable.compiled
    return _compiled_for_file(executable.request, executable.mesh)


def _compiled_for_file(request: Request, mesh: Mesh | None) -> jax.stages.Compiled:
    """Compiles a program for CPUs once more, without the compilation cache.

    XLA's CPU backend would write an executable from that cache without its machine code.
    """
    # With a further option, even one that changes nothing, JAX compiles again.
    options = compiler_options(mesh, streams=streams(request))
    options["xla_embed_ir_in_executable"] = False
    with without_compilation_cache(), in_mesh(mesh):
        return lower(request).compile(compiler_options=options)


def _write(path: Path, request_key: Any, compiled: jax.stages.Compiled) -> bytes:
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    data = pickle.dumps((request_key, payload, in_tree, out_tree, _device_ids(compiled)))
    with written_whole(path) as partial:
        partial.write_bytes(data)
    return data


def _take(name: str, data: bytes) -> None:
    request_key, payload, in_tree, out_tree, ids = pickle.loads(data)
    devices = {device.id: device for device in jax.devices()}
    compiled = serialize_executable.deserialize_and_load(
        payload, in_tree, out_tree, execution_devices=[devices[i] for i in ids]
    )
    PROGRAMS[name].keep(request_key, Executable(compiled))


def _device_ids(compiled: Any) -> list[int]:
    shardings = jax.tree.leaves(compiled.input_shardings)
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return [device.id for device in sharding.mesh.devices.flat]
    return sorted({device.id for s in shardings for device in s.device_set})


@functools.cache
def _sources() -> str:
    """Digests the package's own code, because a checkout changes without its version."""
    root = Path(__file__).parents[2]
    folders = ("batch", "lora", "models", "networks", "pipelines", "runtime", "samplers")
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _cpu_features() -> str:
    """Describes the processor and its features, which XLA compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:12]
