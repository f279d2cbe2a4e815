"""What of the package's metadata depends on where its repository is, which no file of it says.

`DIFFUSAX_HOME=https://... python -m build` enters the addresses of the repository, and makes the
README's links to its files absolute, because an index of packages shows the README alone. Without
an address the README's own pictures and links become their texts.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Adds the readme and the URLs."""

    def update(self, metadata: dict) -> None:
        """Adds to the metadata of pyproject.toml."""
        home = os.environ.get("DIFFUSAX_HOME", "").rstrip("/")
        text = absolute(Path(self.root, "README.md").read_text("utf-8"), home)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(home)


def urls(home: str) -> dict[str, str]:
    """Returns the project's addresses; none without that of the repository."""
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


def absolute(readme: str, home: str) -> str:
    """Returns a README whose links to files are absolute, or their texts without an address."""

    def changed(match: re.Match) -> str:
        picture, text, path = match.groups()
        if home:
            return f"{picture}[{text}]({home}/{'raw' if picture else 'blob'}/main/{path})"
        return f"*{text}*" if picture else text

    # A link's text may span lines, but not be a link itself.
    return _LINK.sub(changed, readme)
