"""Methods of a board that only tests call, and the program of a session that has them."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from pathlib import Path

from tvm_pipeline import Device, Platform, errors
from tvm_pipeline.version import __version__
from tvm_pipeline_hosts.remote.methods import METHODS, Description
from tvm_pipeline_hosts.remote.session import serve

__all__ = ["SESSION", "serve"]

SESSION = f"{__name__}:serve"

_log = logging.getLogger("tvm_pipeline_hosts.extra_methods")
_calls = 0


def describe(session, _, __):
    """Return a board of one device, without the seconds that a search for devices takes."""
    platform = Platform(session.board, (Device("cpu0", "host", (0,)),))
    return Description(session.board, platform, {"tvm-pipeline": __version__}), []


def count(_, __, arrays):
    """Return how often this was called, and the arrays."""
    global _calls
    _calls += 1
    return _calls, arrays


def wait(_, arguments, arrays):
    """Tell that it began, wait until a file is there, and return the arrays."""
    _log.info("waiting")
    while not Path(arguments["file"]).exists():
        time.sleep(0.01)
    _log.info("waited")
    return os.getpid(), arrays


def fail(_, arguments, __):
    """Raise an error of `tvm_pipeline.errors`, or one that it does not know."""
    if arguments["name"] == "StageError":
        raise errors.StageError(2, "tpu0", 7, ValueError("bad"), "host/decode")
    if arguments["name"] == "OptionError":
        raise errors.OptionError("`stages` 9: too many", option="stages", value=9)
    raise getattr(errors, arguments["name"], KeyError)("it is so")


def crash(_, arguments, __):
    """Read address 0, or raise a signal."""
    if arguments.get("signal"):
        os.kill(os.getpid(), arguments["signal"])
    return ctypes.string_at(0), []


METHODS.update(describe=describe, count=count, wait=wait, fail=fail, crash=crash)
