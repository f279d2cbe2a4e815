"""What the server remembers for A1111's clients."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request

from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.jobs import Job
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.fields import read_fields

CHECKPOINT, CLIP, VAE = "sd_model_checkpoint", "CLIP_stop_at_last_layers", "sd_vae"
FIX_STEPS = "img2img_fix_steps"
_NONE = (None, "", "None", "none")
_OWN_VAE = ("Automatic", "automatic", *_NONE)
_MOST_LAYERS = 100
_MOST_CLIENTS = 1000
_USUAL: dict[str, Any] = {
    "eta_ancestral": 1,
    "eta_ddim": 0,
    "eta_noise_seed_delta": 0,
    "s_churn": 0,
    "s_noise": 1,
    "s_min_uncond": 0,
    "initial_noise_multiplier": 1,
    "img2img_extra_noise": 0,
    "img2img_color_correction": False,
    "emphasis": "Original",
    "sd_hypernetwork": "None",
    "sd_lora": "None",
    "always_discard_next_to_last_sigma": False,
    "use_old_scheduling": False,
    "token_merging_ratio": 0,
    "tiling": False,
    "face_restoration": False,
}
"""Options of A1111 that change images and are missing here, with A1111's defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a client has set."""

    model: str = ""
    clip_skip: int | None = None
    fixes_steps: bool = False
    """Whether img2img runs all of its steps, however small the denoising strength."""

    def changed(self, values: dict[str, Any], catalogue: Catalogue) -> "Options":
        """Returns the options with these values; unknown names are ignored.

        Raises:
            Refused: the model is not listed, or a value is not possible.
        """
        new = self
        name = values.get(CHECKPOINT)
        if isinstance(name, str) and name not in _NONE:
            new = dataclasses.replace(new, model=catalogue.entry(without_hash(name)).name)
        elif name not in _NONE:
            raise Refused(f"{CHECKPOINT} must be the title of a model", param=CHECKPOINT)
        if values.get(CLIP) is not None:
            layers = _number(values, CLIP, int)
            if layers > _MOST_LAYERS:
                raise Refused(
                    f"{CLIP} must be a whole number from 1 to {_MOST_LAYERS} (got {layers})",
                    param=CLIP,
                )
            # A1111 counts the layer at which to stop, and 1 is the last; what is less is no skip.
            new = dataclasses.replace(new, clip_skip=max(layers - 1, 0) or None)
        if values.get(FIX_STEPS) is not None:
            new = dataclasses.replace(new, fixes_steps=_number(values, FIX_STEPS, bool))
        if not isinstance(values.get(VAE), str | None):
            raise Refused(f"{VAE} must be the name of an autoencoder", param=VAE)
        return new


class OptionsOfClients:
    """The options of each client; a client that never set any has the defaults."""

    def __init__(self) -> None:
        """Starts without clients."""
        self._found: dict[str, Options] = {}
        self._lock = threading.Lock()

    def get(self, client: str) -> Options:
        """Returns a client's options."""
        return self._found.get(client, Options())

    def set(self, client: str, options: Options) -> None:
        """Sets a client's options; forgets the oldest client's where there are too many."""
        with self._lock:
            self._found.pop(client, None)
            self._found[client] = options
            if len(self._found) > _MOST_CLIENTS:
                del self._found[next(iter(self._found))]


def shown(options: Options, catalogue: Catalogue) -> dict[str, Any]:
    """Returns the options as A1111's server names them."""
    entry = catalogue.entry(options.model)
    return {
        CHECKPOINT: entry.title,
        "sd_checkpoint_hash": "",
        CLIP: (options.clip_skip or 0) + 1,
        VAE: "Automatic",
        FIX_STEPS: options.fixes_steps,
        "samples_format": "png",
        "live_previews_enable": True,
        "show_progress_every_n_steps": 1,
    }


def option_warnings(values: dict[str, Any]) -> list[str]:
    """Returns a sentence for each option that would change images in A1111, and does not here."""
    vae = values.get(VAE)
    found = (
        [] if vae in _OWN_VAE else [f"{VAE} is read over, as models bring their own (got {vae})"]
    )
    return found + [
        f"{name} is read over, which is {usual} here (got {str(values[name])[:60]})"
        for name, usual in _USUAL.items()
        if values.get(name) is not None and values[name] != usual and values[name] != str(usual)
    ]


def _number(values: dict[str, Any], name: str, kind: type) -> Any:
    """Returns a number, or true or false, which may be a text; raises Refused for others."""
    return read_fields(
        dataclasses.make_dataclass(name, [(name, kind, None)]),
        {name: values[name]},
        strict=False,
    ).__dict__[name]


def without_hash(title: str) -> str:
    """Returns a title without the hash that clients of A1111 may have kept behind it."""
    name, bracket, rest = title.rpartition(" [")
    return name if bracket and rest.endswith("]") else title


class Work:
    """One call: the jobs that it has submitted, and those that it will."""

    def __init__(self, client: str, passes: int):
        """Begins a call. passes: how often it submits jobs, one set after the other."""
        self.client, self.begun = client, time.time()
        self.passes: list[list[Job]] = []
        self._count, self.interrupted, self.skipped = passes, False, False

    def add(self, jobs: Iterable[Job]) -> None:
        """Adds the jobs of the next pass."""
        self.passes.append(list(jobs))

    @property
    def jobs(self) -> list[Job]:
        """All jobs so far."""
        return [job for jobs in self.passes for job in jobs]

    @property
    def count(self) -> int:
        """The jobs of all passes, also of those that have not begun."""
        later = len(self.passes[-1]) if self.passes and not self.interrupted else 0
        return len(self.jobs) + later * (self._count - len(self.passes))

    @property
    def progress(self) -> float:
        """The fraction that is computed of all passes."""
        done = [
            sum(1.0 if job.is_over else job.progress for job in jobs) / len(jobs)
            for jobs in self.passes
            if jobs
        ]
        return sum(done) / self._count

    def interrupt(self) -> None:
        """Ends all jobs, with the images as they are; no further pass begins."""
        self.interrupted = True
        for job in self.jobs:
            job.interrupt()

    def skip(self) -> None:
        """Ends the first job that has not ended, with the images as they are."""
        self.skipped = True
        job = next((job for job in self.jobs if not job.is_over), None)
        if job is not None:
            job.interrupt()


class Works:
    """The calls under way, oldest first."""

    def __init__(self) -> None:
        """Starts without calls."""
        self._found: list[Work] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during(self, work: Work) -> Iterator[None]:
        """Lists a call inside the context."""
        with self._lock:
            self._found.append(work)
        try:
            yield
        finally:
            with self._lock:
                self._found.remove(work)

    def of(self, client: str) -> list[Work]:
        """Returns the calls of a client."""
        with self._lock:
            return [work for work in self._found if work.client == client]


def describe_progress(works: list[Work]) -> dict[str, Any]:
    """Returns the progress of a client's calls in A1111's form, without the current image."""
    live = [job for work in works for job in work.jobs if not job.is_over]
    first = live[0] if live else None
    etas = [job.eta for job in live if job.eta is not None]
    total = sum(work.progress for work in works) / max(len(works), 1)
    jobs = [job for work in works for job in work.jobs]
    began = time.strftime("%Y%m%d%H%M%S", time.localtime(works[0].begun)) if works else "0"
    steps = first.generation.num_inference_steps or 0 if first else 0
    return {
        # 0 says that nothing is under way.
        "progress": max(total, 0.001) if works else 0.0,
        "eta_relative": max(etas) if etas else 0.0,
        "state": {
            "skipped": any(work.skipped for work in works),
            "interrupted": any(work.interrupted for work in works),
            "stopping_generation": False,
            "job": first.id if first else "",
            # A call that is being read has no jobs yet, and 0 says that nothing is under way.
            "job_count": max(sum(work.count for work in works), len(works)),
            "job_timestamp": began,
            "job_no": sum(job.is_over for job in jobs),
            "sampling_step": min(first.steps_done, steps) if first else 0,
            "sampling_steps": steps,
        },
        "textinfo": first.state if first else None,
    }


@dataclasses.dataclass(frozen=True)
class A1111:
    """The calls of A1111's clients, and what they have set."""

    works: Works = dataclasses.field(default_factory=Works)
    options: OptionsOfClients = dataclasses.field(default_factory=OptionsOfClients)


def state_of(request: Request) -> A1111:
    """Returns what the application remembers for A1111's clients."""
    return request.app.state.a1111
