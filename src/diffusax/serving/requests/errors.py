"""The errors that tell a client why it gets no images."""

import logging

from diffusax.runtime.devices.memory import is_out_of_memory

log = logging.getLogger(__name__)


class Refused(ValueError):
    """A request that cannot be met; the message names the argument, its value and the mend."""

    status = 422
    """The HTTP status that says the same."""
    code = "invalid_request"
    """A word for programs."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ):
        """Makes an error.

        Args:
            message: one sentence.
            param: the argument that it is about, a field of `Generation`.
            code: a word for programs; by default the class's.
            status: the HTTP status; by default the class's.
            retry_after: the seconds after which another attempt may succeed.
        """
        super().__init__(message)
        self.param, self.retry_after = param, retry_after
        self.code, self.status = code or self.code, status or self.status


class NotFound(Refused):
    """What was named does not exist."""

    status = 404
    code = "not_found"


class Busy(Refused):
    """The queue, or a client's part of it, is full."""

    status = 429
    code = "busy"


class Closing(Refused):
    """The server is about to end and takes no more requests."""

    status = 503
    code = "closing"


class Failed(Refused):
    """Generating failed through no fault of the arguments."""

    status = 500
    code = "failed"


class TooLate(Refused):
    """The images were not ready at the deadline."""

    status = 504
    code = "deadline"


def refusal(error: BaseException) -> Refused:
    """Turns an error into one that a client reads."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, TimeoutError):
        return TooLate(str(error))
    if isinstance(error, ValueError | TypeError):
        return Refused(str(error))
    if isinstance(error, FloatingPointError):
        return Failed(str(error), code="not_finite")
    log.error("an image failed", exc_info=error)
    if is_out_of_memory(error):
        return Failed(
            "the device has too little memory for width, height and num_frames; ask for a smaller "
            "image, or a shorter video",
            code="out_of_memory",
            status=507,
        )
    return Failed("generating failed through an error of the server; its log tells more")
