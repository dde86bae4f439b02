"""What a client can call on a board.

A method takes the session, its arguments as JSON has them, arrays, and a function that tells the client of progress;
it returns what becomes JSON, and arrays, which must not change before the next call. What it raises is raised at the
client. A room of methods is a dictionary that METHODS takes in. Next: board.py, the client.
"""

from __future__ import annotations

import platform as python_platform
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from tvm_pipeline import Platform, __version__, settle_platform
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.processes import send
from tvm_pipeline.workflow.machine import HERE
from tvm_pipeline_hosts.remote.board_measuring import MEASURING
from tvm_pipeline_hosts.remote.remote_stages import STAGES
from tvm_pipeline_hosts.remote.session import Session, warnings_meanwhile

Method = Callable[[Session, dict[str, Any], list[Array]], tuple[Any, list[Array]]]


class Description(msgspec.Struct, frozen=True):
    """A board.

    Attributes:
        name: of the board, which is also its platform's.
        platform: what is detected there, settled there.
        software: versions by name: tvm-pipeline, python, the machine's kind of processor, and of each backend.
        warnings: what is not as it should be.
    """

    name: str
    platform: Platform
    software: dict[str, str]
    warnings: tuple[str, ...] = ()


def described_board(name: str) -> Description:
    """Return this machine as a board; raise PlatformError where nothing here can run a stage."""
    with warnings_meanwhile() as warnings:
        _, settled = settle_platform(HERE.platform(None, None))
    software = {"tvm-pipeline": __version__, "python": python_platform.python_version()}
    software["machine"] = python_platform.machine()
    for backend in dict.fromkeys(device.backend for device in settled.devices):
        with suppress(PlatformError):
            software |= find_backend(backend).versions()
    return Description(name, replace(settled, name=name), software, tuple(warnings))


def tell_board(name: bytes, channel: socket.socket) -> None:
    """Send this machine as a board, as a child that looks for it."""
    send(channel, msgspec.json.encode(described_board(name.decode())))


def describe(session: Session, _: dict[str, Any], __: list[Array]) -> tuple[Description, list[Array]]:
    """Return what the board is."""
    return described_board(session.board), []


def echo(_: Session, arguments: dict[str, Any], arrays: list[Array]) -> tuple[Any, list[Array]]:
    """Return what came, which is how a link is checked and timed."""
    return arguments, arrays


def missing(session: Session, _: dict[str, Any], arrays: list[Array]) -> tuple[dict[str, int], list[Array]]:
    """Return which files of a manifest (bytes, the array) are not here, see `Parcels.missing`."""
    return session.parcels.missing(arrays[0].tobytes()), []


def put(session: Session, arguments: dict[str, Any], arrays: list[Array]) -> tuple[None, list[Array]]:
    """Add the bytes of the array to a file, see `Parcels.put`."""
    place = msgspec.convert(arguments, _Place)
    session.parcels.put(place.sum, place.offset, arrays[0].tobytes(), place.total)
    session.parcels.forget_older(keep=(place.sum,))  # parts that no bundle ever takes have the same limit as bundles
    return None, []


def assemble(session: Session, _: dict[str, Any], arrays: list[Array]) -> tuple[str, list[Array]]:
    """Make the bundle of a manifest (bytes, the array), and return its id, see `Parcels.assemble`."""
    id = session.parcels.assemble(arrays[0].tobytes())
    session.parcels.forget_older(keep=(id,))
    return id, []


class _Place(msgspec.Struct):
    sum: str
    offset: int
    total: int


METHODS: dict[str, Method] = {
    "assemble": assemble,
    "describe": describe,
    "echo": echo,
    "missing": missing,
    "put": put,
    **STAGES,
    **MEASURING,
}
