"""Arena problems and layouts in the CSV format of minimalloc, so that either allocator can read files of the other.

    id,lower,upper,size,offset
    conv,0,2,64,0
    relu,1,3,64,64

A tensor is alive from step `lower` to the step before `upper`. https://github.com/google/minimalloc (Moffitt,
"MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023). Next:
`memory/arena.py`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from tvm_pipeline.errors import PlanError
from tvm_pipeline.files import read_bytes, write_bytes
from tvm_pipeline.memory.arena import Lifetime

# Headings of older files, by their present names. Their `end` is the last step; `upper` is the step after it.
_OLDER = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower"}
_NUMBERS = ("lower", "upper", "end", "size", "offset")


def write_minimalloc(path: Path | str, tensors: Sequence[Lifetime], offsets: Sequence[int] | None = None) -> None:
    """Write the tensors, and their offsets if these are given. Tensors without a name are numbered.

    The sizes are those of the tensors; round them up first if the offsets are aligned.

    Raises:
        PlanError: two tensors have the same name, or there are not as many offsets as tensors.
        PipelineError: the file cannot be written.
    """
    names = [tensor.name or f"tensor_{index}" for index, tensor in enumerate(tensors)]
    if len(set(names)) < len(names):
        twin = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"cannot write {path}: two tensors are called {twin}; give each a name of its own")
    if offsets is not None and len(offsets) != len(tensors):
        raise PlanError(f"cannot write {path}: {len(offsets)} offsets for {len(tensors)} tensors; give one for each")
    text = io.StringIO()
    # minimalloc splits lines at every comma, even between quotes.
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["id", "lower", "upper", "size", *(["offset"] if offsets is not None else [])])
    for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        where = [offsets[index]] if offsets is not None else []
        rows.writerow([name.replace(",", ";"), tensor.first, tensor.last + 1, tensor.bytes, *where])
    write_bytes(path, text.getvalue().encode())


def read_minimalloc(path: Path | str) -> tuple[list[Lifetime], list[int] | None]:
    """Return the tensors of a file, and their offsets if it has them; older headings are `buffer`, `start`, `end`.

    Raises:
        PlanError: the file cannot be read, a line of it is wrong (the message names the line), or it has a column
            `alignment` or `gaps`, which a Lifetime cannot express.
    """
    try:
        rows = list(csv.reader(io.StringIO(read_bytes(path, PlanError).decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path} is no CSV of minimalloc: {error}") from error
    columns = [_OLDER.get(name.strip(), name.strip()) for name in rows[0]] if rows else []
    last = "end" if "end" in columns else "upper"
    requested = {"id", "lower", last, "size"}
    if sorted(columns) not in (sorted(requested), sorted({*requested, "offset"})):
        raise PlanError(f"{path}, line 1: the columns are {','.join(columns)}; write id,lower,upper,size[,offset]")
    tensors, offsets = [], []
    seen: set[str] = set()
    for line, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(columns):
            raise PlanError(f"{path}, line {line}: {len(row)} fields for {len(columns)} columns")
        fields = dict(zip(columns, row, strict=True))
        figures = {name: _whole(path, line, name, fields[name]) for name in _NUMBERS if name in fields}
        tensor = Lifetime(figures["lower"], figures[last] - (last == "upper"), figures["size"], fields["id"])
        if tensor.last < tensor.first:
            raise PlanError(f"{path}, line {line}: {tensor.name} ends at step {figures[last]}, before it begins")
        if tensor.name in seen:
            raise PlanError(f"{path}, line {line}: {tensor.name} stands there twice; give each tensor one line")
        seen.add(tensor.name)
        tensors.append(tensor)
        offsets.append(figures.get("offset", 0))
    return tensors, offsets if "offset" in columns else None


def _whole(path: Path | str, line: int, column: str, text: str) -> int:
    """Return the whole number, 0 or more, of a field; raise PlanError if it is none."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise PlanError(f"{path}, line {line}: {column} is {text!r}; write a whole number, 0 or more")
    return number
