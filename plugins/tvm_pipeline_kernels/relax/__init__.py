"""Kernels for what Relax compiles; `cpu_pipeline` has them in the script of anyone who calls `tvm.compile`.

    import onnx, tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx
    from tvm_pipeline_kernels.relax import TIR_PIPELINE, cpu_pipeline

    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
    mod = from_onnx(onnx.load("net.onnx"))
    executable = tvm.compile(mod, target, relax_pipeline=cpu_pipeline(target), tir_pipeline=TIR_PIPELINE)
    vm = relax.VirtualMachine(executable, tvm.cpu())

kernel_set.py      what the engine is given
emitter.py         what tuning asks of Relax for CPU cores
device_emitter.py  what tuning asks of Relax for a GPU
device_child.py    what the process that tunes for a GPU does
cpu_pipeline.py    a pipeline of passes for `tvm.compile`
blocked.py         images in blocked layout, which fast convolutions read
legalizations.py   products of matrices and softmax, made by the rules that schedule them
schedules/         schedules of our own for CPU cores
gpu_rules.py       rules of convolutions and pools for GPUs
gpu_conv2d.py      a convolution on a GPU

This needs the extra `tvm`, in an environment without Relay; an import elsewhere says what to install.
"""

from tvm_pipeline_tvm.installed_ir import demand

demand("relax")

from tvm_pipeline_kernels.relax.cpu_pipeline import cpu_pipeline  # noqa: E402  after `demand`
from tvm_pipeline_kernels.relax.schedules.lowering import PIPELINE as TIR_PIPELINE  # noqa: E402

__all__ = ["TIR_PIPELINE", "cpu_pipeline"]
