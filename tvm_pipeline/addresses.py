"""Addresses: what messages and files may show of those of cameras and brokers, and who reaches a listener.

The password of a camera stands before the host, in the query, in the path, or where a recorder's maker invented. So
`shown` does not look for secrets: it keeps what is known to be none.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

HIDDEN = "***"
# The Host of a request that names no site: `uri-host [ ":" port ]` of RFC 9110, without user, zone and escapes.
_HOST = re.compile(r"(?:(?i:localhost)|(?P<v4>[0-9.]+)|\[(?P<v6>[0-9a-fA-F:.]+)\])(?::(?P<port>[0-9]{0,5}))?")
_LONGEST = 32  # characters of a part of a path; keys and signatures are often longer
_VALUE = re.compile(r"[\w.x:-]{1,16}")
# What cameras, recorders and players ask for, which is the difference between two streams of one host.
_KEYS = frozenset(
    [
        "ch",
        "chan",
        "channel",
        "channelid",
        "cam",
        "camera",
        "camid",
        "stream",
        "streamtype",
        "subtype",
        "substream",
        "res",
        "resolution",
        "size",
        "width",
        "height",
        "fps",
        "rate",
        "framerate",
        "quality",
        "compression",
        "codec",
        "videocodec",
        "format",
        "profile",
        "cmd",
        "action",
        "type",
        "unicast",
        "proto",
        "transport",
        "mode",
        "latency",
        "timeout",
        "listen",
        "pkt_size",
    ]
)
_STREAM_KEYS = ("rtmp", "rtmps", "rtmpt", "srt")  # schemes whose path may be the key to publish or to play


def shown(address: str) -> str:
    """Return an address without its secrets; what is no address, such as a path, is returned as it is.

    Examples:
        >>> shown("rtsp://user:secret@camera/live?channel=1&token=abc")
        'rtsp://user:***@camera/live?channel=1&token=***'
        >>> shown("rtsp://camera/user=admin_password=abc_channel=1_stream=0.sdp")
        'rtsp://camera/user=***_password=***_channel=1_stream=0.sdp'
        >>> shown("rtmp://server/live/abc")
        'rtmp://server/live/***'
    """
    scheme, found, rest = address.partition("://")
    if not found or scheme.lower() == "file" or not re.fullmatch(r"[\w+.-]+", scheme):
        return address
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user = ""
    # A password with one of `/?#@` in it makes an invalid address, which a user may try: it ends at the last @.
    if "@" in authority or (":" in authority and "@" in rest):
        before, _, rest = rest.rpartition("@")
        name, has_password, _ = before.partition(":")
        user = f"{name}:{HIDDEN}@" if has_password and re.fullmatch(r"[\w.-]*", name) else f"{HIDDEN}@"
    host, path = re.fullmatch(r"([\w.:\[\]-]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    names = 1 if scheme.lower() in _STREAM_KEYS else len(path)  # how many parts without `=` may be shown
    parts = [
        part
        for piece in re.split(r"([/?#&;])", path)
        for part in (re.split(r"(_)(?=[^_=]+=)", piece) if piece.count("=") > 1 else [piece])
    ]
    kept = []
    for part in parts:
        if re.fullmatch("[/?#&;_]?", part):
            names = names if part in ("", "/") else 0  # a word of a query, without a key, may be a token
        elif "=" in part:
            key, _, value = part.partition("=")
            is_known = not value or (key.lower() in _KEYS and _VALUE.fullmatch(value))
            names, part = (names, part) if is_known else (0, f"{key}={HIDDEN}")
        else:
            names, part = (names - 1, part) if names > 0 and len(part) <= _LONGEST else (0, HIDDEN)
        kept.append(part)
    return f"{scheme}://{user}{host}{''.join(kept)}"


def has_secret(address: str) -> bool:
    """Return whether an address may hold a secret, which `shown` leaves out."""
    return shown(address) != address


def without_secrets(text: str) -> str:
    """Return a text, such as a traceback, with each address in it as `shown` has it."""
    return re.sub(r"[A-Za-z][\w+.-]*://[^\s'\"<>]+", lambda found: shown(found[0]), text)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a name or number; raise OSError where there is no such host."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(where[4][0]).partition("%")[0]).is_loopback for where in found)


def names_an_address(hosts: Sequence[str]) -> bool:
    """Return whether the Host of an HTTP request is an IP address or localhost, with or without a port, or absent.

    A page of another site may have its own name resolve to this machine, and so use a server here (DNS rebinding); its
    requests still carry the name.
    """
    if not hosts:
        return True
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if not found or int(found["port"] or 0) >= 1 << 16:
        return False
    try:
        if found["v4"]:
            ipaddress.IPv4Address(found["v4"])
        if found["v6"]:
            ipaddress.IPv6Address(found["v6"])
    except ValueError:
        return False
    return True
