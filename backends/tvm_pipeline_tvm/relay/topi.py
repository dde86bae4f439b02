"""Put functions of ours in the place of TOPI's while a build runs.

TOPI finds its schedules through names in its own modules, and there is no other door into them. `int8.py` replaces
intrinsics, and kernels of a guest replace schedules (`kernel_sets.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Replacement:
    """Functions of ours by (module of `tvm.topi.x86`, name), active in the blocks of `active`.

    The module "" is the package itself, where Relay looks up what it calls, and ".nn" is `tvm.topi.nn`.
    Several threads may build at once: the last one restores TOPI.
    """

    def __init__(self, ours: Mapping[tuple[str, str], Any]) -> None:
        self._ours = ours
        self._lock = threading.Lock()
        self._builds = 0
        self._stock: dict[tuple[str, str], Any] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace TOPI's functions until the block ends."""
        with self._lock:
            self._builds += 1
            if self._builds == 1:
                for (module, name), function in self._ours.items():
                    self._stock[module, name] = getattr(_module(module), name)
                    setattr(_module(module), name, function)
        try:
            yield
        finally:
            with self._lock:
                self._builds -= 1
                if self._builds == 0:
                    for (module, name), function in self._stock.items():
                        setattr(_module(module), name, function)

    @property
    def is_active(self) -> bool:
        """Whether a build runs that these functions serve."""
        return self._builds > 0

    def stock(self, module: str, name: str) -> Any:
        """Return TOPI's own function; only while replaced."""
        return self._stock[module, name]


def _module(name: str) -> Any:
    # import_module, since some modules of TOPI are hidden behind functions of the same name
    return import_module(f".{name}", "tvm.topi.x86")
