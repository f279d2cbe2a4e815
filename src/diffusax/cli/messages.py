"""What commands that train, or read a training data set, show of its messages."""

import logging
import sys

from tqdm.auto import tqdm


def show_messages() -> None:
    """Shows the messages of training and its data on stderr, not only warnings."""
    logger = logging.getLogger("diffusax.training")
    logger.setLevel(logging.INFO)
    # Libraries that a run imports set up the root logger, which would repeat every message.
    logger.propagate = False
    if not logger.handlers:
        handler = _AboveTheBar()
        handler.setFormatter(logging.Formatter("diffusax: %(message)s"))
        logger.addHandler(handler)


class _AboveTheBar(logging.Handler):
    """Writes lines to stderr, above a progress bar if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)
