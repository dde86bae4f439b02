"""The kernels of a network for a CUDA device, by Relax: their rules, and what they take of a multiprocessor.

    python benchmarks/relax_gpu.py NETWORK.onnx [sm_87]

It runs in an environment with Relax, with NVIDIA's compiler (the extra `cuda`, or a toolkit) and without a GPU:
nothing here is a measurement of speed. Occupancy is the share of a multiprocessor's threads that the blocks of a kernel
can fill, from registers, shared memory and threads by NVIDIA's rules, or from the number of blocks where that is less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from math import ceil, prod
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx

from tvm_pipeline import frontends
from tvm_pipeline_kernels.gpu_tiles import gpu_of, resident_blocks
from tvm_pipeline_tvm.relax.build import functions_of
from tvm_pipeline_tvm.relax.cuda_kernels import cuda_target, write_cuda_kernels
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused, gpu_kernels
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.kernel_walkers import flat_module
from tvm_pipeline_tvm.relax.pad_channels import pad_channels
from tvm_pipeline_tvm.relax.simplify import simplified


def main() -> None:
    network, arch = [*sys.argv[1:], "sm_87"][:2]
    target = cuda_target(arch, tvm.target.Target({"kind": "llvm"}))
    fused = gpu_fused(pad_channels(simplified(import_model(frontends.load(network)))), target)
    flat, rules = flat_module(fused), {}
    begin = time.process_time()
    functions = functions_of(gpu_kernels(fused, target, rules))
    scheduled_s, begin = time.process_time() - begin, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        taken = write_cuda_kernels(functions, target, Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    compiled_s = time.process_time() - begin

    gpu = gpu_of(int(arch.removeprefix("sm_")))
    print("| kernel | calls | output | rule | blocks | threads | registers | shared bytes | occupancy |")
    print("|---|---|---|---|---|---|---|---|---|")
    calls = Counter(call.function for call in flat.calls)
    seen: set[str] = set()
    for kernel, call, is_view in zip(flat.kernels, flat.calls, flat.is_view, strict=True):
        if is_view or call.function in seen or f"{call.function}_kernel" not in taken:
            continue
        seen.add(call.function)
        used, blocks = taken[f"{call.function}_kernel"], blocks_of(functions[call.function])
        fit = resident_blocks(used.threads, used.registers, used.shared_bytes, gpu)
        there = min(fit, ceil(blocks / gpu.processors))
        kind = " + ".join(name for name, _ in kernel.operators)
        print(
            f"| {kind} | {calls[call.function]} | {'x'.join(map(str, kernel.outputs[0].shape))} "
            f"| {rules[call.function]} | {blocks} | {used.threads} | {used.registers} | {used.shared_bytes} "
            f"| {there * used.threads / gpu.threads:.0%} |"
        )
        if used.spilled_bytes:
            print(f"  {call.function} spills {used.spilled_bytes} bytes")
    print(f"\n{len(taken)} kernels, {size} bytes")
    print(f"{scheduled_s:.1f} s of CPU time for the schedules, {compiled_s:.1f} s to compile them")


def blocks_of(function: tirx.PrimFunc) -> int:
    """Return how many blocks of threads the first kernel of a scheduled function has."""
    extents: dict[str, int] = {}

    def visit(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            extents.setdefault(str(loop.thread_binding.thread_tag), int(loop.extent))

    tvm_ffi.structural_walk(function.body, [(tirx.For, visit)], order="post")
    return prod(extent for tag, extent in extents.items() if tag.startswith("blockIdx"))


if __name__ == "__main__":
    main()
