"""Why pipeline classes have no entry in the registry."""

from .catalogue import missing_pipelines
from .registry import UNMET

OF_BLOCKS = "the class is not called like the others"
REASONS: dict[str, str] = {}


def without_entry() -> dict[str, str]:
    """Names of classes without an entry, and why."""
    absent = dict.fromkeys(missing_pipelines(), "needs a package that is not installed")
    return {**absent, **UNMET, **REASONS}
