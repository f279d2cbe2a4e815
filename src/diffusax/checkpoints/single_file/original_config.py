"""Reads what the YAML file of the original code says that the tensors do not: the prediction."""

from pathlib import Path
from typing import Any

from diffusax.boundary.files import read_text
from diffusax.boundary.messages import require_extra

_MAX_BYTES = 2**20


def prediction_of(original_config: Any) -> str | None:
    """Returns the prediction type in a config of the original code; None where it is not given.

    original_config: the path of a YAML file, its parsed contents, or None. Channels, widths and
    layers are read from the tensors instead.

    Raises:
        ValueError: it cannot be read, or is not one of latent diffusion.
        ImportError: PyYAML is missing.
    """
    if original_config is None:
        return None
    data = original_config if isinstance(original_config, dict) else _parsed(original_config)
    model = data.get("model") if isinstance(data, dict) else None
    params = model.get("params") if isinstance(model, dict) else None
    if not isinstance(params, dict):
        raise ValueError(
            "original_config must be a config of Stable Diffusion's original code, with model: "
            "params:; leave it out, or pass prediction_type="
        )
    if "denoiser_config" in params:  # SDXL's, github.com/Stability-AI/generative-models
        return "v_prediction" if "VScaling" in str(params["denoiser_config"]) else "epsilon"
    return "v_prediction" if params.get("parameterization", "eps") == "v" else "epsilon"


def _parsed(path: Any) -> Any:
    if not isinstance(path, str | Path) or "://" in str(path):
        raise ValueError(
            f"original_config must be the path of a YAML file (got {path!r}); download it, leave "
            "it out, or pass prediction_type="
        )
    text = read_text(Path(path).expanduser(), _MAX_BYTES)
    yaml = require_extra("yaml", "train")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML ({reason}); leave it out") from None
