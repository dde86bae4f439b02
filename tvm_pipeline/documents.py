"""Text and JSON and TOML that somebody else wrote: whatever is wrong with it becomes one error that names its file.

`blamed` is that one way, for readers of every format. `TomlFile` is the one reader of settings, and names the line as
well. `read_toml` keeps a small file from taking all memory: the parser of Python's library stores every prefix of a
dotted key, and recurses into brackets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline.errors import OptionError, PipelineError, nearest
from tvm_pipeline.files import read_bytes
from tvm_pipeline.option_names import explained, long_name

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
_WORD = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(r"\s*\[(\[?)([^\[\]#]+)\]")
_KEY = re.compile(rf"\s*({_WORD}(?:\s*\.\s*{_WORD})*)\s*=")


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


class TomlFile:
    """A TOML file of settings; each mistake in it is said with its line.

    A place in it is given by the keys and indices that lead there, such as `"camera", 0, "source"`.

    Args:
        path: the file.
        error: what is raised, by this class too where the file cannot be read or is no TOML.
        remedy: what the user does next, where a mistake does not say it.

    Attributes:
        path: the file.
        tables: what it says.
    """

    def __init__(self, path: Path | str, error: type[PipelineError], remedy: str = "") -> None:
        self.path, self._error, self._remedy = Path(path), error, remedy
        content = read_bytes(path, error, MOST_TOML_BYTES)
        try:
            self.tables = read_toml(content)
        except ValueError as cause:
            reason = plain_reason(cause)
            line = re.search(r"line (\d+)", reason)  # else it is the end of the document
            number = line[1] if line else content.count(b"\n") + 1
            raise error(f"{path}, line {number}: it is no TOML: {self._with_remedy(reason)}") from cause
        self._lines = _lines(content.decode())

    def where(self, *place: str | int) -> str:
        """Return the file, and the line of a place; where that is written otherwise, of what is around it."""
        while place and place not in self._lines:
            place = place[:-1]
        return f"{self.path}, line {self._lines[place]}" if place else str(self.path)

    def mistake(self, what: str, *place: str | int) -> PipelineError:
        """Return the error about a key or a table: "fleet.toml, line 7: host attic: " and what is wrong."""
        around = place[:-1] if place and isinstance(place[-1], str) else place
        named = ", ".join(self._tables_in(around))
        return self._error(f"{self.where(*place)}: {named}{': ' if named else ''}{self._with_remedy(what)}")

    def located(self, error: OptionError, elsewhere: Container[str] = ()) -> OptionError:
        """Return the error of an option with the line of its key, in the words of this file.

        An option that does not stand here, or is given `elsewhere` (by its key), leaves the error as it is.
        """
        key = (long_name(error.option) or error.option) if error.option else None
        if key is None or key not in self.tables or key in elsewhere:
            return error
        return OptionError(f"{self.where(key)}: {explained(error, str)}", option=error.option, value=error.value)

    def convert(self, kind: Any, without: Mapping[str, str] | None = None) -> Any:
        """Return what the file says as a value of a type, whose fields are the keys; raise the error for a mistake.

        Args:
            kind: a class of fields, or a `TypedDict`. A Path in it is relative to the file's folder.
            without: fields that a file does not have, each with the reason.
        """
        self._check_keys(self.tables, msgspec.inspect.type_info(kind), without or {})
        try:
            return msgspec.convert(self.tables, kind, dec_hook=self._beside)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$")
            place = [int(index) if index else key for key, index in re.findall(r"\.([\w-]+)|\[(\d+)\]", path)]
            if missing := re.match("Object missing required field `(.*)`", what):
                raise self.mistake(f"it has no {missing[1]}", *place) from error
            key = next((f"{part}: " for part in reversed(place) if isinstance(part, str)), "")
            raise self.mistake(key + what.replace(" | null", ""), *place) from error

    def _check_keys(self, value: Any, kind: Any, without: Mapping[str, str], *place: str | int) -> None:
        """Raise the error for a key that the type does not have: msgspec ignores it, and a misspelt key with it."""
        for one in getattr(kind, "types", (kind,)):
            if isinstance(value, list) and hasattr(one, "item_type"):
                for index, part in enumerate(value):
                    self._check_keys(part, one.item_type, without, *place, index)
            elif isinstance(value, dict) and hasattr(one, "fields"):
                known = {field.encode_name: field.type for field in one.fields if field.name not in without}
                for key, part in value.items():
                    if key in without:
                        raise self.mistake(f"it takes no {key}: {without[key]}", *place, key)
                    if key not in known:
                        raise self.mistake(f"there is no key {key}; {nearest(key, known)}", *place, key)
                    self._check_keys(part, known[key], without, *place, key)

    def _tables_in(self, place: Iterable[str | int]) -> Iterator[str]:
        """Yield the tables of a place in words: the key, and for one of several its name or number."""
        here: Any = self.tables
        key = ""
        for part in place:
            here = here.get(part) if isinstance(here, dict) else here[int(part)] if isinstance(here, list) else None
            if isinstance(part, str):
                key = part
            elif isinstance(here, dict):
                name = here.get("name")
                key += f" {name}" if isinstance(name, str) else f" number {part + 1}"
            if isinstance(here, dict):
                yield key

    def _with_remedy(self, what: str) -> str:
        return f"{what}; {self._remedy}" if self._remedy and ";" not in what else what

    def _beside(self, _: type, value: Any) -> Path:
        if not isinstance(value, str):
            raise TypeError(f"Expected a path as `str`, got `{type(value).__name__}`")
        return self.path.parent / value


def _lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the line in which each table and each key of a TOML file begins."""
    found: dict[tuple[str | int, ...], int] = {}
    counts: dict[tuple[str | int, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            table = ()
            names = [name.strip("\"'") for name in re.findall(_WORD, header[2])]
            for depth, name in enumerate(names, 1):
                table = (*table, name)
                if header[1] and depth == len(names):
                    counts[table] = counts.get(table, 0) + 1
                table = (*table, counts[table] - 1) if table in counts else table
            place = table
        elif key := _KEY.match(line):
            place = (*table, *(name.strip("\"'") for name in re.findall(_WORD, key[1])))
        else:
            continue
        for length in range(1, len(place) + 1):
            found.setdefault(place[:length], number)
    return found


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
