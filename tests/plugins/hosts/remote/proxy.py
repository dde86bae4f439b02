"""A port in front of another one, whose links a test cuts, holds silent and counts."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Forward each connection to a port of this machine.

    Attributes:
        up, down: bytes from clients, and to them.
        cut_up, cut_down: cut all links once so many bytes more have passed; None for never.
        is_refusing: cut each link as it comes.
        refuses_after_cut: it is refusing after `cut_up` or `cut_down`.
        delay_s: before each piece is passed on.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.up = self.down = self.links = 0
        self.cut_up: int | None = None
        self.cut_down: int | None = None
        self.is_refusing, self.delay_s = False, 0.0
        self.refuses_after_cut = False
        self._held: set[socket.socket] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all links."""
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def hold(self) -> None:
        """Pass nothing on of the present links, and do not break them either."""
        self._held |= {end for pair in self._pairs for end in pair}

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing:
                client.close()
                continue
            self.links += 1
            try:
                board = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, board))
            for source, sink, way in ((client, board, "up"), (board, client, "down")):
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        while True:
            try:
                piece = source.recv(1 << 16)
                if not piece:
                    raise ConnectionResetError
                while source in self._held:
                    time.sleep(0.02)
                time.sleep(self.delay_s)
                limit = getattr(self, f"cut_{way}")
                sink.sendall(piece if limit is None else piece[:limit])
                setattr(self, way, getattr(self, way) + len(piece))
                if limit is not None:
                    setattr(self, f"cut_{way}", limit - len(piece))
                    if len(piece) >= limit:
                        self.is_refusing = self.refuses_after_cut
                        setattr(self, f"cut_{way}", None)
                        self.cut()
            except OSError:
                for end in (source, sink):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                return
