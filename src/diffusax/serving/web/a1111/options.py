"""The options that A1111's clients read and set: the model and clip skip, for each client."""

import dataclasses
import threading
from typing import Any

from diffusax.serving.catalogue import Catalogue
from diffusax.serving.errors import Refused

CHECKPOINT, CLIP, VAE = "sd_model_checkpoint", "CLIP_stop_at_last_layers", "sd_vae"
_OWN_VAE = ("Automatic", "None", "automatic", "none", "", None)
_MOST_CLIENTS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a client has set."""

    model: str = ""
    clip_skip: int | None = None

    def changed(self, values: dict[str, Any], catalogue: Catalogue) -> "Options":
        """Returns the options with these values; names that are not known are read over.

        Raises:
            Refused: the model is not listed, or a value is not possible.
        """
        new = self
        name = values.get(CHECKPOINT)
        if isinstance(name, str) and name:
            new = dataclasses.replace(new, model=catalogue.entry(_without_hash(name)).name)
        elif name not in (None, ""):
            raise Refused(f"{CHECKPOINT} must be the title of a model", param=CHECKPOINT)
        if CLIP in values:
            layers = values[CLIP]
            whole = isinstance(layers, int | float) and not isinstance(layers, bool)
            if not whole or layers != int(layers) or not 1 <= layers <= 100:
                raise Refused(
                    f"{CLIP} must be a whole number from 1 to 100 (got {str(layers)[:60]!r})",
                    param=CLIP,
                )
            # A1111 counts the layer at which to stop, and 1 is the last.
            new = dataclasses.replace(new, clip_skip=int(layers) - 1 or None)
        vae = values.get(VAE)
        if not isinstance(vae, str | None) or vae not in _OWN_VAE:
            raise Refused(f'{VAE} must be "Automatic" here, as models bring their own', param=VAE)
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
        """Sets a client's options, and forgets those of who came first of too many."""
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
        "samples_format": "png",
        "live_previews_enable": True,
        "show_progress_every_n_steps": 1,
    }


def _without_hash(title: str) -> str:
    """Returns a title without the hash that clients of A1111 may have kept behind it."""
    name, bracket, rest = title.rpartition(" [")
    return name if bracket and rest.endswith("]") else title
