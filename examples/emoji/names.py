"""The emoji's names and the backgrounds, for the data sets of pictures and of edits."""

import re
from collections.abc import Iterator
from pathlib import Path

BACKGROUNDS = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "gray": (150, 150, 150),
    "red": (214, 40, 40),
    "orange": (245, 130, 32),
    "yellow": (250, 220, 60),
    "green": (60, 160, 70),
    "blue": (50, 100, 210),
    "purple": (130, 60, 170),
    "pink": (248, 160, 190),
}

# Signs and letters rather than pictures of something.
LEFT_OUT_GROUPS = ("Symbols", "Component")
# Near copies: flags of countries, couples and families by their members, people by their hair, and
# the hours of the clock.
LEFT_OUT_SUBGROUPS = ("country-flag", "subdivision-flag")
LEFT_OUT_NAMES = re.compile(
    r"skin tone|^(family|kiss|couple with heart|person|man|woman): |o’clock$|-thirty$"
)


def emoji_names(path: Path) -> Iterator[tuple[str, str]]:
    """(emoji, name) from Unicode's emoji-test.txt, whose names are CLDR's."""
    group = subgroup = ""
    found: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# group: "):
            group = line.removeprefix("# group: ")
        if line.startswith("# subgroup: "):
            subgroup = line.removeprefix("# subgroup: ")
        match = re.fullmatch(r"([0-9A-F ]+?) +; fully-qualified +# \S+ E[\d.]+ (.+)", line)
        if match is None or group in LEFT_OUT_GROUPS or subgroup in LEFT_OUT_SUBGROUPS:
            continue
        name = match[2].lower()
        if not LEFT_OUT_NAMES.search(name):
            found[name] = "".join(chr(int(code, 16)) for code in match[1].split())
    for name, emoji in found.items():
        if not found.keys() & without_gender(name):
            yield emoji, name


def without_gender(name: str) -> set[str]:
    """What the same emoji would be called of a person: "pilot" for "woman pilot"."""
    role = re.sub(r"^(man|woman|men|women) ", "", name)
    return {role, f"person {role}", f"people {role}"} - {name}


def article(name: str) -> str:
    """The name as one would say it."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
