"""Errors that cross a connection: their class, their text and the facts that a caller may ask for, never an object.

An error of `tvm_pipeline.errors` is raised again as one of its own class. Any other is a RunError with its name.
Next: session.py, which tells them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError, RunError, StageError

MOST_TEXT = 20_000
Fact = str | int | float | bool | None
# The attributes of errors, see errors.py, each with what stands for one that did not come.
_FACTS: dict[type[BaseException], dict[str, Fact]] = {
    OptionError: {"option": None, "value": None},
    StageError: {"stage": -1, "device": "", "frame": -1, "operator": ""},
}


class ErrorMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on its way.

    Attributes:
        is_unknown: it is none of `tvm_pipeline.errors`.
    """

    name: str
    text: str
    facts: dict[str, Fact] = {}
    is_unknown: bool = False


def error_message(error: BaseException) -> ErrorMessage:
    """Return what is told of an error."""
    held = {name: getattr(error, name) for name in _FACTS.get(type(error), ())}
    facts = {name: fact if isinstance(fact, Fact) else str(fact) for name, fact in held.items()}
    return ErrorMessage(type(error).__name__, str(error)[:MOST_TEXT], facts, type(error).__name__ not in _classes())


def received_error(told: ErrorMessage, where: str) -> PipelineError:
    """Return the error to raise here; `where` stands before its text.

    >>> received_error(error_message(KeyError("cpu7")), "board attic: ")
    RunError("board attic: KeyError: 'cpu7'")
    """
    if told.is_unknown or told.name not in _classes():
        return RunError(f"{where}{told.name}: {told.text}")
    kind = _classes()[told.name]
    error = kind.__new__(kind)
    error.args = (f"{where}{told.text}",)
    for name, without in _FACTS.get(kind, {}).items():
        setattr(error, name, told.facts.get(name, without))
    return error


def _classes() -> dict[str, type[PipelineError]]:
    def below(kind: type[PipelineError]) -> Iterator[type[PipelineError]]:
        yield kind
        for sub in kind.__subclasses__():
            yield from below(sub)

    return {kind.__name__: kind for kind in below(PipelineError) if kind.__module__ == PipelineError.__module__}
