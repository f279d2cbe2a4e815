"""API keys, as Bearer tokens or as the password of HTTP Basic."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence


def key_of(authorization: str, keys: Sequence[str]) -> str | None:
    """Returns the key that an Authorization header has, or None where it has none of them.

    With Basic, the password is the key, or "user:password" is. Every key is compared in constant
    time, so that the time tells nothing.
    """
    kind, _, value = authorization.partition(" ")
    value = value.strip()
    candidates: list[str] = []
    if kind.lower() == "bearer":
        candidates = [value]
    elif kind.lower() == "basic":
        try:
            pair = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError):
            return None
        candidates = [pair, pair.partition(":")[2]]
    found = None
    for key in keys:
        for candidate in candidates:
            if hmac.compare_digest(key.encode(), candidate.encode()):
                found = key
    return found


def client_name(key: str) -> str:
    """Returns a name for a key, from which the key does not follow."""
    return "key-" + hashlib.sha256(b"diffusax " + key.encode()).hexdigest()[:12]
