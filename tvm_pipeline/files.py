"""Files that are either whole or absent, and the folder where compiled models are kept."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tvm_pipeline.errors import PipelineError


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it takes its place when the block ends without an error.

    The temporary name keeps the suffix, since some libraries choose a format by it. It may become a file or
    a folder. Raises PipelineError where the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise PipelineError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink()


def write_bytes(path: Path | str, content: bytes) -> None:
    """Writes a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def read_bytes(path: Path | str, error: type[PipelineError]) -> bytes:
    """The content of a file that a user named; raises `error` where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause


def cache_folder() -> Path:
    """Where compiled models are kept: $TVM_PIPELINE_CACHE, else the user's cache folder."""
    override = os.environ.get("TVM_PIPELINE_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm-pipeline"
