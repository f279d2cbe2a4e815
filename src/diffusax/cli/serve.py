"""`diffusax serve`."""

import dataclasses
import os
import threading
import warnings
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from tyro.conf import FlagCreatePairsOff, UseAppendAction, configure

from diffusax.cli.drawing import Dtype
from diffusax.cli.parsing import OWN, parse
from diffusax.printable import escaped
from diffusax.typed.options import Count, Options

_OWN = ("127.0.0.1", "::1", "localhost")
KEYS = "DIFFUSAX_API_KEYS"
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e6)]


@configure(FlagCreatePairsOff)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Options):
    """Serve images over HTTP: a page, jobs, and APIs that clients speak.

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
    """The model for requests that name none: a folder in diffusers' layout, a .safetensors file, a
    Hub repository id, or a name in the folder of models; by default the folder's first, and without
    a folder the small model inside the package, which generates emoji."""
    models: Annotated[Path | None, OWN] = None
    """A folder with checkpoints, LoRAs, embeddings and ControlNets that requests may name, as in
    A1111 or ComfyUI."""
    api_key: UseAppendAction[tuple[str, ...]] = ()
    """A key that requests must have, as Bearer token or as Basic password; can be given several
    times. Other users of the machine can read it on the command line, so use a file there."""
    api_key_file: Annotated[Path | None, OWN] = None
    """A file with one key a line. The environment's DIFFUSAX_API_KEYS has more, between spaces."""
    host_name: UseAppendAction[tuple[str, ...]] = ()
    """A name under which browsers may reach a server without keys, beside localhost; can be given
    several times."""
    allow_origin: UseAppendAction[tuple[str, ...]] = ()
    """A site whose pages may use the server, such as https://example.org; can be given several
    times."""
    dtype: Dtype = "float32"
    """The dtype of the parameters and of the computation."""
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
    """The most pixels of an image."""
    most_body: Annotated[float, Meta(gt=0, le=4096)] = 64.0
    """The most megabytes of a request."""
    deadline: Annotated[Seconds | None, OWN] = None
    """The seconds within which a request must be done, or fails; any by default."""
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
        from diffusax.serving.catalogue import Catalogue
        from diffusax.serving.engine import Engine, EngineSettings
        from diffusax.serving.web.app import create_app
        from diffusax.serving.web.log import log_to_stderr
        from diffusax.serving.web.server import Server, address_of, listen

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
            mesh=self.mesh,
            memory=None if self.memory is None else int(self.memory * 1e9),
        )
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
        """Returns the API keys of the options, of their file and of the environment.

        Raises:
            ValueError: the file cannot be read or has no keys, or a key is too short.
        """
        found = [*self.api_key, *os.environ.get(KEYS, "").split()]
        if self.api_key_file is not None:
            lines = self.api_key_file.read_text().splitlines()
            given = [line.strip() for line in lines if line.strip()]
            if not given:
                raise ValueError(
                    f"--api-key-file {self.api_key_file} has no keys; write one a line"
                )
            found += given
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() for key in found):
            raise ValueError("--api-key must have at least 8 letters, numbers or signs of ASCII")
        return tuple(dict.fromkeys(found))

    def _web_settings(self) -> Any:
        from diffusax.serving.web.settings import WebSettings

        return WebSettings(
            keys=self.keys(),
            hosts=self.host_name,
            origins=self.allow_origin,
            most_steps=self.most_steps,
            most_images=self.most_images,
            most_image_pixels=self.most_pixels,
            most_body=int(self.most_body * 1e6),
            log_prompts=self.log_prompts,
        )


def command(args: list[str]) -> Any:
    """Reads the options from the arguments."""
    return parse(Serve, args, prog="diffusax serve")
