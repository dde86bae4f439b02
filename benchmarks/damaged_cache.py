"""Damage the cache again and again: is each damage noticed, and are the results those of the sound cache?

    python benchmarks/damaged_cache.py [--damages 200] [--seed 0]        (--short for CI)

A damage is zeros, three flipped bits, a cut, or two files exchanged, anywhere in the cache of a small network that was
compiled and planned. After each, `run` compiles and runs the network again, in a fork of this
process. The script ends with 1 where a result differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from forked_command import command, forked

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.onnx_models import write_picture_net

KINDS = ("zeros", "bits", "cut", "exchanged")
PLATFORM = """name = "two"
[[device]]
name = "a"
cores = [0]
[[device]]
name = "b"
cores = [1]
"""


def run(folder: Path, cache: Path, short: bool) -> tuple[int, list[object], str]:
    """Compile and run in a fork, the model itself too unless it is short; return status, outputs and what it said."""
    results, said, bundle = folder / "results.jsonl", folder / "said", folder / "net.tar"
    results.unlink(missing_ok=True)
    commands = (
        ("compile", folder / "net.onnx", "-o", bundle, "--verify", 0, "--platform", folder / "two.toml"),
        ("run", bundle, "--source", "synthetic:64x48@30:3", "--verify", 0, "--results", results),
        ("run", folder / "net.onnx", "--source", "synthetic:64x48@30:3", "--verify", 0),
    )

    def run_all() -> None:
        os.environ["TVM_PIPELINE_CACHE"] = str(cache)
        for words in commands[: 2 if short else None]:
            command(*words)

    _, status = os.waitpid(forked(run_all, said), 0)
    lines = results.read_text().splitlines() if results.exists() else []
    return status, [json.loads(line)["outputs"] for line in lines], said.read_text()


def damage(cache: Path, rng: random.Random) -> str:
    """Damage a file of a cache; return how, and which."""
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size)
    path, kind = rng.choice(files), rng.choice(KINDS)
    content = bytearray(path.read_bytes())
    if kind == "zeros":
        begin = rng.randrange(len(content))
        content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
    elif kind == "bits":
        for _ in range(3):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    else:
        other = rng.choice([file for file in files if file != path])
        content[:] = other.read_bytes()
        other.write_bytes(path.read_bytes())
    path.write_bytes(content)
    return f"{kind} in {path.relative_to(cache)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_picture_net(folder / "net.onnx")
        (folder / "two.toml").write_text(PLATFORM)
        status, sound, said = run(folder, folder / "sound", options.short)
        if status or not sound:
            sys.exit(f"the sound cache does not run:\n{said}")
        for seed in range(options.seed, options.seed + (1 if options.short else options.damages)):
            cache = folder / "damaged"
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(folder / "sound", cache)
            what = damage(cache, random.Random(seed))
            status, outputs, said = run(folder, cache, options.short)
            result = "wrong" if outputs != sound else "failed" if status else "right"
            told = "noticed" if "damaged" in said or "anew" in said else "silent"
            counts[f"{result}, {told}"] += 1
            if result != "right":
                print(f"seed {seed}: {what}: {result}\n{said}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    sys.exit(any(not outcome.startswith("right") for outcome in counts))


if __name__ == "__main__":
    main()
