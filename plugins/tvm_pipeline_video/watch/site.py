"""An HTTP server for people and Prometheus: who may make requests, and within which limits.

At a loopback address every client is answered; any other address needs a token, sent as `Authorization: Bearer TOKEN`.
A browser cannot send that header for a page, so the page alone also takes `/?token=TOKEN`. Pages of other sites may
link to these, and can neither embed nor read them. There is no TLS: beyond a trusted network, put a proxy in front.
Nothing is written and no file of the machine can be reached.
Read next: server.py, which answers for a pipeline.
"""

from __future__ import annotations

import errno
import hmac
import io
import logging
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tvm_pipeline.addresses import is_loopback, names_an_address
from tvm_pipeline.errors import OptionError

MOST_CONNECTIONS = 32  # a faulty client must not take the machine from the pipeline
LARGEST_REQUEST = 16 * 1024  # bytes, its headers among them; a body is never read
REQUEST_S = 10.0  # that a client has for sending its request, and again for taking the answer
OLD_S = 0.5  # a connection of this age makes room for a new one
MAKES_ROOM_S = 0.5  # how long that may take
SHORTEST_TOKEN = 16
STOP_S = 0.1  # how long `stop` may wait

Reply = tuple[HTTPStatus, str, bytes]  # status, content type, body

# The page may run its own scripts, draw, and make requests to this server; nothing else.
SECURITY = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src blob: data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_log = logging.getLogger(__name__)
_Site = TypeVar("_Site", bound="Site")


class Site(ABC):
    """Answers requests in threads of its own. Use it as a context manager, which stops them.

    Args:
        address: where to listen; an address that is not loopback needs a token.
        port: 0 takes any free one; `url` says which.
        token: the secret that a client must send; at least 16 characters of ASCII, no blanks.

    Raises:
        OptionError: it cannot listen there, or the token is missing or unfit.
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 0, *, token: str | None = None) -> None:
        if token is not None and not re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", token):
            raise OptionError(
                f"`token`: give {SHORTEST_TOKEN} characters or more, plain ASCII without blanks, such as "
                "`python -c 'import secrets; print(secrets.token_urlsafe())'` prints",
                option="token",
            )
        self._token = token
        self._server = _listen(address, port, self, guarded=token is not None)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(STOP_S,), name="watch", daemon=True)

    @abstractmethod
    def answer(self, path: str, query: str, headers: Message) -> Reply:
        """Return the answer to a GET that may be answered."""

    @property
    def url(self) -> str:
        """Return the address of the page, without its token."""
        host, port = self._server.server_address[:2]
        host = str(host)
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End it and free the port. It may be called twice."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self: _Site) -> _Site:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def reply(self, target: str, headers: Message) -> Reply:
        """Return the answer to a GET of `target`, such as `/trace?seconds=2`."""
        path, _, query = target.partition("?")
        return self._refused(path, query, headers) or self.answer(path, query, headers)

    def _refused(self, path: str, query: str, headers: Message) -> Reply | None:
        """Return the refusal of a request, None if it may be answered."""
        # A browser says so where a page of another site embeds or fetches what is here; it may still link here.
        if headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            return text_reply(HTTPStatus.FORBIDDEN, "pages of other sites may not use this server")
        if self._token is None:
            if names_an_address(headers.get_all("Host", [])):
                return None
            return text_reply(
                HTTPStatus.FORBIDDEN, "ask for this server by its address or as localhost, or give it a token"
            )
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = parse_qs(query).get("token", [""])[0] if path == "/" else ""
        if hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode()):
            return None
        return text_reply(
            HTTPStatus.UNAUTHORIZED,
            "send the token of this server as `Authorization: Bearer TOKEN`; the page takes /?token=",
        )


class _Server(ThreadingMixIn, TCPServer):
    """As `http.server.ThreadingHTTPServer`, but without name look-ups and with a limit of connections."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, family: socket.AddressFamily, address: tuple[Any, ...], site: Site) -> None:
        self.address_family, self.site = family, site
        self._capacity = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._connections: dict[socket.socket, float] = {}  # and when each began; the oldest first
        self._lock = threading.Lock()  # over these
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if self._capacity.acquire(blocking=False):
            return True
        return self._make_room() and self._capacity.acquire(timeout=MAKES_ROOM_S)

    def _make_room(self) -> bool:
        """Hang up on the client that is connected for longest; return False where none is for long.

        Slow clients can thus not keep others out.
        """
        with self._lock:
            oldest = next(iter(self._connections), None)
            if oldest is None or time.monotonic() - self._connections[oldest] < OLD_S:
                return False
            del self._connections[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = time.monotonic()
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            with self._lock:  # before it is closed, and its number is another one's
                self._connections.pop(request, None)
            self.shutdown_request(request)
            self._capacity.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("client %s", client_address, exc_info=True)  # most often the client has hung up


def _listen(address: str, port: int, site: Site, *, guarded: bool) -> _Server:
    """Return a server bound to the address; raise OptionError if that fails, or it is open without a token."""
    where = f"`watch` {address}:{port}"
    if not 0 <= port < 1 << 16:
        raise OptionError(f"{where}: a port is a number from 0 to 65535", option="watch", value=port)
    try:
        family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{where}: this machine knows no such address ({error}); try 127.0.0.1", option="watch"
        ) from error
    # The resolved address counts, not the text that was given.
    if not guarded and not is_loopback(str(found[0])):
        raise OptionError(
            f"{where}: other machines can reach this address; give a `token`, or listen on 127.0.0.1", option="watch"
        )
    try:
        return _Server(family, found, site)
    except OSError as error:
        todo = "give another address"
        if error.errno == errno.EADDRINUSE:
            todo = "another program listens there: stop it, or give another port (0 takes any free one)"
        raise OptionError(f"{where}: cannot listen ({error.strerror}); {todo}", option="watch") from error


class _Handler(BaseHTTPRequestHandler):
    """One request; the standard library refuses all methods but GET."""

    server: _Server
    timeout = REQUEST_S
    server_version, sys_version = "tvm-pipeline", ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = _Request(_Incoming(self.connection))

    def do_GET(self) -> None:
        try:
            status, content_type, body = self.server.site.reply(self.path, self.headers)
        except Exception as error:  # the next request may succeed
            _log.warning("cannot answer %s", self.path.partition("?")[0], exc_info=True)
            status, content_type, body = text_reply(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
            )
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.connection.settimeout(REQUEST_S)
        for name, value in {"Content-Type": content_type, "Content-Length": str(len(body)), **SECURITY}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, because the address of the page contains the token."""


class _Incoming(io.RawIOBase):
    """What a client sends, within `REQUEST_S`, however small the pieces are."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._until_s = connection, time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Request(io.BufferedReader):
    """The data of a client, up to a limit; that of the standard library is 6 MB."""

    _left = LARGEST_REQUEST

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("request")
        return line


def json_reply(status: HTTPStatus, content: Any) -> Reply:
    return status, "application/json", msgspec.json.encode(content, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Return a value that msgspec does not know as one that it does; events may hold anything."""
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Mapping) else str(value)


def page_reply(package: str | None, name: str) -> Reply:
    """Return a page that is a file of a package."""
    return HTTPStatus.OK, "text/html; charset=utf-8", files(package or "").joinpath(name).read_bytes()


def metrics_reply(registry: CollectorRegistry, headers: Message) -> Reply:
    """Return the metrics of a registry of prometheus_client, in the format that the client accepts."""
    encode, content_type = choose_encoder(headers.get("Accept", ""))
    return HTTPStatus.OK, content_type, encode(registry)


def text_reply(status: HTTPStatus, content: str) -> Reply:
    return status, "text/plain; charset=utf-8", f"{content}\n".encode()
