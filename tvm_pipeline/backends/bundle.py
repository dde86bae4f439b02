"""Read and write bundles: tar files with all that `run` needs.

    manifest.json   format, versions, and the SHA-256 of every other file
    compiled/...    what the backend saved: libraries, graph JSON, parameters; of several backends each its own part
    graph.json      the operator graph            profile.json   what was measured
    platform.json   the devices                   plan.txt       which device runs what
    preprocessing.json   how a picture becomes the model's input, where the model takes pictures
    metadata.json   what the model's file says about itself: labels, task and the like
    application.json   the source and the decoder, where the plan holds the work around the model
    rewriting.json  what is done in parts to save memory, where that was asked for
    decision.json   the candidates, what was measured of them, and why the plan was chosen, where that is known

Nothing in a bundle is pickled, and no path or size in it is trusted: only plain files that the manifest lists are read,
and the sum of each is checked. A bundle contains machine code, as every compiled model does: run only bundles that you
trust. Next: `archive.py`, for how tar files are read, and `contract.py`, for what a backend saves.
"""

from __future__ import annotations

import errno
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from tvm_pipeline.backends.archive import Archive, open_archive
from tvm_pipeline.backends.batched import with_batch
from tvm_pipeline.backends.carried import with_carry
from tvm_pipeline.backends.contract import CompiledModel, MemoryRewriting
from tvm_pipeline.backends.registry import platform_backend, settle_platform, versions_of
from tvm_pipeline.backends.sliced import SlicedBackend
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_limits import MOST_FILE_BYTES
from tvm_pipeline.core.in_mode import find_mode
from tvm_pipeline.core.plan import Decision, Plan, Stage
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.core.state_loops import carry_of
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import BundleError, GraphError, OptionError, PipelineError, PlatformError
from tvm_pipeline.files import replacing, sum_of, temporary_folder
from tvm_pipeline.version import __version__

FORMAT = 2
_MOST_MANIFEST_BYTES = 64 << 20
_AGAIN = "compile the model again"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The versions that made a bundle, and the sum of each of its files."""

    format: int
    tvm_pipeline: str
    backend: str
    versions: dict[str, str]
    sha256: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle in memory.

    Attributes:
        preprocessing: how a frame becomes the model's input, in the words of the plug-in for applications.
        decision: how `plan` was chosen; None where that is not known.
        application: what that plug-in makes the application of again, where the graph holds host operators around the
            model's; None where it is the model's alone.
        metadata: what the model's file says about itself, see `core.model.Model`.
        rewriting: what is done in parts to save memory; None where that was not asked for.

    Examples:
        >>> from tvm_pipeline.testing import example_model, example_problem
        >>> problem = example_problem()
        >>> bundle = Bundle(problem.graph, problem.platform, problem.profile, plan(problem).plan, example_model())
        >>> bundle.plan.devices
        ('d0', 'd1')
    """

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    plan: Plan
    compiled: CompiledModel
    preprocessing: dict[str, Any] | None = None
    decision: Decision | None = None
    application: dict[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    rewriting: MemoryRewriting | None = None


def write_bundle(path: Path | str, bundle: Bundle) -> None:
    """Write the bundle, whole or not at all; raise PipelineError where that is not possible.

    Examples:
        >>> import tarfile, tempfile
        >>> from tvm_pipeline.testing import example_backend, example_bundle, installed
        >>> with installed(example_backend()), tempfile.TemporaryDirectory() as folder:
        ...     write_bundle(f"{folder}/net.tar", example_bundle())
        ...     with tarfile.open(f"{folder}/net.tar") as tar:
        ...         print(*tar.getnames())
        manifest.json compiled/model.pickle graph.json plan.txt platform.json profile.json
    """
    path, backend = Path(path), platform_backend(bundle.platform)
    with _scratch(path) as root:
        (root / "compiled").mkdir()
        bundle.compiled.save(root / "compiled", _of_model(bundle), bundle.platform)
        (root / "graph.json").write_bytes(msgspec.json.encode(bundle.graph))
        (root / "platform.json").write_bytes(msgspec.json.encode(bundle.platform))
        (root / "profile.json").write_bytes(msgspec.json.encode(bundle.profile))
        (root / "plan.txt").write_text(str(bundle.plan))
        if bundle.preprocessing is not None:
            (root / "preprocessing.json").write_bytes(msgspec.json.encode(bundle.preprocessing))
        if bundle.decision is not None:
            (root / "decision.json").write_bytes(msgspec.json.encode(bundle.decision))
        if bundle.metadata:
            (root / "metadata.json").write_bytes(msgspec.json.encode(dict(bundle.metadata)))
        if bundle.rewriting is not None:
            (root / "rewriting.json").write_bytes(msgspec.json.encode(bundle.rewriting))
        if bundle.application is not None:
            (root / "application.json").write_bytes(msgspec.json.encode(bundle.application))
        files = {str(file.relative_to(root)): file for file in sorted(root.rglob("*")) if file.is_file()}
        sums = {name: sum_of(file) for name, file in files.items()}
        manifest = Manifest(FORMAT, __version__, backend.name, versions_of(bundle.platform), sums)
        # A file that has a second name, in the cache, is one of its own here.
        with replacing(path) as temporary, tarfile.open(temporary, "w", dereference=True) as tar:
            content = msgspec.json.format(msgspec.json.encode(manifest))
            entry = tarfile.TarInfo("manifest.json")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
            for name, file in files.items():
                tar.add(file, name, recursive=False)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; raise PipelineError, which names the file that is made in it, where it becomes full."""
    with temporary_folder() as folder:
        try:
            yield folder
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise PipelineError(
                f"cannot write {path}: no space is left in {folder}; set TMPDIR to a place with some"
            ) from error


@contextmanager
def open_bundle(path: Path | str) -> Iterator[Bundle]:
    """Unpack a bundle into a temporary folder for as long as the block lasts, and close its model after that.

    Raises:
        BundleError: it is cut short, unsafe, damaged, or made by another version or for another machine.

    Examples:
        >>> import tempfile
        >>> from tvm_pipeline.testing import example_backend, example_bundle, installed
        >>> with installed(example_backend()), tempfile.TemporaryDirectory() as folder:
        ...     write_bundle(f"{folder}/net.tar", example_bundle())
        ...     with open_bundle(f"{folder}/net.tar") as bundle:
        ...         print(bundle.graph.name, bundle.plan.devices)
        net ('d0', 'd1')
    """
    path = Path(path)
    with temporary_folder(path.stat().st_size if path.exists() else 0) as root:
        with blamed(path, BundleError, _AGAIN):
            bundle = _opened(path, root)
        with closing(bundle.compiled):
            yield bundle


@dataclass(frozen=True, slots=True)
class Documents:
    """What a bundle says of its model, which another machine may run; see `Bundle`."""

    graph: OperatorGraph
    platform: Platform
    profile: Profile
    plan: Plan
    is_application: bool


def read_documents(path: Path) -> Documents:
    """Read what a bundle says of its model, which is not loaded; raise BundleError where it is damaged."""
    with blamed(path, BundleError, _AGAIN), open_archive(path) as archive:
        manifest = _manifest(path, archive)

        def read(name: str, kind: type[T]) -> T:
            return msgspec.json.decode(archive.read(name, MOST_FILE_BYTES), type=kind)

        return Documents(
            read("graph.json", OperatorGraph),
            read("platform.json", Platform),
            read("profile.json", Profile),
            Plan.parse(archive.read("plan.txt", MOST_FILE_BYTES).decode()),
            "application.json" in manifest.sha256,
        )


def bundle_power_mode(path: Path) -> PowerMode | None:
    """Return the power mode that a bundle's plan is for, which must be set before the bundle is opened.

    The machine may lack devices in another mode. None is returned for a bundle of no mode, and for what cannot be
    opened, which `open_bundle` then says.
    """
    with suppress(PipelineError, OSError, ValueError), open_archive(path) as archive:
        plan = Plan.parse(archive.read("plan.txt", MOST_FILE_BYTES).decode())
        if plan.power_mode:
            made_for = msgspec.json.decode(archive.read("platform.json", MOST_FILE_BYTES), type=Platform)
            return find_mode(made_for, plan.power_mode)
    return None


def _opened(path: Path, root: Path) -> Bundle:
    """Return a bundle that is unpacked into a folder, with its model loaded."""
    manifest = _unpack(path, root)
    made_for = _read(root / "platform.json", Platform)
    for name, version in versions_of(made_for).items():
        if manifest.versions.get(name) != version:
            raise BundleError(
                f"{path} was made with {name} {manifest.versions.get(name)}, here is {version}; compile the "
                f"model again here, or run it where that is installed"
            )
    graph = _read(root / "graph.json", OperatorGraph)
    with blamed("plan.txt", BundleError, _AGAIN):
        plan = Plan.parse((root / "plan.txt").read_text("utf-8"))
    platform = _settled(path, made_for)  # this comes before its code is loaded, which may not run here
    profile = _still_valid(_read(root / "profile.json", Profile), made_for, platform)
    preprocessing = _read_optional(root / "preprocessing.json", dict[str, Any])
    decision = _read_optional(root / "decision.json", Decision)
    application = _read_optional(root / "application.json", dict[str, Any])
    metadata = _read_optional(root / "metadata.json", dict[str, str]) or {}
    rewriting = _read_optional(root / "rewriting.json", MemoryRewriting)
    with blamed(f"{path}: its compiled model", BundleError, _AGAIN):
        try:
            loaded = _load(manifest.backend, platform, root / "compiled")
        except BundleError as error:  # which names the folder that the bundle is unpacked into
            raise BundleError(str(error).replace(f"{root}/", "")) from error
    try:
        compiled = with_batch(with_carry(loaded, carry_of(graph)), graph.batch)
    except (GraphError, OptionError) as error:
        raise BundleError(f"graph.json: {error}; {_AGAIN}") from error
    return Bundle(graph, platform, profile, plan, compiled, preprocessing, decision, application, metadata, rewriting)


def _of_model(bundle: Bundle) -> list[Stage]:
    """Return the stages of the bundle's plan with the model's operators alone."""
    own = bundle.compiled.graph.edges.index
    parts = (replace(s, operators=tuple(name for name in s.operators if name in own)) for s in bundle.plan.stages)
    return [stage for stage in parts if stage.operators]


def _load(saved_by: str, platform: Platform, folder: Path) -> CompiledModel:
    """Read the compiled model, which the backend named `saved_by` saved."""
    backend = platform_backend(platform)
    if saved_by == backend.name:
        return backend.load(folder, platform.devices)
    if isinstance(backend, SlicedBackend):
        return backend.load_first_layout(saved_by, folder, platform.devices)
    raise BundleError(f"the backend {saved_by} saved it, and {backend.name} serves its platform; {_AGAIN}")


def _settled(path: Path, made_for: Platform) -> Platform:
    """Return the platform settled on this machine, which may lack the cores, the instructions or the devices."""
    try:
        _, platform = settle_platform(made_for)
    except PlatformError as error:
        modes = " or ".join(mode.name for mode in made_for.power_modes)
        other = f", or for another power mode ({modes})" if modes else ""
        raise BundleError(f"{path} was made for another machine{other}: {error}") from error
    for before, here in zip(made_for.devices, platform.devices, strict=True):
        if here.stand_in and not before.stand_in:
            raise BundleError(
                f"{path} was made where device {here.name} was present, and here it is not ({here.stand_in}); plug it "
                "in, or compile the model again to run on the stand-in"
            )
    return platform


def _still_valid(profile: Profile, made_for: Platform, platform: Platform) -> Profile:
    """Return the profile without what was measured on stand-ins of devices that are here now."""
    arrived = {
        b.name for b, here in zip(made_for.devices, platform.devices, strict=True) if b.stand_in and not here.stand_in
    }
    if not arrived:
        return profile
    warning = f"{', '.join(sorted(arrived))}: measured on a stand-in when the bundle was made; its model speaks for it"
    devices = {name: device for name, device in profile.devices.items() if name not in arrived}
    return replace(profile, devices=devices, warnings=(*profile.warnings, warning))


def _unpack(path: Path, root: Path) -> Manifest:
    """Write the files of a bundle into a folder; return the manifest, with whose sums all of them agree."""
    try:
        with open_archive(path) as archive:
            manifest = _manifest(path, archive)
            for name, expected in manifest.sha256.items():
                target = root / _safe(path, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                if archive.extract(name, target) != expected:
                    raise BundleError(f"{path}: {name} is damaged (its checksum differs); compile the model again")
            return manifest
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise BundleError(
                f"cannot unpack {path} into {root.parent}: no space is left; set TMPDIR to a place with some"
            ) from error
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from error


def _manifest(path: Path, archive: Archive) -> Manifest:
    with blamed(f"{path}: its manifest", BundleError, _AGAIN):
        manifest = msgspec.json.decode(archive.read("manifest.json", _MOST_MANIFEST_BYTES), type=Manifest)
    if manifest.format != FORMAT:
        raise BundleError(
            f"{path} has format {manifest.format}, made by tvm-pipeline {manifest.tvm_pipeline}; this version "
            f"({__version__}) reads format {FORMAT}: compile the model again"
        )
    return manifest


def _safe(path: Path, name: str) -> PurePosixPath:
    """Return the name as a path below the bundle's folder; raise BundleError where it leads outside."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or not name.isprintable():
        raise BundleError(f"{path}: its manifest names {name!r}, which lies outside of the bundle; do not trust it")
    return pure


def _read(file: Path, kind: type[T]) -> T:
    """Return what a file of an unpacked bundle holds; an error names the file as it is called in the bundle."""
    with blamed(file.name, BundleError, _AGAIN):
        return msgspec.json.decode(file.read_bytes(), type=kind)


def _read_optional(file: Path, kind: type[T]) -> T | None:
    return _read(file, kind) if file.exists() else None
