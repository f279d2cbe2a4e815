"""The errors that tell a client why it gets no images."""


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
