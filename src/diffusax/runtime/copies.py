"""Objects with locks and caches that can be copied and pickled."""

from typing import Any, ClassVar


class Copyable:
    """An object whose copies, and pickles, begin with locks and caches of their own.

    `fresh` names these attributes; `__init__` without arguments makes them.
    """

    fresh: ClassVar[tuple[str, ...]] = ("_lock",)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes that a copy shares or holds."""
        return {name: value for name, value in vars(self).items() if name not in self.fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).__init__(self)
        vars(self).update(state)
