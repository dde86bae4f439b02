"""What TVM raises: its errors, and the reason in their messages."""

from __future__ import annotations

import re

from tvm_pipeline.core.model import Model

# What calls of TVM and of its kernels raise: TVM 0.19 `tvm.TVMError`, which is one of these; TVM 0.27 has no such name.
TVMError = RuntimeError


_NOT_TELLING = ("File", "[", "Stack trace", "grid=(")  # the last is below the error of a launch
_NAMES_AN_ERROR = re.compile(r"\w*(Error|Exception): |Error message: ")


class RefusedOperator(Exception):  # noqa: N818  it never leaves an importer
    """An importer refuses an operator; the message names it and its node, the cause has the reason."""


def reason(error: BaseException) -> str:
    """Return the reason in TVM's message without its stack of frames: the line that names an error and the next one.

    Examples:
        >>> reason(RuntimeError("Traceback (most recent call last):\\n  5: tvm::X()\\nTVMError: no such function"))
        'TVMError: no such function'
        >>> reason(RuntimeError("Check failed: (allow_missing) is false: Device API cuda is not enabled."))
        'Check failed: (allow_missing) is false: Device API cuda is not enabled.'
        >>> reason(ValueError("Invalid a.shape[0] on argument #0 when calling:\\n  `k(a: Tensor([4]))`,\\n expected 4"))
        'Invalid a.shape[0] on argument #0 when calling: `k(a: Tensor([4]))`, expected 4'
    """
    if isinstance(error, RefusedOperator) and error.__cause__ is not None:
        return f"{error}: {reason(error.__cause__)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = [index for index, line in enumerate(lines) if _NAMES_AN_ERROR.match(line)]
    telling = [index for index, line in enumerate(lines) if not line.startswith(_NOT_TELLING)]
    first = last = (named or telling or [0])[-1]
    while not named and first and lines[first - 1].endswith((":", ",")):
        first -= 1
    found = " ".join(lines[first : last + (2 if lines[last].endswith(":") else 1)])
    return found.removeprefix("Error message: ")[:300]


def on_shapes(model: Model) -> str:
    """Return that given shapes may be the reason why a model is refused, where any were."""
    if not model.shaped:
        return ""
    return (
        f"; the shapes given for {', '.join(model.shaped)} may be the reason: give those that the model was made for "
        "(sides of pictures are often multiples of 32)"
    )
