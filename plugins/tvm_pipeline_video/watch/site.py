"""Pages and figures over HTTP, for people and Prometheus, by starlette and uvicorn.

A browser cannot send a token in a header for a page, so the page alone also takes `/?token=TOKEN`. Pages of other sites
may link to these, and can neither embed nor read them. Nothing is written and no file of the machine can be reached.
Read next: server.py, which answers for a pipeline; http_server.py, who may ask.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.http_server import answering, check_address, listening, refusal

SHORTEST_TOKEN = 16

Reply = tuple[HTTPStatus, str, bytes]  # status, content type, body

# The page may run its own scripts, draw, and make requests to this server; nothing else.
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
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
        check_address("watch", address, port, needed="" if token else "give a `token`")
        self._token, self._at = token, listening("watch", address, port)
        host, port = self._at.getsockname()[:2]
        self.url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
        self._running = ExitStack()

    @abstractmethod
    def answer(self, path: str, query: str, headers: Headers) -> Reply:
        """Return the answer to a GET that may be answered."""

    def start(self) -> None:
        """Start to answer."""
        self._running.enter_context(answering(self._respond, self._at, "watch", brief=True))

    def stop(self) -> None:
        """End it and free the port. It may be called twice."""
        self._running.close()
        self._at.close()

    def __enter__(self: _Site) -> _Site:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as an ASGI application."""
        status, content_type, body = await run_in_threadpool(self._reply, scope)
        response = Response(body, status, HEADERS | {"Content-Type": content_type})
        if status is HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _reply(self, scope: Any) -> Reply:
        path, query, headers = scope["path"], scope["query_string"].decode("latin-1"), Headers(scope=scope)
        if scope["method"] != "GET":
            return text_reply(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
        try:
            return self._refused(path, query, headers) or self.answer(path, query, headers)
        except Exception as error:  # the next request may succeed
            _log.warning("cannot answer %s", path, exc_info=True)
            return text_reply(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _refused(self, path: str, query: str, headers: Headers) -> Reply | None:
        """Return the refusal of a request, None if it may be answered."""
        # A browser says so where a page of another site embeds or fetches what is here; it may still link here.
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return text_reply(HTTPStatus.FORBIDDEN, "pages of other sites may not use this server")
        if path == "/" and "authorization" not in headers and (given := parse_qs(query).get("token")):
            headers = MutableHeaders(headers)
            headers["Authorization"] = f"Bearer {given[0]}"
        if refused := refusal(headers, self._token):
            status, reason = refused
            return text_reply(HTTPStatus(status), f"{reason}; the page takes /?token=" if status == 401 else reason)
        return None


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


def metrics_reply(registry: CollectorRegistry, headers: Headers) -> Reply:
    """Return the metrics of a registry of prometheus_client, in the format that the client accepts."""
    encode, content_type = choose_encoder(headers.get("accept", ""))
    return HTTPStatus.OK, content_type, encode(registry)


def text_reply(status: HTTPStatus, content: str) -> Reply:
    return status, "text/plain; charset=utf-8", f"{content}\n".encode()
