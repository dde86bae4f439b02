"""Run all GPU figures of docs/figures.md on a machine that has a GPU for a short time, the most valuable ones first.

    python benchmarks/gpu_acceptance.py pack PARTS --python 3.12 --leave-out numpy numba scipy pandas
    python benchmarks/gpu_acceptance.py pack PARTS-relax --tvm relax --python 3.12
    python benchmarks/gpu_acceptance.py run --parts PARTS PARTS-relax --minutes 25 --out REPORT

`pack` runs where packages can be downloaded. It writes all that this project needs, for Linux on x86-64, in files of at
most 40 MiB (`--part-mib`), because some ways into a machine take no larger ones. `--leave-out` names what is there
already; leave no package out of which an extra needs one version, such as onnx. `run` runs in the same checkout on the
machine that has the GPU, without a network and with an empty Python: it unpacks the files and starts one step after the
other until the time is over. A step that is still running then is ended. REPORT/report.txt holds what the steps print,
and REPORT/report.json their states. The exit status is 1 if a step failed that had its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = range(39, 16, -1)  # of the machine with the GPU, the newest first
UNUSED = ("llvm/bin", "tvm/3rdparty/cutlass", "tvm/3rdparty/flashinfer", "onnx/backend/test/data/node")
MODELS = ("squeezenet", "mobilenet", "resnet-18", "resnet-50", "densenet-121", "inception_v3", "light_inception_v2")
EXPORTED = ("squeezenet", "mobilenet", "resnet-18")


@dataclass
class Step:
    """One command.

    Attributes:
        limit_s: it is ended after so long, so that one step does not take the time of those that follow.
        state: `passed`, `failed with status N`, `ended after N s`, or `not begun`.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    tvm: str = "relay"
    state: str = "not begun"
    seconds: float = 0.0


def steps(folder: Path) -> list[Step]:
    """Return all steps, the most valuable first: what runs at all, what is right, what is fast, what lasts."""
    gpu = ("benchmarks/gpu.py", "--device", "gpu", "--only")
    networks = folder / "networks"
    command = ("-m", "tvm_pipeline_command")
    return [
        Step("the GPU and its driver", ("-c", "import subprocess; subprocess.run(['nvidia-smi'])"), 20),
        Step("devices", (*command, "devices", "-o", str(folder / "machine.toml")), 60),
        Step("check", (*command, "check", "--minutes", "0.5", "-o", str(folder / "check.json")), 240),
        Step("cuts", (*gpu, "cuts"), 240),
        Step("networks as ONNX", ("benchmarks/export_networks.py", str(networks), *EXPORTED), 60),
        *(
            Step(
                f"candidates of {name} by {kind}",
                (*command, "compile", str(networks / f"{name}.onnx"), "-o", str(folder / f"{name}-{kind}.tar")),
                120,
                kind,
            )
            for name in EXPORTED
            for kind in ("relax", "relay")
        ),
        Step("failures", (*gpu, "live"), 240),
        *(Step(f"prediction of {name}", (*gpu, "prediction", "--models", f"{name}@112"), 180) for name in EXPORTED),
        Step("overhead", (*gpu, "overhead"), 60),
        *(Step(f"operators of {name}", (*gpu, "networks", "--models", name), 120) for name in MODELS),
        *(Step(f"speed of {name}", (*gpu, "speed", "--models", name), 180) for name in MODELS),
        Step("soak", (*gpu, "soak", "--minutes", "2"), 200),
    ]


def pack(folder: Path, tvm: str, python: str, leave_out: Sequence[str], part_bytes: int) -> None:
    """Write the packages of an extra into files of at most `part_bytes`."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["--platform=manylinux2014_x86_64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    there = [*platforms, "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    with tempfile.TemporaryDirectory() as temporary:
        wheels, site = Path(temporary) / "wheels", Path(temporary) / "site"
        source = Path(temporary) / "source"  # a build would leave its files in the checkout
        subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, source], check=True)
        (own,) = wheels.iterdir()
        report = Path(temporary) / "report.json"
        extra = "relay" if tvm == "relay" else "tvm"
        wanted = [f"{own}[{extra},video]", "hypothesis", "networkx"]
        options = ["--quiet", "--target", str(site), *there]
        subprocess.run([*pip, "install", *options, "--dry-run", "--report", str(report), *wanted], check=True)
        found = {item["metadata"]["name"]: item["metadata"]["version"] for item in _read(report)["install"]}
        named = {name.lower().replace("_", "-") for name in (*leave_out, "tvm-pipeline")}
        kept = [f"{name}=={version}" for name, version in found.items() if name.lower().replace("_", "-") not in named]
        subprocess.run([*pip, "install", *options, "--no-deps", "--no-compile", str(own), *kept], check=True)
        for name in UNUSED:
            shutil.rmtree(site / name, ignore_errors=True)
        folder.mkdir(parents=True)
        whole = Path(temporary) / "site.tar.xz"
        with tarfile.open(whole, "w:xz", preset=4) as archive:
            archive.add(site, ".")
        with whole.open("rb") as file:
            for number, piece in enumerate(iter(lambda: file.read(part_bytes), b"")):
                (folder / f"{number:02}").write_bytes(piece)
    print(f"{folder}: {len(list(folder.iterdir()))} files of {', '.join(kept)}")


def _read(path: Path) -> dict[str, list[dict[str, dict[str, str]]]]:
    read: dict[str, list[dict[str, dict[str, str]]]] = json.loads(path.read_text())
    return read


def unpack(parts: Path, site: Path) -> None:
    """Unpack what `pack` wrote, with `xz` and `tar`, which are faster than Python."""
    with subprocess.Popen(["tar", "--extract", "--xz", "--directory", site], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for part in sorted(parts.iterdir()):
            tar.stdin.write(part.read_bytes())
    if tar.returncode:
        sys.exit(f"tar ended with status {tar.returncode} on {parts}; copy all files that `pack` wrote")


def run(parts: Sequence[Path], minutes: float, out: Path, only: Sequence[str]) -> bool:
    ends_s = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp())
    sites = {}
    for folder in parts:
        sites["relax" if "relax" in folder.name else "relay"] = site = work / f"site-{folder.name}"
        if not site.exists():
            site.mkdir()
            unpack(folder, site)
    chosen = [step for step in steps(work) if not only or any(word in step.name for word in only)]
    with (out / "report.txt").open("w") as report:
        for step in chosen:
            left_s = ends_s - time.monotonic()
            if left_s > 5 and (step.tvm in sites or not parts):
                print(f"\n## {step.name}\n", file=report, flush=True)
                _run(step, min(left_s, step.limit_s), sites.get(step.tvm), work, report.fileno())
                print(f"{step.name}: {step.state}, {step.seconds:.0f} s", flush=True)
            (out / "report.json").write_text(json.dumps([asdict(step) for step in chosen], indent=1))
    shutil.rmtree(work, ignore_errors=True)
    return not any(step.state.startswith("failed") for step in chosen)


def _run(step: Step, limit_s: float, site: Path | None, work: Path, output: int) -> None:
    """Run a step in a process group of its own, which is ended with all of its children when its time is over."""
    own = [ROOT, ROOT / "backends", ROOT / "plugins", *([site] if site else [])]
    cache = work / f"cache-{step.tvm}"
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, own)), "XDG_CACHE_HOME": str(cache)}
    environment |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
    began_s = time.monotonic()
    process = subprocess.Popen(
        (sys.executable, *step.command), cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
    )
    try:
        status = process.wait(limit_s)
        step.state = f"failed with status {status}" if status else "passed"
    except subprocess.TimeoutExpired:
        step.state = f"ended after {limit_s:.0f} s"
    for number in _signals():
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            time.sleep(0.5)
    process.wait()
    step.seconds = time.monotonic() - began_s


def _signals() -> Iterator[signal.Signals]:
    yield from (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download and pack what `run` needs")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--tvm", choices=("relay", "relax"), default="relay")
    packing.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    packing.add_argument("--leave-out", nargs="*", default=(), metavar="PACKAGE", help="what is there already")
    packing.add_argument("--part-mib", type=int, default=40, metavar="MIB", help="the greatest file; default: 40")
    running = commands.add_parser("run", help="run the steps until the time is over")
    running.add_argument("--parts", nargs="*", type=Path, default=(), help="folders of `pack`; default: installed here")
    running.add_argument("--minutes", type=float, default=25.0)
    running.add_argument("--out", type=Path, default=Path("gpu-report"))
    running.add_argument("--only", nargs="*", default=(), metavar="WORD", help="steps whose name has one of these")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.folder, options.tvm, options.python, options.leave_out, options.part_mib << 20)
    else:
        sys.exit(0 if run(options.parts, options.minutes, options.out, options.only) else 1)


if __name__ == "__main__":
    main()
