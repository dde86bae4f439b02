"""The address of a board: `HOST:PORT`, `HOST`, or `[IPv6]:PORT`."""

from __future__ import annotations

from typing import NamedTuple

from tvm_pipeline.errors import OptionError

PORT = 9190


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str = "remote") -> Address:
    """Return the address that a user gave as `option`; raise OptionError where it is none.

    >>> parse_address("localhost"), parse_address("[::1]:80")
    (Address(host='localhost', port=9190), Address(host='::1', port=80))
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_number = port.isascii() and port.isdigit() and len(port) < 6
    if (
        not bare
        or not bare.isprintable()
        or set(bare) & set(" /@[]")
        or (":" in host and bare == host)
        or not is_number
    ):
        raise OptionError(
            f"`{option}` {text!r}: give HOST, HOST:PORT or [IPv6]:PORT, such as localhost:{PORT}; without a port it is "
            f"{PORT}",
            option=option,
            value=text,
        )
    if int(port) > 65535:
        raise OptionError(f"`{option}` {text!r}: a port is at most 65535", option=option, value=text)
    return Address(bare, int(port))
