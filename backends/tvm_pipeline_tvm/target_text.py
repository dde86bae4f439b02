"""The target of a device as TVM's own Target, and its processor: TVM 0.19 reads the text, TVM 0.27 only its parts."""

from __future__ import annotations

import platform
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

_LISTS = ("mattr", "keys", "libs")
_TEXTS = ("mcpu", "mtriple", "mfloat-abi", "mabi", "arch", "device", "model", "tag", "jit", "host")


def tvm_target(text: str) -> tvm.target.Target:
    """Return the target that a text such as `llvm -mcpu=x86-64-v3` names, without the index of a device.

    Raises:
        ValueError: TVM knows no such kind or option.
    """
    import tvm

    return tvm.target.Target(text if hasattr(tvm, "relay") else target_parts(text))


def target_parts(text: str) -> dict[str, Any]:
    """Return a target by its parts, as TVM 0.27 takes it.

    Raises:
        ValueError: it begins with no kind, or what follows is no option.

    Examples:
        >>> target_parts("llvm -mcpu=x86-64-v3 -mattr=+avx2,+fma -num-cores 2 -fast-math")
        {'kind': 'llvm', 'mcpu': 'x86-64-v3', 'mattr': ['+avx2', '+fma'], 'num-cores': 2, 'fast-math': True}
    """
    kind, *words = shlex.split(text) or [""]
    parts: dict[str, Any] = {"kind": kind}
    waiting = ""  # an option whose value may be the next word
    for word in words:
        if word.startswith("-") and len(word) > 1:
            waiting, is_given, value = word.lstrip("-").partition("=")
            parts[waiting] = _value(waiting, value) if is_given else True
            waiting = "" if is_given else waiting
        elif waiting:
            parts[waiting], waiting = _value(waiting, word), ""
        else:
            raise ValueError(f"{word!r} in the target {text!r} is no option: options begin with a dash")
    return parts


def other_processor(target: str) -> str:
    """Return the processor that the triple of a target names, where this machine has another; else nothing.

    Raises:
        ValueError: TVM does not know the target.

    Examples:
        On x86-64:

        >>> other_processor("llvm -mtriple=aarch64-linux-gnu"), other_processor("llvm -mcpu=x86-64-v3")
        ('aarch64', '')
    """
    triple = str(tvm_target(target).attrs.get("mtriple") or "")
    named = _processor(triple.partition("-")[0])
    return "" if named in ("", _processor(platform.machine())) else named


def _processor(name: str) -> str:
    """Return one name for each kind of processor, whose code a machine runs or does not."""
    if name.startswith(("arm64", "aarch64")):
        return "aarch64"
    if name.startswith(("arm", "thumb")):
        return "arm"
    return "x86_64" if name in ("amd64", "x86-64") else name


def _value(option: str, text: str) -> Any:
    if option in _LISTS:
        return text.split(",")
    if option not in _TEXTS:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.lstrip("+-").isdecimal():
            return int(text)
    return text
