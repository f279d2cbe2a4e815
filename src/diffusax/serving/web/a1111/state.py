"""What the server remembers for A1111's clients."""

import dataclasses

from starlette.requests import Request

from diffusax.serving.web.a1111.options import OptionsOfClients
from diffusax.serving.web.a1111.work import Works


@dataclasses.dataclass(frozen=True)
class A1111:
    """The calls of A1111's clients, and what they have set."""

    works: Works = dataclasses.field(default_factory=Works)
    options: OptionsOfClients = dataclasses.field(default_factory=OptionsOfClients)


def state_of(request: Request) -> A1111:
    """Returns what the application that the request came to remembers."""
    return request.app.state.a1111
