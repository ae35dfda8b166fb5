"""Names and addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
PROBE_SECONDS = 5.0


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.com")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_connect(address: str) -> bool:
    """Return whether a server accepts connections within `PROBE_SECONDS`; behind a proxy, assume so.

    >>> can_connect("http://127.0.0.1:9")
    False
    """
    parts = urlsplit(address)
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return True
    try:
        place = (host, parts.port or {"http": 80}.get(parts.scheme, 443))
        socket.create_connection(place, PROBE_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True
