"""`diffusax serve`."""

import dataclasses
import os
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, UseAppendAction, configure

from diffusax.boundary.messages import escaped
from diffusax.boundary.options import Count, Options
from diffusax.cli.generation import Dtype, StoredWeights
from diffusax.cli.parsing import OWN, parse

_OWN = ("127.0.0.1", "::1", "localhost")
KEYS = "DIFFUSAX_API_KEYS"
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e6)]


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Options):
    """Serve images and videos over HTTP: a page, jobs, and APIs that clients speak.

    The APIs are those of OpenAI, A1111 and Hugging Face. Requests join a running batch at its next
    step, whatever their samplers, steps, guidance, seeds and LoRAs.
    """

    essentials: ClassVar[tuple[str, ...]] = (
        *("host", "port", "model", "models", "api_key", "api_key_file", "dtype", "mesh", "lanes"),
        *("queue", "warm", "drain_seconds", "log_prompts"),
    )

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 lets other machines in, which asks for API keys."""
    port: Port = 7860
    """The port to listen at; 0 takes a free one."""
    model: Annotated[str | None, OWN] = None
    """The model for requests that name none: a folder in diffusers' layout, a .safetensors or .gguf
    file, a Hub repository id, or a name in the folder of models; by default the folder's first, and
    without a folder the small model inside the package, which generates emoji."""
    models: Annotated[Path | None, OWN] = None
    """A folder with checkpoints, LoRAs, embeddings and ControlNets that requests may name, as in
    A1111 or ComfyUI."""
    api_key: UseAppendAction[tuple[str, ...]] = ()
    """A key that requests must have, as Bearer token or as Basic password; can be given several
    times. Other users of the machine can read it on the command line, so use a file there."""
    api_key_file: Annotated[Path | None, OWN] = None
    """A file with one key a line. The environment's DIFFUSAX_API_KEYS has more, between spaces."""
    priority_key_file: Annotated[Path | None, OWN] = None
    """A file of further keys, each after its priority, one a line: "5 a-key" comes before keys
    without a priority, which have 0, and "-5 a-key" after them."""
    host_name: UseAppendAction[tuple[str, ...]] = ()
    """A name under which browsers may reach a server without keys, beside localhost; can be given
    several times."""
    allow_origin: UseAppendAction[tuple[str, ...]] = ()
    """A site whose pages may use the server, such as https://example.org; can be given several
    times."""
    proxy_headers: UseAppendAction[tuple[str, ...]] = ()
    """The address or network of a proxy before the server, such as 127.0.0.1 or 10.0.0.0/8, whose
    X-Forwarded-For, -Proto and -Host, or Forwarded, are believed; can be given several times."""
    alias: UseAppendAction[tuple[str, ...]] = ()
    """Another name of a model for clients of OpenAI's API, such as dall-e-3=my-model; can be given
    several times. OpenAI's own names that are not given mean the first model."""
    dtype: Dtype = "float32"
    """The dtype of the parameters and of the computation."""
    weights: StoredWeights = "file"
    """Store the large networks' kernels in eight bits (int8, int8_convrot, fp8), which halves what
    they take in bfloat16; with file only those that are quantised in their file, with the same
    numbers."""
    mesh: Annotated[str | None, OWN] = None
    """The devices to spread images and parameters over, such as data=4,tensor=2."""
    memory: Annotated[Gigabytes | None, OWN] = None
    """The gigabytes that parameters may take; models that were not used for longest leave first."""
    lanes: Count = 8
    """The most entries of a batch, a power of two; an image takes two with guidance, or one."""
    queue: Count = 64
    """The most requests that may wait; others are told to come again later."""
    warm: UseAppendAction[tuple[str, ...]] = ()
    """Compile at the start for images of this height and width, such as 512x768; can be given
    several times."""
    most_jobs: Count = 32
    """The most requests of one key, or of one address without keys, that wait or run."""
    most_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    """The most steps of a request."""
    most_images: Annotated[int, Meta(ge=1, le=1000)] = 16
    """The most images of a request."""
    most_pixels: Annotated[int, Meta(ge=64, le=2**28)] = 2048 * 2048
    """The most pixels of an image, or of a frame of a video."""
    most_frames: Annotated[int, Meta(ge=1, le=10_000)] = 161
    """The most frames of a video."""
    most_video_pixels: Annotated[int, Meta(ge=64, le=2**34)] = 128 * 2**20
    """The most pixels of all frames of a video together."""
    most_body: Annotated[float, Meta(gt=0, le=4096)] = 64.0
    """The most megabytes of a request."""
    deadline: Annotated[Seconds | None, OWN] = None
    """The seconds within which a request must be done, or fails; any by default. Requests may name
    fewer."""
    drain_seconds: Seconds = 60.0
    """The most seconds to finish what has begun when SIGTERM asks the server to stop."""
    log_prompts: bool = False
    """Write prompts into the log, which is on stderr, a JSON object a line."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lanes < 4 or self.lanes.bit_count() != 1:
            raise ValueError(f"--lanes must be a power of two, at least 4 (got {self.lanes})")

    def run(self) -> None:
        """Serves until a signal asks to stop."""
        from diffusax.cli.compile import parse_size
        from diffusax.serving.catalogue.catalogue import Catalogue
        from diffusax.serving.engine.engine import Engine, EngineSettings
        from diffusax.serving.web.monitoring import log_to_stderr
        from diffusax.serving.web.server import Server, address_of, create_app, listen

        settings = self._web_settings()
        sizes = [parse_size("--warm", text) for text in self.warm]
        listener = listen(self.host, self.port)
        if not settings.keys and self.host not in _OWN:
            warnings.warn(
                f"everybody who reaches {self.host} may use the server; name keys with "
                "--api-key-file",
                stacklevel=2,
            )
        log_to_stderr()
        catalogue = Catalogue(
            "emoji" if self.model is None and self.models is None else self.model,
            self.models,
            dtype=self.dtype,
            weights=self.weights,
            mesh=self.mesh,
            memory=None if self.memory is None else int(self.memory * 1e9),
        )
        _check_aliases(settings.aliases, catalogue)
        print(f"{escaped(address_of(listener))}", flush=True)
        bounds = EngineSettings(
            lanes=self.lanes,
            most_queued=self.queue,
            most_per_client=self.most_jobs,
            deadline=self.deadline,
        )
        with Engine(catalogue, bounds) as engine:
            app = create_app(engine, catalogue, settings)
            service = app.state.service
            opening = threading.Thread(target=service.open, args=(sizes,), daemon=True)
            opening.start()
            Server(app, engine, self.drain_seconds).run([listener])

    def keys(self) -> tuple[str, ...]:
        """Returns the API keys of the options, of their files and of the environment.

        Raises:
            ValueError: a file cannot be read or has no keys, or a key is too short.
        """
        found = [*self.api_key, *os.environ.get(KEYS, "").split()]
        if self.api_key_file is not None:
            found += _lines("--api-key-file", self.api_key_file)
        found += self.priorities()
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() for key in found):
            raise ValueError("--api-key must have at least 8 letters, numbers or signs of ASCII")
        return tuple(dict.fromkeys(found))

    def priorities(self) -> dict[str, int]:
        """Returns the priorities of the keys that have one.

        Raises:
            ValueError: their file cannot be read or has no keys, or one has no priority.
        """
        file = self.priority_key_file
        lines = [] if file is None else _lines("--priority-key-file", file)
        pairs = [re.fullmatch(r"([+-]?\d{1,4})\s+(.+)", line, re.ASCII) for line in lines]
        if None in pairs:
            # Without the line, which may be a key.
            raise ValueError(
                f"--priority-key-file {file} must have a whole number and a key in each line "
                f"(line {pairs.index(None) + 1} has not); write '5 a-key'"
            )
        return {pair[2]: int(pair[1]) for pair in pairs if pair}

    def aliases(self) -> dict[str, str]:
        """Returns the models of the names that --alias gives.

        Raises:
            ValueError: one is not of the form NAME=MODEL.
        """
        pairs = [text.partition("=") for text in self.alias]
        wrong = [text for text, (name, _, model) in zip(self.alias, pairs) if not (name and model)]
        if wrong:
            raise ValueError(f"--alias must be NAME=MODEL (got {wrong[0]!r})")
        return {name: model for name, _, model in pairs}

    def _web_settings(self) -> Any:
        from diffusax.serving.web.proxies import Proxies
        from diffusax.serving.web.security import WebSettings

        # Before anything is loaded, so that a mistake is told at once.
        Proxies(self.proxy_headers)
        return WebSettings(
            keys=self.keys(),
            priorities=self.priorities(),
            hosts=self.host_name,
            origins=self.allow_origin,
            aliases=self.aliases(),
            proxies=self.proxy_headers,
            most_steps=self.most_steps,
            most_images=self.most_images,
            most_image_pixels=self.most_pixels,
            most_frames=self.most_frames,
            most_video_pixels=self.most_video_pixels,
            most_body=int(self.most_body * 1e6),
            log_prompts=self.log_prompts,
        )


def _check_aliases(aliases: Mapping[str, str], catalogue: Any) -> None:
    """Raises ValueError where an alias means a model that is not there."""
    for name, model in aliases.items():
        try:
            catalogue.entry(model)
        except ValueError as error:
            raise ValueError(f"--alias {name}={model}: {error}") from None


def _lines(option: str, file: Path) -> list[str]:
    """Returns the lines of a file of keys that are not empty.

    Raises:
        ValueError: there are none.
    """
    found = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    if not found:
        raise ValueError(f"{option} {file} has no keys; write one a line")
    return found


def command(args: list[str]) -> Any:
    """Reads the options from the arguments."""
    return parse(Serve, args, prog="diffusax serve")
