"""Model files of fleet.toml become bundles: one for each kind of host, which is measured on one host of that kind.

    bundles = KindBundles(open_board, tell, warn)
    file = bundles.completed(read_fleet(path), hosts)       # the hosts that joined have bundles now

A kind is what a compiled model and its profile depend on: the devices as they are settled on the host, its processor,
and the versions of what compiles. The model is compiled here, as for a board (`remote_machine.py`), and what is made
stays in the cache. Next: rollout.py, which ships it; ray_board.py, a host as a board.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tvm_pipeline import Bundle, PipelineError, Platform, Problem, __version__, load, write_bundle
from tvm_pipeline.backends.bundle import read_documents
from tvm_pipeline.cli.output import without_warnings
from tvm_pipeline.errors import BundleError, RunError
from tvm_pipeline.files import cache_folder
from tvm_pipeline.frontends import Shapes, parse_shapes
from tvm_pipeline.workflow.steps import Compiled, compile_source, decide, measured_profile
from tvm_pipeline_hosts.fleet.fleet_file import FleetFile, FleetModel
from tvm_pipeline_hosts.remote.board_measuring import BoardPlatform
from tvm_pipeline_hosts.remote.board_models import BoardClient
from tvm_pipeline_hosts.remote.remote_machine import RemoteMachine

_log = logging.getLogger(__name__)

OpenBoard = Callable[[str], AbstractContextManager[BoardClient]]  # by the name of the host
MOST_ASKED = 8  # hosts at the same time
MOST_KEPT = 64  # bundles in the cache


@dataclass(frozen=True, slots=True)
class HostKind:
    """Hosts that run the same bundles.

    Attributes:
        key: equal for equal kinds.
        hosts: in the order of the file.
    """

    key: bytes
    hosts: tuple[str, ...]


def kinds_of(settled: Mapping[str, BoardPlatform]) -> list[HostKind]:
    """Return the kinds of hosts, from what each host is.

    Two hosts are of one kind if all is equal but the names of their platforms.
    """
    found: dict[bytes, list[str]] = {}
    for host, one in settled.items():
        found.setdefault(_key(one), []).append(host)
    return [HostKind(key, tuple(hosts)) for key, hosts in found.items()]


def _key(settled: BoardPlatform) -> bytes:
    platform: Platform = replace(settled.platform, name="host")
    return msgspec.json.encode(msgspec.structs.replace(settled, platform=platform, warnings=[]), order="sorted")


class KindBundles:
    """See the module.

    Args:
        open_board: gives a host as a board while a block lasts.
        busy: returns how many cameras run on a host now.
    """

    def __init__(self, open_board: OpenBoard, busy: Callable[[str], int]) -> None:
        self._open_board, self._busy = open_board, busy

    def completed(self, file: FleetFile, hosts: Collection[str]) -> FleetFile:
        """Return the file with a bundle of every model for every of these hosts that can run it.

        A host that cannot be asked, or a model that does not compile for a kind of host, is told, and costs no other.

        Raises:
            PipelineError: a model was compiled for no host at all.
        """
        wanted = file.to_compile(hosts)
        made: dict[str, dict[str, Path]] = {host: {} for host in wanted}
        reasons: dict[str, str] = {}
        settled = self._settled(list(wanted), reasons) if wanted else {}
        for kind in kinds_of(settled):
            for model in file.models:
                takers = [host for host in kind.hosts if model.name in wanted[host]]
                if not takers:
                    continue
                try:
                    path = self._bundle(model, kind, takers)
                except PipelineError as error:
                    reasons[model.name] = str(error)
                    _log.warning(
                        f"{model.name} does not run on {', '.join(takers)}, which get no camera that wants it: {error}"
                    )
                    continue
                for host in takers:
                    made[host][model.name] = path
        for name in dict.fromkeys(model for models in wanted.values() for model in models):
            if not any(name in models for models in made.values()) and not any(
                file.bundle(host, name) for host in file.hosts
            ):
                raise PipelineError(f"{file.path}: model {name} has no host: {'; '.join(reasons.values())}")
        return replace(
            file,
            hosts=tuple(replace(host, bundles={**host.bundles, **made.get(host.name, {})}) for host in file.hosts),
        )

    def _settled(self, hosts: list[str], reasons: dict[str, str]) -> dict[str, BoardPlatform]:
        """Ask hosts what they are."""

        def ask(host: str) -> BoardPlatform | PipelineError:
            try:
                with self._open_board(host) as board:
                    return board.call("settle", {"platform": None}, kind=BoardPlatform)[0]
            except PipelineError as error:
                return error

        found = {}
        with ThreadPoolExecutor(MOST_ASKED) as pool:
            for host, answer in zip(hosts, pool.map(ask, hosts), strict=True):
                if isinstance(answer, BoardPlatform):
                    found[host] = answer
                else:
                    reasons[host] = str(answer)
                    _log.warning(f"nothing is compiled for {host}: {answer}")
        return found

    def _bundle(self, model: FleetModel, kind: HostKind, hosts: list[str]) -> Path:
        """Return the bundle of a model for a kind of host, which is made on the one with least to do if it is new."""
        assert model.file is not None
        text = model.settings.get("input-shapes")
        shapes = parse_shapes(text) if text else None
        about = load(model.file, shapes)
        sum = hashlib.sha256(msgspec.json.encode((about.name, about.digest, __version__, kind.key))).hexdigest()
        kept = cache_folder() / "fleet-bundles" / f"{sum[:32]}.tar"
        if _is_whole(kept):
            return kept
        *most, last = sorted(hosts, key=self._busy)
        for host in most:
            try:
                return self._made(model, shapes, host, hosts, kept)
            except RunError as error:  # the host is lost, or the process on it
                _log.warning(f"{host} has not measured {model.name}, and another host of its kind is asked: {error}")
        return self._made(model, shapes, last, hosts, kept)

    def _made(self, model: FleetModel, shapes: Shapes | None, host: str, hosts: list[str], kept: Path) -> Path:
        """Compile a model for a host, measure it there, and write the bundle; return its path, `kept`."""
        assert model.file is not None
        others = f", as for {', '.join(one for one in hosts if one != host)}" if len(hosts) > 1 else ""
        _log.info(f"{model.name} is compiled for {host} and measured there{others}")
        if cameras := self._busy(host):
            _log.warning(
                f"{host} runs {cameras} cameras while {model.name} is measured there: they may lose frames, and the "
                "figures may be too slow"
            )
        with self._open_board(host) as board:
            machine = RemoteMachine(board)
            made = compile_source(model.file, shapes, None, machine=machine)
            self._compare(model, shapes, made, machine)
            profile = measured_profile(made, None, machine=machine)
            graph = made.compiled.graph
            decision, profile = decide(Problem(graph, made.platform, profile), "best", None, verify_s=0.0)
        kept.parent.mkdir(parents=True, exist_ok=True)
        bundle = Bundle(
            graph, made.platform, profile, decision.plan, made.compiled, None, decision, None, made.metadata
        )
        write_bundle(kept, bundle)
        for old in sorted(kept.parent.glob("*.tar"), key=lambda path: -path.stat().st_mtime)[MOST_KEPT:]:
            old.unlink(missing_ok=True)
        return kept

    def _compare(self, model: FleetModel, shapes: Shapes | None, made: Compiled, machine: RemoteMachine) -> None:
        """Compare what a host computes with this machine; raise ModelError where it is something else."""
        assert model.file is not None
        try:
            with without_warnings():
                own = compile_source(model.file, shapes, None)
        except PipelineError as error:
            _log.warning(f"what {machine.name} computes of {model.name} is not compared with this machine: {error}")
            return
        lines = machine.check(made.compiled, made.platform, own.compiled, own.platform)
        for line in lines:
            _log.info(f"{model.name} on {machine.name}: {line}")
        if not lines:
            _log.warning(f"what {machine.name} computes is not compared: no device alone computes all of {model.name}")


def _is_whole(kept: Path) -> bool:
    """Return whether a bundle is in the cache."""
    if not kept.exists():
        return False
    try:
        read_documents(kept)
        kept.touch()
    except (BundleError, OSError) as error:
        _log.info(f"{kept} is compiled anew: {error}")
        return False
    return True
