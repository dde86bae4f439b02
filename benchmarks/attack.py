"""Mutated files of every kind through the real command, each in a process that is watched: what comes of them.

    python benchmarks/attack.py --seeds 300          # some hours; --classes net.tar,plan.txt for two of them
    python benchmarks/attack.py --short              # some seconds, for CI

A class of inputs is a kind of file and the command that reads it. Of each seed comes one file. The command must end
with 0, 1 or 2; on an error it prints one line that names the file, with no exception's name and no traceback; it leaves
no temporary file and no half-written output; and it ends within the limits of time and memory. The script ends with 1
where something crashed, hung, printed a traceback or was left behind; `--keep FOLDER` keeps the files at fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from tests.support.mutations import mutated

MOST_CPU_S, MOST_S, MOST_BYTES = 60, 600.0, 6 << 30  # CPU time, which a busy machine does not lengthen
OUTCOMES = ("accepted", "clean", "no file", "raw", "traceback", "crash", "hang", "left behind")
WORST = ("traceback", "crash", "hang", "left behind")

PLATFORM = """name = "box"
[[device]]
name = "a"
cores = [0]
[device.model]
macs_per_s = 1e9
call_s = 1e-5
[[device]]
name = "b"
backend = "host"
cores = [1]
[device.model]
macs_per_s = 2e9
input_bytes_per_s = 1e9
[[link]]
source = "a"
destination = "b"
latency_s = 1e-5
bandwidth_bytes_per_s = 1e9
"""
MODEL_TOML = (
    'size = [32, 32]\nfit = "stretch"\ncolor = "rgb"\nlayout = "NCHW"\nscale = 0.00392\nmean = [0.0]\nstd = [1.0]\n'
)


@dataclass(frozen=True)
class Class:
    """A kind of file: its name, its sound content, and the command that reads the file of that name.

    Words of the command that name files of the folder of sound files are written as `{folder}/name`.
    """

    name: str
    content: bytes
    command: tuple[str, ...]


def graph_json() -> bytes:
    nodes = [
        {
            "name": f"n{i}",
            "op": "conv",
            "param_bytes": 100 * i,
            "output_bytes": 64,
            "macs": 1000,
            "output_shape": [8, 8],
        }
        for i in range(6)
    ]
    edges = [[0, 1], [1, 2], [1, 3], [2, 4], [3, 4], [4, 5]]
    return json.dumps({"name": "net", "nodes": nodes, "edges": edges}, indent=1).encode()


def own_graph_json(graph: bytes) -> bytes:
    """Return the graph in this project's own form."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(read_as_graph(graph)))


def read_as_graph(graph: bytes):
    from tvm_pipeline.core.graph_files import read_graph

    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(graph)
        file.flush()
        return read_graph(file.name)


def profile_json(graph: bytes) -> bytes:
    import msgspec

    from tvm_pipeline.core.platform import Link, Transfer
    from tvm_pipeline.core.profile import DeviceProfile, Profile

    known = read_as_graph(graph)
    one = DeviceProfile.in_order(known, [0.001] * len(known), [0.01] * len(known))
    other = replace(one, receive=Transfer(1e-5, 1e9))
    profile = Profile(known.name, known.fingerprint, {"a": one, "b": other}, (Link("a", "b", 1e-5, 1e9),))
    return msgspec.json.format(msgspec.json.encode(profile))


def plan_text(graph: bytes) -> bytes:
    names = read_as_graph(graph).operator_names
    first, second = ("".join(f"  {name}\n" for name in part) for part in (names[:3], names[3:]))
    head = "plan net by hand\nobjective throughput\nstatus feasible\nbound 100.0\n"
    stages = f"predicted throughput_fps 50.0 latency_s 0.1\nstage a\n{first}stage b\n{second}"
    return (head + stages).encode()


def light_classes(folder: Path) -> list[Class]:
    """Return the classes that compile nothing, and write the files that their commands need."""
    graph = graph_json()
    for name, content in (("graph.json", graph), ("platform.toml", PLATFORM.encode())):
        (folder / name).write_bytes(content)
    on_it = ("--platform", "{folder}/platform.toml", "--time-limit", "1")
    return [
        Class("graph.json", graph, ("plan", "{file}", *on_it)),
        Class("own_graph.json", own_graph_json(graph), ("plan", "{file}", *on_it)),
        Class(
            "platform.toml",
            PLATFORM.encode(),
            ("plan", "{folder}/graph.json", "--platform", "{file}", "--time-limit", "1"),
        ),
        Class("profile.json", profile_json(graph), ("plan", "{folder}/graph.json", "--profile", "{file}", *on_it)),
        Class(
            "plan.txt",
            plan_text(graph),
            ("simulate", "{folder}/graph.json", "--plan", "{file}", *on_it[:2], "--frames", "20"),
        ),
    ]


def bundle_classes(folder: Path) -> list[Class]:
    """Return the classes that read a bundle, which is compiled here, and those of models, which compile."""
    import tvm
    from tvm import relay

    from tests.support.onnx_models import write_picture_net

    model = write_picture_net(folder / "net.onnx")
    in_child(["compile", str(model), "-o", str(folder / "net.tar"), "--verify", "0"], folder, 600)
    x = relay.var("x", shape=(1, 8))
    relay_json = tvm.ir.save_json(tvm.IRModule.from_expr(relay.Function([x], relay.tanh(x)))).encode()
    tflite = Path(__file__).parents[1] / "tests/edgetpu/data/mobilenet_v2_int8.tflite"
    tpu = 'name = "box"\n[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "cpu"\n'
    (folder / "tpu.toml").write_text(tpu)
    service = f'bundle = "{folder}/net.tar"\nsource = ["synthetic:32x32@30:3"]\npolicy = "latest"\nlimit = 3\n'
    service += 'results = "out.jsonl"\nverify = 0\nwatchdog = 20.0\nadapt = "off"\n'
    run = (
        "run",
        "{folder}/net.tar",
        "--source",
        "synthetic:32x32@30:3",
        "--verify",
        "0",
        "--results",
        "{work}/out.jsonl",
    )
    return [
        Class("net.tar", (folder / "net.tar").read_bytes(), ("plan", "{file}", "--verify", "0")),
        Class("model.toml", MODEL_TOML.encode(), (*run, "--preprocessing", "{file}")),
        Class("service.toml", service.encode(), ("run", "--config", "{file}")),
        Class("net.onnx", model.read_bytes(), ("profile", "{file}", "--repeats", "2")),
        Class("relay.json", relay_json, ("profile", "{file}", "--repeats", "2")),
        Class(
            "net.tflite",
            tflite.read_bytes(),
            ("profile", "{file}", "--repeats", "2", "--platform", "{folder}/tpu.toml"),
        ),
    ]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status as of `os.waitpid`, None where it was killed by the clock; what it printed."""

    status: int | None
    printed: str


def in_child(arguments: Sequence[str], work: Path, limit_s: float) -> Ended:
    """Run the command in a copy of this process, within limits of time and memory."""
    said = work / "said"
    pid = os.fork()
    if pid == 0:
        _run_and_leave(arguments, work, said)
    deadline, found, status = time.monotonic() + limit_s, 0, 0
    while not found and time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    if not found:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    printed = said.read_text(errors="replace") if said.exists() else ""
    said.unlink(missing_ok=True)
    return Ended(status if found else None, printed)


def _run_and_leave(arguments: Sequence[str], work: Path, said: Path) -> None:
    code = 70
    try:
        os.setsid()
        for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for descriptor in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.chdir(work)
        (work / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(work / "tmp")
        sys.argv = ["tvm-pipeline", *arguments]
        from tvm_pipeline.cli import main

        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def outcome(ended: Ended, file: Path, left: list[str]) -> str:
    """Return which of OUTCOMES it is; the worst where it is several."""
    if ended.status is None or (os.WIFSIGNALED(ended.status) and os.WTERMSIG(ended.status) == signal.SIGXCPU):
        return "hang"
    if os.WIFSIGNALED(ended.status) or os.WEXITSTATUS(ended.status) not in (0, 1, 2):
        return "crash"
    if "Traceback (most recent call last)" in ended.printed:
        return "traceback"
    if left:
        return "left behind"
    if os.WEXITSTATUS(ended.status) == 0:
        return "accepted"
    errors = [line for line in ended.printed.splitlines() if line.startswith("error: ") or "Usage:" in line]
    if len(errors) != 1 or re.search(r"error: \w*(Error|Exception)\b|--traceback shows where", errors[0]):
        return "raw"
    return "clean" if file.name in errors[0] else "no file"


def attacked(one: Class, seed: int, sound: Path, keep: Path | None, say: Callable[[str], None]) -> str:
    """Return what came of the mutation of that seed."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        work = Path(name)
        file = work / one.name
        content = mutated(one.name, one.content, random.Random(f"{one.name} {seed}"))
        file.write_bytes(content)
        arguments = [word.format(file=file, folder=sound, work=work) for word in one.command]
        ended = in_child(arguments, work, MOST_S)
        left = [str(path.relative_to(work)) for path in work.rglob("*") if path.name != one.name]
        expected = {"tmp", "out.jsonl"} if ended.status == 0 else {"tmp"}
        left = [path for path in left if path not in expected]
        found = outcome(ended, file, left)
        if found in (*WORST, "raw", "no file"):
            last = [line for line in ended.printed.splitlines() if line.strip()][-1:] or [""]
            say(f"{one.name} seed {seed}: {found}: {', '.join(left) if found == 'left behind' else last[0][:300]}")
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, keep / f"{seed}-{one.name}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="files of each class")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--classes", default="", help="names of files, such as net.tar,plan.txt; all without it")
    parser.add_argument("--keep", type=Path, help="keep the files at fault in this folder")
    parser.add_argument("--short", action="store_true", help="a few files of the classes that compile nothing")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + (2 if arguments.short else arguments.seeds))
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        sound = Path(name)
        os.environ["TVM_PIPELINE_CACHE"] = str(sound / "cache")
        import tvm_pipeline.cli  # noqa: F401  # before the copies are made, each of which would import it again

        wanted = [part for part in arguments.classes.split(",") if part]
        classes = light_classes(sound)
        if not arguments.short and (not wanted or not set(wanted) <= {one.name for one in classes}):
            classes += bundle_classes(sound)
        classes = [one for one in classes if not wanted or one.name in wanted]
        table = Table("class", "inputs", *OUTCOMES, title="What came of mutated files")
        total: Counter[str] = Counter()
        for one in classes:
            counts = Counter(attacked(one, seed, sound, arguments.keep, console.print) for seed in seeds)
            total += counts
            table.add_row(one.name, str(len(seeds)), *(str(counts[key]) for key in OUTCOMES))
        table.add_row("sum", str(total.total()), *(str(total[key]) for key in OUTCOMES))
        console.print(table)
    if any(total[key] for key in WORST):
        sys.exit(1)


if __name__ == "__main__":
    main()
