"""Profiles, platforms, plans, layer times and bundles, changed as an attacker or a bad disk would."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import msgspec

from tests.support.mutations import mutated, packed, unpacked
from tvm_pipeline import open_bundle, write_bundle
from tvm_pipeline.core.plan import read_plan
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.planning import plan
from tvm_pipeline.profiling.layer_times import read_layer_times
from tvm_pipeline.testing import example_backend, example_bundle, example_problem, installed

LAYER_TIMES = b"""{"device": {"name": "d0", "backend": "host", "target": "llvm", "cores": [0]},
"networks": {"net": [{"name": "conv", "kind": "conv2d", "seconds": 0.001, "macs": 1000, "shape": [1, 3, 8, 8]}]}}
"""


@cache
def sound() -> dict[str, bytes]:
    """Return a sound file of each kind."""
    problem = example_problem()
    with installed(example_backend()), tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder) / "net.tar", example_bundle())
        bundle = (Path(folder) / "net.tar").read_bytes()
    return {
        "platform.toml": platform_toml(problem.platform).encode(),
        "profile.json": msgspec.json.encode(problem.profile),
        "plan.txt": str(plan(problem).plan).encode(),
        "layers.json": LAYER_TIMES,
        "net.tar": bundle,
    }


def read(name: str, reader: Callable[[Path], object], rng: random.Random) -> None:
    """Change a sound file, and read it."""
    read_changed(name, sound()[name], reader, rng)


def read_changed(name: str, content: bytes, reader: Callable[[Path], object], rng: random.Random) -> None:
    """Change a file, and read it."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = mutated(name, content, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        with contextlib.suppress(PipelineError):
            reader(path)


def bundle(rng: random.Random) -> None:
    """Change a bundle, with right sums half of the time; the fake backend pickles its model, which stays as it is."""
    model = unpacked(sound()["net.tar"])["compiled/model.pickle"]
    content = mutated("net.tar", sound()["net.tar"], rng)
    try:
        files = unpacked(content)
        if rng.random() < 0.5 and "manifest.json" in files:
            content = packed({**files, "compiled/model.pickle": model})
    except Exception:  # of Python's tarfile, which the product does not use: the archive is broken as it is meant to be
        pass
    with installed(example_backend()), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.tar"
        path.write_bytes(content)
        if b"compiled/model.pickle" in content and model not in content:
            return
        with contextlib.suppress(PipelineError), open_bundle(path):
            pass


FUZZERS = {
    "platform": partial(read, "platform.toml", read_platform),
    "profile": partial(read, "profile.json", read_profile),
    "plan": partial(read, "plan.txt", read_plan),
    "layer times": partial(read, "layers.json", read_layer_times),
    "bundle": bundle,
}
