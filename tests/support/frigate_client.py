"""A client of Frigate's ZMQ protocol, written from what its plug-in `zmq` sends and takes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

ROWS = (20, 6)


class FrigateClient:
    """One detector of Frigate: it asks whether its model is there, and then sends one picture after another.

    Args:
        timeout_ms: for an answer; Frigate's is 200, and tests on busy machines wait for longer.
    """

    def __init__(self, endpoint: str, timeout_ms: int = 30_000) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def ask(self, *parts: bytes) -> list[bytes]:
        """Send these parts, and return the parts of the answer."""
        self._socket.send_multipart(parts)
        return self._socket.recv_multipart()

    def asks_for(self, name: str) -> bool:
        """Return whether a model of this name is there and loaded."""
        (answer,) = self.ask(json.dumps({"model_request": True, "model_name": name}).encode())
        told = json.loads(answer)
        return told["model_available"] and told["model_loaded"]

    def detect(self, tensor: NDArray[Any], **header: Any) -> tuple[NDArray[np.float32], str]:
        """Return the rows for a tensor, and the error if the server tells one; `header` replaces what is sent."""
        sent = {"shape": tensor.shape, "dtype": tensor.dtype.name, "model_type": "yologeneric", **header}
        told, data = self.ask(json.dumps(sent).encode(), tensor.tobytes())
        about = json.loads(told)
        rows = np.frombuffer(data, about["dtype"]).reshape(about["shape"])
        assert rows.shape == ROWS
        assert rows.dtype == np.float32
        return rows, about.get("error", "")

    def __enter__(self) -> FrigateClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
