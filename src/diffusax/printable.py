"""Text for a terminal."""


def escaped(text: object) -> str:
    """The text with control characters and broken bytes of file names written out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
