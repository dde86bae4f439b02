"""Text and JSON and TOML that somebody else wrote: whatever is wrong with it becomes one error that names its file.

`blamed` is that one way, for readers of every format. `read_toml` also keeps a small file from taking all memory: the
parser of Python's library stores every prefix of a dotted key, and recurses into brackets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline.errors import PipelineError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What `msgspec.json.decode` raises for damaged text: also where it is not UTF-8, or nested too deeply.
DAMAGED = (msgspec.MsgspecError, ValueError, RecursionError)
MOST_TOML_BYTES = 1 << 20
DEEPEST = 64  # brackets inside brackets, and names in a dotted key

_TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*'
    r"|(?P<dot>\.)|(?P<open>[\[{])|(?P<close>[\]}])|(?P<end>[=,\n])|[^\"'#.\[\]{}=,\n]+|.",
    re.DOTALL,
)


@contextmanager
def blamed(path: Path | str, error: type[PipelineError], remedy: str = "") -> Iterator[None]:
    """Raise whatever the block raises as `error`, in one sentence that begins with the file.

    An error of this package that names the file already stays as it is.

    Args:
        path: the file that the block reads, or "file: what of it".
        remedy: what the user does next, where the reason does not say it.

    Examples:
        >>> from tvm_pipeline.errors import BundleError
        >>> with blamed("net.tar", BundleError, "compile the model again"):
        ...     {}["kernels"]
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.BundleError: net.tar: 'kernels' is missing in it; compile the model again
    """
    try:
        yield
    except PipelineError as cause:
        if str(path).partition(": ")[0] in str(cause):
            raise
        after = f"; {remedy}" if remedy and ";" not in str(cause) else ""
        raise error(f"{path}: {cause}{after}") from cause
    except Exception as cause:  # readers of damaged files raise errors of any type
        after = f"; {remedy}" if remedy else ""
        raise error(f"{path}: {plain_reason(cause)}{after}") from cause


def plain_reason(error: Exception) -> str:
    """Return what is wrong with a file whose reader raised this, in words and in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (
        re.sub(r"^\w*(?:Error|Exception): ", "", lines[-1 if lines[0].startswith("Traceback") else 0]) if lines else ""
    )
    match error:
        case UnicodeDecodeError():
            return f"it is no text: byte {error.start} is not utf-8"
        case RecursionError():
            return "its brackets are nested too deeply"
        case MemoryError():
            return "it takes more memory than there is"
        case KeyError() if error.args:
            return f"{str(error.args[0])[:80]!r} is missing in it"
        case IndexError():
            return "it is damaged: an index in it lies beyond the end"
        case OSError():
            return error.strerror or said or "it cannot be read"
        case ValueError() | OverflowError():
            return said[:300] or "it is damaged"
    return f"it is damaged ({said[:300]})" if said else "it is damaged"


def read_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ValueError: it is no TOML, no UTF-8, longer than MOST_TOML_BYTES, or nested deeper than DEEPEST.

    Examples:
        >>> read_toml(b"[device]\\ncores = [0, 1]")
        {'device': {'cores': [0, 1]}}
    """
    if len(content) > MOST_TOML_BYTES:
        raise ValueError(
            f"it has {len(content)} bytes, and settings have {MOST_TOML_BYTES} at most; is it another file?"
        )
    text = content.decode()
    _check_depth(text)
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    return tables


def _check_depth(text: str) -> None:
    """Raise ValueError where brackets or the names of a dotted key are nested too deeply for the parser."""
    depth = dots = 0
    for token in _TOKENS.finditer(text):
        kind = token.lastgroup
        if kind == "dot":
            dots += 1
        elif kind is not None:
            dots = 0
            depth += (kind == "open") - (kind == "close" and depth > 0)
        if max(depth, dots) > DEEPEST:
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(
                f"{'keys' if dots > DEEPEST else 'brackets'} are nested deeper than {DEEPEST} (at line {line})"
            )
