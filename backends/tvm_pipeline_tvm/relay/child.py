"""A compile in a process of its own, since TVM and LLVM may end the process they run in.

An assertion of LLVM, a fault in a pass or too little memory is no exception: the process is gone.  So what no library
in the cache vouches for yet is compiled in a child, a fresh interpreter.  The child writes the library into a folder
that the parent has made, and reports what it does.  Where it dies, the parent raises a ModelError that names the
operator, the target and the signal.  LLVM makes code for all operators in one call, so the operator is found by a
second child, which has LLVM make the code of one operator after the other.

This module is both sides; the child imports TVM, the parent need not.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec

from tvm_pipeline import errors
from tvm_pipeline.core.model import Model
from tvm_pipeline.processes import Child
from tvm_pipeline_tvm.child_process import ChildReport, last_words, reporting, run_child
from tvm_pipeline_tvm.kernel_sets import Choices, choices_of

CODE = "making code"  # the stage of a compile in which LLVM runs


class CompileRequest(msgspec.Struct, frozen=True):
    """What a child is to compile.

    Attributes:
        library: the folder that it writes the library into.
        host: the target of the code that launches kernels on a device with memory of its own; empty for CPU cores.
        log_level: the least level of a record of the log that is sent.
        choices: of tuning, by workload.
        elsewhere: the code runs on another machine alone.
        one_by_one: have LLVM make the code of one operator after the other, to find the one that it cannot make.
    """

    model: Model
    target: str
    library: str
    log_level: int
    host: str = ""
    choices: tuple[tuple[Any, Any], ...] = ()
    elsewhere: bool = False
    one_by_one: bool = False


class Report(ChildReport, frozen=True, omit_defaults=True):
    """What a child tells.

    Attributes:
        doing: the stage of the compile, and the operator that it is for.
        done: the library is written; the dtypes of the model's tensors.
    """

    doing: tuple[str, str] = ("", "")
    done: tuple[str, ...] = ()


def compile_in_child(
    model: Model,
    target: str,
    library: Path,
    host: str = "",
    choices: Choices | None = None,
    *,
    elsewhere: bool = False,
) -> set[str]:
    """Compile `model` for `target` into the folder `library`, which is empty; return the dtypes of its tensors.

    Raises:
        ModelError: TVM cannot import or compile it, or the child died of it.
    """
    level, chosen = logging.getLogger().getEffectiveLevel(), tuple((choices or {}).items())
    order = CompileRequest(model, target, str(library.absolute()), level, host, chosen, elsewhere)
    outcome = _run(order)
    if isinstance(outcome, set):
        return outcome
    child, stage, operator = outcome
    if stage == CODE and child.status != -SIGKILL:  # which no operator does
        for file in library.iterdir():
            file.unlink()
        again = _run(msgspec.structs.replace(order, one_by_one=True))
        operator = "" if isinstance(again, set) else again[2]
    where = f" in operator {operator}" if operator else ""
    said = f" ({last_words(child)})" if last_words(child) else ""
    raise errors.ModelError(
        f"{model.name}: the process that compiled it for {target} {child.how()} while {stage}{where}{said}; "
        f"{_advice(child.status)}"
    )


def _advice(status: int | None) -> str:
    if status == -SIGKILL:
        return "the system kills what takes too much memory: free some, or compile on a larger machine"
    return "give the device a target with fewer features (llvm -mcpu=x86-64-v3, or -mattr=-FEATURE), and report this"


def _run(order: CompileRequest) -> set[str] | tuple[Child, str, str]:
    """Run a child; return the model's dtypes, or how it died, at which stage and operator; raise what it raised."""
    doing, done = ("starting", ""), set[str]()

    def heard(report: Report) -> None:
        nonlocal doing, done
        doing, done = report.doing if report.doing[0] else doing, set(report.done)

    child = run_child(f"{__name__}:serve", order, Report, heard)
    if done and child.status == 0:
        sys.stderr.write(child.words)
        return done
    return child, *doing


# --- The child ---


def serve(request: bytes, channel: socket.socket) -> None:
    """Do what an order says, and report."""
    order = msgspec.msgpack.decode(request, type=CompileRequest)
    with reporting(channel, Report, order.log_level) as report:
        report(doing=("importing TVM", ""))
        from tvm_pipeline_tvm.relay.build import compile_module, element_types
        from tvm_pipeline_tvm.relay.importer import import_model

        report(doing=("importing the model", ""))
        mod, params = import_model(order.model)
        report(doing=("preparing the operators", ""))
        with _lowering_reports(report, order.one_by_one):
            compile_module(
                order.model.name,
                mod,
                params,
                order.target,
                Path(order.library),
                order.host,
                choices_of(order.choices),
                tolerance=order.model.tolerance,
                elsewhere=order.elsewhere,
            )
        report(done=sorted(element_types(mod)))


@contextlib.contextmanager
def _lowering_reports(report: Callable[..., None], one_by_one: bool) -> Iterator[None]:
    """Report each operator that Relay lowers, and when LLVM begins to make code."""
    import tvm
    from tvm.relay.backend import te_compiler

    select, make = te_compiler.select_implementation, tvm.get_global_func("target.build.llvm")

    def selecting(op: Any, *arguments: Any, **options: Any) -> Any:
        report(doing=("choosing a schedule", str(op.name)))
        return select(op, *arguments, **options)

    def making(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
        if one_by_one:
            for name, function in mod.functions_items():
                report(doing=(CODE, operator_of(str(name.name_hint))))
                with contextlib.suppress(tvm.TVMError):  # alone it may miss others; it is the process that counts
                    make(tvm.IRModule({name: function}, attrs=mod.attrs), target)
        report(doing=(CODE, ""))
        return make(mod, target)

    te_compiler.select_implementation = selecting
    tvm.register_func("target.build.llvm", making, override=True)
    try:
        yield
    finally:
        te_compiler.select_implementation = select
        tvm.register_func("target.build.llvm", make, override=True)


def operator_of(function: str) -> str:
    """tvmgen_default_fused_nn_conv2d_add -> nn_conv2d_add: what TVM names a kernel after."""
    return function.removeprefix("tvmgen_default_").removeprefix("fused_")
