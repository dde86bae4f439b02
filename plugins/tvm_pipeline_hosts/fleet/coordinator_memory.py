"""What a coordinator must not forget when it is started again: which numbers were given, the plan, the known hosts.

    memory = CoordinatorMemory(Path("coordinator.json"))
    memory.number()    # greater than every number that any coordinator with this file has given

Epochs and versions of orders are such numbers. The file has a number that is greater than all that were given, so that
it is written once for many of them. What runs where is not in it: hosts tell that.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.files import replacing
from tvm_pipeline_hosts.fleet.messages import FleetPlan

BLOCK = 100_000  # numbers that a write allows

_log = logging.getLogger(__name__)


class _Content(msgspec.Struct):
    ceiling: int = 0
    plan: FleetPlan | None = None
    known: list[str] = []
    leaving: list[str] = []


class CoordinatorMemory:
    """A small file, written whole; with `path` None nothing outlives the object.

    Attributes:
        plan: the last that was followed.
        known: hosts that were heard since the plan was followed.
        leaving: hosts outside the plan that may have had cameras when it was followed.
        problem: why the file cannot be read or written; empty where it can.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.problem = ""
        self._path = path
        content = self._read(path) if path else _Content()
        self._number = self._ceiling = content.ceiling
        self.plan, self.known, self.leaving = content.plan, set(content.known), set(content.leaving)

    def number(self) -> int:
        """Return a number greater than all before."""
        self._number += 1
        if self._number >= self._ceiling and not self.problem:
            self.write()
        return self._number

    def above(self, heard: int) -> None:
        """Have every later number be greater than this one, which a host has told."""
        self._number = max(self._number, heard)

    def look(self) -> None:
        """Write the file where it could not be written, or read, before; to be called now and then."""
        if self.problem:
            self.write()

    def write(self) -> None:
        """Write the file. Where that fails, `problem` says so, and `look` tries again."""
        if self._path is None:
            self._ceiling = self._number + BLOCK
            return
        content = _Content(self._number + BLOCK, self.plan, sorted(self.known), sorted(self.leaving))
        try:
            with replacing(self._path) as temporary:
                temporary.touch(0o600)  # sources hold passwords
                temporary.write_bytes(msgspec.json.encode(content))
        except (PipelineError, OSError) as error:
            self.problem = f"the coordinator's memory: {error}"
            _log.warning("%s", self.problem)
        else:
            self.problem, self._ceiling = "", content.ceiling

    def _read(self, path: Path) -> _Content:
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return _Content()
        except (OSError, *DAMAGED) as error:
            self.problem = f"the coordinator's memory {path} is left out ({error}); hosts tell what they run"
            _log.warning("%s", self.problem)
            return _Content()
