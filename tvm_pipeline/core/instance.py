"""Instances: a problem with the best plan that is known of it, in one file that others can read, solve and cite.

    {"name": "ResNet50 on 4 devices", "source": "SEC 2022, Table III", "problem": {...}, "best": "plan ResNet50 by ..."}

`problem` has the fields of a Problem, `best` is a Plan as its text, or null. docs/instance.schema.json is the schema.
Next: `problem.py` and `plan.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.documents import DAMAGED, blamed
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes, write_bytes


class Instance(msgspec.Struct, frozen=True):
    """A problem, and what is known of it.

    Attributes:
        name: unique in a library of instances.
        source: who published the problem, or what was measured, where and when.
        problem: what is to be planned.
        best: the best plan that is known, as text that `Plan.parse` reads; it has the bound and the scheduler. None
            where no plan is known.
        seconds: that its scheduler took; None where that is not known.
    """

    name: str
    source: str
    problem: Problem
    best: str | None = None
    seconds: float | None = None

    @property
    def plan(self) -> Plan | None:
        """The best plan that is known."""
        return None if self.best is None else Plan.parse(self.best)


class _WithProblem(msgspec.Struct):
    problem: msgspec.Raw  # which is not decoded


def is_instance(path: Path | str) -> bool:
    """Return whether a file is JSON with a problem in it; whatever else is wrong with it, `read_instance` tells."""
    if not str(path).endswith(".json") or not Path(path).is_file():
        return False
    try:
        msgspec.json.decode(read_bytes(path, OptionError, MOST_FILE_BYTES), type=_WithProblem)
    except (*DAMAGED, OptionError):
        return False
    return True


def read_instance(path: Path | str) -> Instance:
    """Read an instance.

    Raises:
        OptionError: the file is no instance, or its problem or its plan makes no sense; the message names the file.

    Examples:
        >>> import tempfile
        >>> from tvm_pipeline.testing import example_problem
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     write_instance(file.name, Instance("example", "made by hand", example_problem()))
        ...     read = read_instance(file.name)
        >>> read.problem == example_problem(), read.plan
        (True, None)
    """
    content = read_bytes(path, OptionError, MOST_FILE_BYTES)
    with blamed(path, OptionError, "docs/instance.schema.json has the schema of an instance"):
        instance = msgspec.json.decode(content, type=Instance)
        _ = instance.plan  # which may be damaged
    return instance


def write_instance(path: Path | str, instance: Instance) -> None:
    """Write an instance as JSON."""
    write_bytes(Path(path), msgspec.json.encode(instance))
