"""Which TVM is installed, and so which IR compiles: Relax of TVM 0.27, or Relay of TVM 0.19.

Both are the Python package `tvm`, so an environment has one of them. It is found without an import, which takes a
second. TVM 0.19 has an early Relax as well: where Relay is, Relay is used.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from tvm_pipeline_tvm.compiled_model import TvmModel

Ir = Literal["relay", "relax"]


class _Release(NamedTuple):
    """The release of TVM that has an IR.

    Attributes:
        name, tvm: of the IR and the release, for messages.
        extra: of this package, which installs it.
        distribution: what the extra installs.
        versions: matches the start of those that fit.
        told_by: file of the package that states the version.
        compiled: the class of its compiled models, see `installed_model`.
    """

    name: str
    tvm: str
    extra: str
    distribution: str
    versions: str
    told_by: str
    compiled: str

    @property
    def title(self) -> str:
        return f"{self.name} ({self.tvm})"


RELEASES: dict[str, _Release] = {
    "relax": _Release(
        "Relax",
        "TVM 0.27",
        "tvm",
        "apache-tvm",
        r"0\.27\.0(?!\d)",
        "_version.py",
        "tvm_pipeline_tvm.relax.compiled:RelaxModel",
    ),
    "relay": _Release(
        "Relay",
        "TVM 0.19",
        "relay",
        "xtc-tvm-python-bindings",
        r"0\.19(?!\d)",
        "_ffi/libinfo.py",
        "tvm_pipeline_tvm.relay.compiled:RelayModel",
    ),
}
_RELAX, _RELAY = RELEASES.values()
_INSTALL = {ir: f"pip install 'tvm-pipeline[{release.extra}]'" for ir, release in RELEASES.items()}


@cache
def installed_ir() -> Ir:
    """Return the IR of the TVM that is installed.

    Raises:
        ImportError: no TVM is installed, one of another version, or one over the other. The message says what to
            install.
    """
    _check_one_alone()
    folder = tvm_folder()
    if folder is None:
        raise ImportError(
            f"TVM is not installed: run `{_INSTALL['relax']}` for {_RELAX.title}, or, in another environment, "
            f"`{_INSTALL['relay']}` for {_RELAY.title}"
        )
    ir: Ir = "relay" if (folder / "relay").is_dir() else "relax"
    found = _version(folder / RELEASES[ir].told_by)
    if found and not re.match(RELEASES[ir].versions, found):
        raise ImportError(
            f"TVM {found} is installed in {folder}, and tvm-pipeline uses {_RELAX.title} or {_RELAY.title} alone: run "
            f"`{_INSTALL[ir]}`, which installs the version that fits"
        )
    return ir


def installed_model() -> type[TvmModel[Any]]:
    """Return the models of the IR that is installed; TVM is imported. Raise ImportError as `installed_ir` does."""
    found: type[TvmModel[Any]] = resolve_name(RELEASES[installed_ir()].compiled)
    return found


def described_version() -> str:
    """Return the version of TVM as bundles and profiles state it: with the IR, where that is not Relay.

    Bundles of before there was Relax state the version alone.
    """
    import tvm

    return f"{tvm.__version__} with Relax" if installed_ir() == "relax" else str(tvm.__version__)


def described() -> str:
    """Return the IR and the version of the TVM that is installed, such as `Relax, TVM 0.27.0.post1`.

    Raises:
        ImportError: see `installed_ir`.
    """
    release, folder = RELEASES[installed_ir()], tvm_folder()
    found = _version(folder / release.told_by) if folder is not None else ""
    return f"{release.name}, {f'TVM {found}' if found else release.tvm}"


def demand(ir: Ir) -> None:
    """Raise ImportError where TVM with this IR is not what is installed."""
    wanted = RELEASES[ir]
    if tvm_folder() is None:
        raise ImportError(
            f"TVM with {wanted.name} is not installed: run `{_INSTALL[ir]}`, or bring your own build of {wanted.tvm}"
        )
    found = installed_ir()
    if found != ir:
        raise ImportError(
            f"TVM with {wanted.name} is not installed, and {RELEASES[found].title} is: the two cannot share an "
            f"environment, so run `{_INSTALL[ir]}` in another one"
        )


def lacks(kind: str) -> str:
    """Return what this environment lacks to run on GPUs of a kind, with what installs it; empty if it lacks nothing."""
    if kind == "opencl" and installed_ir() == "relax" and find_spec("pyopencl") is None:
        return "with Relax OpenCL needs pyopencl, which is not installed: `pip install 'tvm-pipeline[opencl]'`"
    return ""


def tvm_folder() -> Path | None:
    """Return where the package `tvm` is; None where there is none."""
    found = find_spec("tvm")
    places = found.submodule_search_locations if found is not None else None
    return next((Path(place) for place in places or ()), None)


def _check_one_alone() -> None:
    """Raise ImportError where both distributions of the package `tvm` are installed."""
    found = []
    for release in RELEASES.values():
        try:
            found.append(f"{release.distribution} {version(release.distribution)}")
        except PackageNotFoundError:
            return
    names = " ".join(release.distribution for release in RELEASES.values())
    raise ImportError(
        f"{' and '.join(found)} are installed in one environment. Both are the package `tvm`, so one has overwritten "
        f"files of the other: run `pip uninstall {names}`, delete the folder `tvm` that this leaves, and install one "
        f"extra: {' or '.join(f'`{line}`' for line in _INSTALL.values())}"
    )


def _version(file: Path) -> str:
    """Return the version that a file of TVM states; empty where it does not, as in some builds of one's own."""
    try:
        found = re.search(r"^__version__ = (?:version = )?[\"'](.*?)[\"']", file.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""
