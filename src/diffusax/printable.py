"""Makes text safe to print on a terminal."""


def escaped(text: object) -> str:
    """Returns the text with control characters and broken bytes of file names escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))
