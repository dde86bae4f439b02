"""HTTP by uvicorn in a thread: where a server may listen, who may ask it, and how long a client may take.

At a loopback address every client is answered; any other address needs a token, sent as `Authorization: Bearer TOKEN`.
There is no TLS: beyond a trusted network, put a proxy in front. Read next: watch/site.py (pages) and
service/inference_http.py (arrays).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tvm_pipeline import PipelineError
from tvm_pipeline.addresses import is_loopback, names_an_address
from tvm_pipeline.errors import OptionError

try:
    import uvicorn
    from starlette.datastructures import Headers
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise PipelineError(
        f"a server needs an extra: pip install 'tvm-pipeline[watch]', or 'tvm-pipeline[kserve]' for inference ({error})"
    ) from error

MOST_CONNECTIONS = 32  # a faulty client must not take the machine from the pipeline
LARGEST_HEAD = 16 * 1024  # bytes of a request before its body
OLD_S = 0.5  # a connection of this age makes room for a new one
STOP_S = 1  # that the answers on their way have when a server stops


class RequestError(PipelineError):
    """A request that makes no sense; `status` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_address(option: str, host: str, port: int, *, needed: str) -> None:
    """Raise OptionError where no server may listen: the address is none, or other machines reach it.

    Args:
        option: the name of the option that gives it.
        needed: what it needs where other machines reach it; empty where it has all that.
    """
    where = f"`{option}` {host}:{port}"
    if not 0 <= port < 1 << 16:
        raise OptionError(f"{where}: a port is a number from 0 to 65535", option=option, value=port)
    try:
        resolved = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{where}: this machine knows no such address ({error}); try 127.0.0.1", option=option
        ) from error
    # The resolved address counts, not the text that was given.
    if needed and not is_loopback(resolved):
        raise OptionError(
            f"{where}: other machines reach this address: {needed}, or listen on 127.0.0.1", option=option
        )


def listening(option: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens there; raise OptionError where it cannot."""
    try:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.create_server(found, family=family)
    except OSError as error:
        todo = "give another address"
        if error.errno == errno.EADDRINUSE:
            todo = "another program listens there: stop it, or give another port (0 takes any free one)"
        raise OptionError(
            f"`{option}` {host}:{port}: cannot listen ({error.strerror}); {todo}", option=option
        ) from error
    # Connections inherit it. asyncio sets it for sockets of another kind alone; without it each answer waits 40 ms.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def has_token(authorization: str, token: str | None) -> bool:
    """Return whether the header of a request carries the token; every request does where there is none."""
    scheme, _, given = authorization.partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), (token or "").encode())
    return not token or (scheme.lower() == "bearer" and right)


def refusal(headers: Headers, token: str | None) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused; None where it may be answered.

    It is refused without the token, and without one, if it names a site (see `names_an_address`).
    """
    if not has_token(headers.get("authorization", ""), token):
        return 401, "send the token of this server as `Authorization: Bearer TOKEN`"
    if not token and not names_an_address(headers.getlist("host")):
        return 403, "ask for this server by its address or as localhost, or give it a token"
    return None


class Brief(H11Protocol):  # type: ignore[misc,unused-ignore]
    """A connection for one request, which ends after `LONGEST_S`, and makes room for others where there are many.

    Slow clients can thus not keep others out. The answer must carry `Connection: close`.
    """

    LONGEST_S = 20.0
    _end: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.began_s = time.monotonic()
        self._end = self.loop.call_later(self.LONGEST_S, transport.abort)
        if len(self.connections) > MOST_CONNECTIONS:
            oldest: Any = min(self.connections, key=lambda one: one.began_s)
            is_old = self.began_s - oldest.began_s >= OLD_S
            self.connections.discard(oldest if is_old else self)
            (oldest.transport if is_old else transport).abort()

    def eof_received(self) -> bool:
        """Return whether the connection stays open: a client that has said all may wait for its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


@contextmanager
def answering(app: Any, at: socket.socket, name: str, *, brief: bool = False) -> Iterator[None]:
    """Let an ASGI application answer at a socket, in a thread, while the block lasts; the socket is closed after it.

    Args:
        name: of the thread.
        brief: connections are `Brief`.
    """
    config = uvicorn.Config(
        app,
        http=Brief if brief else "auto",
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=STOP_S,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]}, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        at.close()
