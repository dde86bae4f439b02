"""Try the packages in `dist/` (`make dist`) as a user meets them: from a fresh environment, outside the repository.

The wheel is installed with no extra and, over copies of that environment, with each extra alone, or with several of one
library each; the source distribution is installed once. Every environment must plan, that of the source
distribution by compiled loops, and must do the work that its extra is for; a command whose extra is missing must name
that extra. Both packages must hold every file of the repository that belongs into them. Two extras with a TVM each must
be refused together.

    python .ci/packages.py [EXTRAS ...]      (names of CHECKS, or `both`; all of them without one)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# Files of the repository that belong to no package.
NOT_PACKAGED = (".ci/", ".gitignore", "MANIFEST.in")
MODEL, GRAPH, PLATFORM = "mobilenet_v2_int8.tflite", "MobileNetV2.json", "coral-usb-4.toml"
FIXTURES = (
    f"profiles/keras/{GRAPH}",
    f"profiles/platforms/{PLATFORM}",
    f"tests/edgetpu/data/{MODEL}",
    "tests/support/onnx_models.py",
)
ENGINE = '[[device]]\nname = "cpu0"\nbackend = "onnxruntime"\ncores = [0]\n'
# An Edge TPU's stages on TFLite's own CPU kernels: what every machine has.
NO_TPU = '[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "cpu"\ncores = [0]\n'


class CheckError(Exception):
    """A package is not as it must be."""


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment, and a folder outside the repository with what the checks read."""

    folder: Path

    def run(self, *command: str, code: int = 0, says: str = "") -> None:
        """Run a command; it must end with this code, and its output must contain `says`."""
        program, *arguments = command
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        variables["TVM_PIPELINE_CACHE"] = str(self.folder / "cache")
        if self.folder.name != "sdist":  # numba takes longer to compile loops than Python to run them
            variables["NUMBA_DISABLE_JIT"] = "1"
        done = subprocess.run(
            [self.folder / "venv" / "bin" / program, *arguments],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        output = " ".join(done.stdout.split())
        if done.returncode != code or says not in output:
            expected = f"code {code}" + (f" and {says!r}" if says else "")
            raise CheckError(f"{' '.join(command)}: code {done.returncode}, expected {expected}:\n{done.stdout}")

    def cli(self, *arguments: str, code: int = 0, says: str = "") -> None:
        # The first line of the script names the Python of the environment that this one may be a copy of.
        self.run("python", str(self.folder / "venv" / "bin" / "tvm-pipeline"), *arguments, code=code, says=says)

    def python(self, program: str, code: int = 0, says: str = "") -> None:
        self.run("python", "-c", program, code=code, says=says)


def is_whole(env: Environment) -> None:
    """What the package promises without an extra is there."""
    env.cli("--version", says="tvm-pipeline ")
    env.python(
        "import importlib.resources, tvm_pipeline as t\n"
        "assert all(hasattr(t, name) for name in t.__all__)\n"
        "assert importlib.resources.files(t).joinpath('py.typed').is_file()\n"
        "assert importlib.resources.files('tvm_pipeline_video').joinpath('watch/page.html').is_file()\n"
        "from tvm_pipeline.power import power_modes, survey\n"
        "assert survey().looked_for and type(power_modes()).__name__ == 'BoardModes'"
    )


def needs(env: Environment, extra: str, *arguments: str) -> None:
    """The command fails with one line that names the extra."""
    env.cli(*arguments, code=1, says=f"tvm-pipeline[{extra}]")


def check_none(env: Environment) -> None:
    is_whole(env)
    needs(env, "tvm", "devices")
    needs(env, "tvm", "compile", "net.onnx", "-o", "model.tar")
    needs(env, "edgetpu", "compile", MODEL, "-o", "model.tar")
    needs(env, "edgetpu", "slice", MODEL, "--plan", "plan.txt")
    needs(env, "plot", "memory", GRAPH, "--plot", "memory.svg")
    needs(env, "video", "run", "model.tar", "--source", "0")
    needs(env, "loadgen", "loadgen", "model.tar")


def compiles(env: Environment) -> None:
    env.cli("devices", says="cpu0")
    env.python("import onnx_models, pathlib; onnx_models.write_picture_net(pathlib.Path('net.onnx'))")
    env.cli("compile", "net.onnx", "-o", "model.tar", "--verify", "0", says="model.tar")
    env.cli("bench", "model.tar", "--seconds", "0.1", "--rounds", "1", "--json", says="measured")


def check_relay(env: Environment) -> None:
    env.cli("--version", says="Relay, TVM 0.19.0")
    compiles(env)
    env.python("import tvm_pipeline; tvm_pipeline.load('squeezenet', {'data': (1, 3, 64, 64)})")


def check_tvm(env: Environment) -> None:
    env.cli("--version", says="Relax, TVM 0.27.0")
    compiles(env)
    env.cli("tune", "net.onnx", says="the search ended")
    rewritten = "compile", "net.onnx", "-o", "net.tar", "--memory-rewrite"
    env.cli(*rewritten, says="net.tar")


def check_video(env: Environment) -> None:
    env.python(
        "import numpy as np, PIL.Image\n"
        "PIL.Image.fromarray(np.full((32, 48, 3), 200, np.uint8)).save('picture.png')\n"
        "from tvm_pipeline_video import open_source\n"
        "with open_source('picture.png') as source:\n"
        "    assert [frame.image.shape for frame in source] == [(32, 48, 3)]"
    )
    needs(env, "frigate", "serve", "model.tar", "--frigate", "ipc:///tmp/frigate")
    needs(env, "kserve", "serve", "model.tar", "--http", "8000")
    needs(env, "kserve", "serve", "model.tar", "--grpc", "8001")


def check_plot(env: Environment) -> None:
    env.cli("memory", GRAPH, "--plot", "memory.svg", says="memory.svg")
    if not (env.folder / "memory.svg").stat().st_size:
        raise CheckError("memory.svg is empty")


def check_watch(env: Environment) -> None:
    env.python("import tvm_pipeline_video.watch.metrics, tvm_pipeline_video.watch.server")


def check_clients(env: Environment) -> None:
    """Each of these extras is one library or two, which the others do not bring."""
    env.python("import paho.mqtt.client, paho.mqtt.enums, paho.mqtt.packettypes, paho.mqtt.properties")
    env.python("import zmq, mlperf_loadgen, pyopencl, starlette, uvicorn, tritonclient.grpc\nfrom jtop import jtop")
    env.python("from tvm_pipeline_video.tracking import Trackers, Tracking; Trackers(Tracking())")


def check_cuda(env: Environment, version: int = 13) -> None:
    """The headers and libraries that it brings are found; a driver is not needed for that."""
    env.python(
        "from tvm_pipeline_tvm.devices.cuda_toolkit import libraries, toolkits\n"
        "own = [t for t in toolkits() if 'site-packages' in str(t.includes[0])]\n"
        f"assert any(t.version // 1000 == {version} for t in own)\n"
        f"found = [list(libraries(name, ['{version}'])) for name in ('cudart', 'nvrtc')]\n"
        "assert all(any('site-packages' in each._name for each in libraries) for libraries in found)"
    )


def check_edgetpu(env: Environment) -> None:
    (env.folder / "desk.toml").write_text(f'name = "desk"\n{NO_TPU}')
    env.cli("devices", "--platform", "desk.toml", says="tpu0")
    env.cli("compile", MODEL, "--platform", "desk.toml", "-o", "model.tar", says="model.tar")
    env.cli("plan", "model.tar", "--json", says='"status"')
    (env.folder / "litert.toml").write_text(f'name = "desk"\n{ENGINE}'.replace("onnxruntime", "litert"))
    env.cli("compile", MODEL, "--platform", "litert.toml", "--verify", "0", "-o", "litert.tar", says="litert.tar")


def check_onnxruntime(env: Environment) -> None:
    """A platform file may name the engine where there is no TVM."""
    env.python("import onnx_models, pathlib; onnx_models.write_picture_net(pathlib.Path('net.onnx'))")
    (env.folder / "desk.toml").write_text(f'name = "desk"\n{ENGINE}')
    env.cli("compile", "net.onnx", "--platform", "desk.toml", "--verify", "0", "-o", "model.tar", says="model.tar")
    env.cli("bench", "model.tar", "--seconds", "0.1", "--rounds", "1", "--json", says="measured")


def check_openvino(env: Environment) -> None:
    """A platform file may name the engine where there is no TVM."""
    env.python("import onnx_models, pathlib; onnx_models.write_picture_net(pathlib.Path('net.onnx'))")
    (env.folder / "desk.toml").write_text(f'name = "desk"\n{ENGINE}'.replace("onnxruntime", "openvino"))
    env.cli("compile", "net.onnx", "--platform", "desk.toml", "--verify", "0", "-o", "model.tar", says="model.tar")


CHECKS: dict[str, Callable[[Environment], None]] = {
    "none": check_none,
    "sdist": is_whole,
    "tvm": check_tvm,
    "relay": check_relay,
    "video": check_video,
    "plot": check_plot,
    "watch": check_watch,
    "mqtt,frigate,kserve,loadgen,jetson,tracking,opencl": check_clients,
    "cuda": check_cuda,
    "relay-cuda": lambda env: check_cuda(env, 12),
    "edgetpu": check_edgetpu,
    "onnxruntime": check_onnxruntime,
    "openvino": check_openvino,
}


# Made first: the others are made over the first of these.
FIRST = ("none", "sdist")


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [file for file in listed.splitlines() if not file.startswith(NOT_PACKAGED)]


def check_contents(wheel: Path, sdist: Path) -> None:
    """Raise CheckError unless the sdist holds the repository and the wheel its packages, and nothing compiled."""
    files = tracked_files()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    folders = ("tvm_pipeline/", "backends/", "plugins/")
    installed = {file.removeprefix("backends/").removeprefix("plugins/") for file in files if file.startswith(folders)}
    for package, present, required in ((sdist, in_sdist, set(files)), (wheel, in_wheel, installed)):
        missing, compiled = sorted(required - present), sorted(f for f in present if f.endswith((".pyc", ".pyo")))
        if missing or compiled:
            raise CheckError(f"{package.name} lacks {missing[:5]}, and holds {compiled[:5]}")
    for name in ("LICENSE", "METADATA"):
        if not any(file.endswith((f".dist-info/{name}", f"licenses/{name}")) for file in in_wheel):
            raise CheckError(f"{wheel.name} lacks {name}")


def install(folder: Path, package: Path, extra: str, base: Path | None = None) -> str:
    """Make a virtual environment in `folder`, and install the package there with its extra (`[tvm]`, or nothing).

    Where there is a `base`, it begins as a copy of the environment there, by links: uv, pip and Python replace files,
    and change none. Return what pip says where it fails, else nothing.
    """
    if base:
        shutil.copytree(base / "venv", folder / "venv", symlinks=True, copy_function=os.link)
    else:
        venv.create(folder / "venv", symlinks=True)
    # The caller's uv and pip install, so that no environment needs one; Python compiles the modules that it imports.
    python, requirement = str(folder / "venv" / "bin" / "python"), f"tvm-pipeline{extra} @ {package.as_uri()}"
    uv = ["uv", "pip", "install", "--python", python]
    pip = ["pip", "--python", python, "install", "--no-compile", "--prefer-binary"]
    for program in (uv, pip):  # uv needs a quarter of the time, and pip falls in where uv does not find the registry
        command = [sys.executable, "-m", *program, "--quiet", requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if not done.returncode:
            return ""
    return f"pip install {requirement}:\n{done.stderr}"


def check_both(wheel: Path) -> str:
    """Ask for both TVMs in one environment, which pip must refuse; return a line for people."""
    with tempfile.TemporaryDirectory(prefix="tvm-pipeline-both-") as temporary:
        refused = install(Path(temporary), wheel, "[tvm,relay]")
    if "conflicting dependencies" not in refused:
        raise CheckError(f"pip installs [tvm,relay] in one environment, or fails otherwise:\n{refused}")
    return "both: pip refuses [tvm,relay]"


def check(name: str, folder: Path, package: Path, base: Path | None) -> str:
    """Install one environment in `folder` and try it; return a line for people."""
    begin = time.monotonic()
    failed = install(folder, package, "" if name in FIRST else f"[{name}]", base)
    if failed:
        raise CheckError(failed)
    env = Environment(folder)
    installed_s = time.monotonic() - begin
    for file in FIXTURES:
        shutil.copy2(ROOT / file, env.folder)
    (env.folder / "net.onnx").write_bytes(b"\0")
    (env.folder / "plan.txt").write_text("")
    env.cli("plan", GRAPH, "--platform", PLATFORM, "--stages", "4", "--json", says='"status":"optimal"')
    CHECKS[name](env)
    return f"{name}: works ({installed_s:.0f} s to install, {time.monotonic() - begin - installed_s:.0f} s to try)"


def check_all(names: Sequence[str], wheel: Path, sdist: Path) -> int:
    """Check environments, two at a time, and print a line for each; return how many failed. FIRST begins `names`."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="tvm-pipeline-packages-") as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)

        def submit(name: str) -> Future[str]:
            if name == "both":
                return pool.submit(check_both, wheel)
            (folder / name).mkdir()
            base = None if name in FIRST else folder / "none"
            return pool.submit(check, name, folder / name, sdist if name == "sdist" else wheel, base)

        for part in (FIRST, names[len(FIRST) :]):
            for name, future in [(name, submit(name)) for name in part]:
                try:
                    print(future.result(), flush=True)
                except (CheckError, subprocess.SubprocessError, OSError) as error:
                    failed += 1
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
    return failed


def main(names: Sequence[str]) -> int:
    begin = time.monotonic()
    wheels, sdists = sorted(DIST.glob("*.whl")), sorted(DIST.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        print(
            f"dist/ holds {len(wheels)} wheels and {len(sdists)} source distributions; run `make dist`", file=sys.stderr
        )
        return 1
    failed = 0
    try:
        check_contents(wheels[0], sdists[0])
        print("contents: complete", flush=True)
    except CheckError as error:
        failed += 1
        print(f"contents: {error}", file=sys.stderr, flush=True)
    names = list(dict.fromkeys((*FIRST, *names)))
    failed += check_all(names, wheels[0], sdists[0])
    print(f"{len(names)} environments in {time.monotonic() - begin:.0f} s, {failed} failures")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*CHECKS, "both"]))
