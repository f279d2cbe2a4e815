"""A server: jobs that share running batches, and the catalogue of models that they name.

`requests` says what clients can ask for, `catalogue` finds and loads models, `engine` owns the
device, and `web` speaks HTTP.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusax.serving.catalogue.catalogue import Catalogue as Catalogue
    from diffusax.serving.client import Client as Client
    from diffusax.serving.engine.engine import Engine as Engine
    from diffusax.serving.engine.engine import EngineSettings as EngineSettings
    from diffusax.serving.requests.generation import Control as Control
    from diffusax.serving.requests.generation import Generation as Generation
    from diffusax.serving.web.security import WebSettings as WebSettings
    from diffusax.serving.web.server import create_app as create_app
    from diffusax.serving.with_ray import application as application

# A client needs neither JAX nor the web's libraries, and an engine not the latter.
_MODULES = {
    "Catalogue": "catalogue.catalogue",
    "Client": "client",
    "Control": "requests.generation",
    "Engine": "engine.engine",
    "EngineSettings": "engine.engine",
    "Generation": "requests.generation",
    "WebSettings": "web.security",
    "application": "with_ray",
    "create_app": "web.server",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
