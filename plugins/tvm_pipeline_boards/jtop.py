"""The power of a Jetson as the service of `jtop` tells it, where that runs and hwmon.py finds no rails.

The service is part of the package jetson-stats, which is not ours and never needed. It sums rails up by itself.

Source: the modules jtop.jtop and jtop.core.power of jetson_stats (`power["tot"]["power"]` in milliwatts, in versions 4
to 7). The total counts a rail that supplies another one twice, as `VDDQ_VDD2_1V8AO` of an AGX Orin.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import PowerSensor, Survey

SOCKET = "run/jtop.sock"
W_OF_MW = 1e-3


class Jtop(PowerSensor):
    """The total of `jtop`.

    Args:
        client: the class `jtop` of its package.

    Raises:
        PowerError: the service does not answer; the message says what would help.
    """

    name = "jtop"
    covers = "the board, as jtop sums its rails up"
    period_s = 1.0  # what a client asks the service for by default
    scope = "board"

    def __init__(self, client: Callable[[], Any]) -> None:
        super().__init__()
        self._make_client = client
        self._client: Any = None
        self.watts()
        self.close()

    def watts(self) -> float:
        """Return the power that is drawn now."""
        try:
            if self._client is None:
                client = self._make_client()
                client.start()
                self._client = client
            if not self._client.ok(spin=True):
                raise PowerError("jtop: its service has ended; try `sudo systemctl restart jtop`")
            milliwatts = self._client.power["tot"]["power"]
        except PowerError:
            raise
        except Exception as error:  # whatever another one's client raises: connections, versions, boards unknown to it
            raise PowerError(
                f"jtop: {type(error).__name__}: {error}; try `sudo systemctl restart jtop`, and `jtop` itself"
            ) from error
        if not isinstance(milliwatts, (int, float)) or milliwatts < 0:
            raise PowerError(f"jtop: a power of {milliwatts!r} mW")
        return milliwatts * W_OF_MW

    def close(self) -> None:
        """Leave the service."""
        if self._client is not None:
            self._client.close()
            self._client = None  # it is a thread, which starts but once


def jtop_sensors(root: Path) -> Survey:
    """Return the total of `jtop` where `root/run/jtop.sock` exists and its Python package can be imported."""
    if not (root / SOCKET).exists():
        return Survey([], {})
    try:
        module = importlib.import_module("jtop")
    except ImportError as error:
        return Survey([], {"jtop": f"its service runs, but {error}; `pip install 'tvm-pipeline[jetson]'`"})
    try:
        return Survey([Jtop(module.jtop)], {})
    except PowerError as error:
        return Survey([], {"jtop": str(error)})
