"""Bounds the pixels that requests decode, before decoding: small files may be large images."""

import contextlib
import contextvars
import threading
from collections.abc import Iterator

from diffusax.serving.requests.errors import Busy, Refused

_REQUEST: contextvars.ContextVar["_Request | None"] = contextvars.ContextVar(
    "request", default=None
)


class PixelBudget:
    """Counts the pixels of the images of all requests that are being answered."""

    def __init__(self, most_each: int, most_all: int):
        """Starts with none.

        Args:
            most_each: the most pixels of the images of one request.
            most_all: the most pixels of those of all requests at once.
        """
        self.most_each, self.most_all = most_each, most_all
        self.taken = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts what is decoded inside the context and in its threads, until it ends."""
        request = _Request(self)
        token = _REQUEST.set(request)
        try:
            yield
        finally:
            _REQUEST.reset(token)
            with self._lock:
                self.taken -= request.taken

    def take(self, request: "_Request", pixels: int, param: str) -> None:
        """Counts the pixels of an image; see `take_pixels`."""
        with self._lock:
            own, every = request.taken + pixels, self.taken + pixels
            if own > self.most_each:
                raise Refused(
                    f"the images of a request must have at most {self.most_each} pixels together "
                    f"({param} makes them {own}); send fewer or smaller ones",
                    param=param,
                    status=413,
                    code="picture_too_large",
                )
            if every > self.most_all:
                raise Busy(
                    f"the images of all requests under way have {self.taken} pixels, and with "
                    f"{param} more than {self.most_all}; ask again later, or send smaller ones",
                    param=param,
                    retry_after=2.0,
                )
            request.taken, self.taken = own, every


class _Request:
    """The pixels of one request."""

    def __init__(self, budget: PixelBudget):
        self.budget, self.taken = budget, 0


def take_pixels(pixels: int, param: str) -> None:
    """Counts an image that is about to be decoded; outside a request nothing is counted.

    Args:
        pixels: its width times its height.
        param: the name of the argument, for errors.

    Raises:
        Refused: the images of the request have too many pixels together.
        Busy: those of all requests have.
    """
    request = _REQUEST.get()
    if request is not None:
        request.budget.take(request, pixels, param)
