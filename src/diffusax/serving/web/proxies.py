"""What proxies that are trusted say of a request: its client's address, the scheme and the host."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
_PAIR = re.compile(r'\s*([a-z]+)\s*=\s*("(?:\\.|[^"\\])*"|[^\s;,"]*)\s*(?:;|$)', re.I)
_PARTS = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^",])+')
_MOST_HOPS = 32
"""The proxies, from the nearest on, that are looked at."""


class Hop(NamedTuple):
    """What a proxy says of the request that it was sent."""

    address: Address | None
    """Whose request it was; None where the proxy does not tell."""
    scheme: str = ""
    host: str = ""


class Proxies:
    """The proxies whose headers are believed."""

    def __init__(self, trusted: Iterable[str]):
        """Trusts addresses and networks, such as 127.0.0.1 and 10.0.0.0/8.

        Raises:
            ValueError: one is neither.
        """
        self._networks: list[Network] = []
        for text in trusted:
            try:
                self._networks.append(ipaddress.ip_network(text.strip(), strict=False))
            except ValueError:
                raise ValueError(
                    f"--proxy-headers must be an address or a network, such as 10.0.0.0/8 "
                    f"(got {text!r})"
                ) from None

    def trusts(self, address: str) -> bool:
        """Returns whether an address is a trusted proxy's."""
        found = _address(address)
        return found is not None and self._trusts(found)

    def seen(self, scope: Scope) -> Scope:
        """Returns a request's scope with the client, the scheme and the host that proxies tell.

        The client is the last address on the way that no trusted proxy has, as anybody can write
        what stands before it.

        Args:
            scope: the request's, which is left as it is.
        """
        peer = (scope.get("client") or ("", 0))[0]
        if not self._networks or not self.trusts(peer):
            return scope
        hops = _hops(Headers(scope=scope))
        outermost: Hop | None = None
        for hop in reversed(hops[-_MOST_HOPS:]):
            if hop.address is None:
                break
            outermost = hop
            if not self._trusts(hop.address):
                break
        # A proxy that tells no address may still tell how it was asked.
        told = outermost or (hops[-1] if hops else None)
        if told is None:
            return scope
        changed: dict[str, Any] = {**scope}
        if told.address is not None:
            changed["client"] = (str(told.address), 0)
        if told.scheme in ("http", "https"):
            changed["scheme"] = told.scheme
        if _HOST.fullmatch(told.host):
            changed["headers"] = list(scope["headers"])
            MutableHeaders(scope=changed)["host"] = told.host
        return changed

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _hops(headers: Headers) -> list[Hop]:
    """Returns what the proxies on the way say, the nearest last."""
    addresses = _listed(headers.getlist("x-forwarded-for"))
    schemes = _listed(headers.getlist("x-forwarded-proto"))
    hosts = _listed(headers.getlist("x-forwarded-host"))
    if addresses or schemes or hosts:
        count = max(len(addresses), 1)
        found = [_address(text) for text in addresses] or [None]
        each = zip(found, _aligned(schemes, count), _aligned(hosts, count))
        return [Hop(address, scheme.lower(), host) for address, scheme, host in each]
    return [_forwarded(part) for value in headers.getlist("forwarded") for part in _split(value)]


def _listed(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _aligned(values: list[str], count: int) -> list[str]:
    """Returns one value for each hop: its own, or else the nearest proxy's."""
    return values if len(values) == count else [values[-1] if values else ""] * count


def _split(value: str) -> list[str]:
    """Returns the elements of a header Forwarded, whose quoted texts may hold commas."""
    return [part for part in _PARTS.findall(value) if part.strip()]


def _forwarded(element: str) -> Hop:
    """Reads one element of a header Forwarded (RFC 7239)."""
    pairs = {name.lower(): _unquoted(value) for name, value in _PAIR.findall(element)}
    scheme, host = pairs.get("proto", "").lower(), pairs.get("host", "")
    return Hop(_address(pairs.get("for", "")), scheme, host)


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value[:1] == '"' else value


def _address(text: str) -> Address | None:
    """Returns an address that may have a port; None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found
