"""A compile in a process of its own, since TVM and LLVM may end the process they run in.

An assertion of LLVM, a fault in a pass or too little memory is no exception: the process is gone.  So what no library
in the cache vouches for yet is compiled in a child, a fresh interpreter.  The child reads the model from a file
that the parent has written, writes the library into a folder that the parent has made, and tells what it does as
JSON, one object a line.  Where it dies, the parent raises a ModelError that names the operator, the target and the
signal.  LLVM makes code for all operators in one call, so the operator is found by a second child, which has LLVM
make the code of one operator after the other.

This module is both sides; the child imports TVM, the parent need not.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import errors
from tvm_pipeline.core.model import Model
from tvm_pipeline.tvm.kernel_sets import Choices, choices_of
from tvm_pipeline.tvm.relay.child_process import ORDER, end_with_parent, run_child

CODE = "making code"  # the stage of a compile in which LLVM runs


class Order(msgspec.Struct, frozen=True):
    """What a child is to compile.

    Attributes:
        library: the folder that it writes the library into.
        host: the target of the code that launches kernels on a device with memory of its own; empty for CPU cores.
        log_level: the least level of a record of the log that is sent.
        choices: of tuning, by workload.
        one_by_one: have LLVM make the code of one operator after the other, to find the one that it cannot make.
    """

    model: Model
    target: str
    library: str
    log_level: int
    host: str = ""
    choices: tuple[tuple[Any, Any], ...] = ()
    one_by_one: bool = False


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of what a child tells; fields that are empty are not meant.

    Attributes:
        progress: what is said to the user.
        doing: the stage of the compile, and the operator that it is for.
        log: logger, level and message of a record.
        error: the type and the message of the error that ended it.
        done: the library is written; the dtypes of the model's tensors.
    """

    progress: str = ""
    doing: tuple[str, str] = ("", "")
    log: tuple[str, int, str] = ("", 0, "")
    error: tuple[str, str] = ("", "")
    done: tuple[str, ...] = ()


def compile_in_child(
    model: Model,
    target: str,
    library: Path,
    progress: Callable[[str], None],
    host: str = "",
    choices: Choices | None = None,
) -> set[str]:
    """Compile `model` for `target` into the folder `library`, which is empty; return the dtypes of its tensors.

    Raises:
        ModelError: TVM cannot import or compile it, or the child died of it.
    """
    level, chosen = logging.getLogger().getEffectiveLevel(), tuple((choices or {}).items())
    order = Order(model, target, str(library.absolute()), level, host, chosen)
    ended = _run(order, progress)
    if isinstance(ended, set):
        return ended
    operator = ended.operator
    if ended.stage == CODE and ended.how != "SIGKILL":  # which no operator does
        for file in library.iterdir():
            file.unlink()
        again = _run(msgspec.structs.replace(order, one_by_one=True), lambda _: None)
        operator = again.operator if isinstance(again, _Death) else ""
    where = f" in operator {operator}" if operator else ""
    said = f" ({ended.last_words})" if ended.last_words else ""
    raise errors.ModelError(
        f"{model.name}: compiling it for {target} ended its process with {ended.how} while {ended.stage}{where}{said}; "
        f"{_advice(ended.how)}"
    )


def _advice(how: str) -> str:
    if how == "SIGKILL":
        return "the system kills what takes too much memory: free some, or compile on a larger machine"
    return "give the device a target with fewer features (llvm -mcpu=x86-64-v3, or -mattr=-FEATURE), and report this"


class _Death(msgspec.Struct):
    how: str
    stage: str
    operator: str
    last_words: str


def _run(order: Order, progress: Callable[[str], None]) -> set[str] | _Death:
    """Run a child; return the model's dtypes or how it died, and raise what it raised."""
    stage, operator, last = "starting", "", Report()

    def heard(line: bytes) -> None:
        """Pass on what the child reports, and keep its last stage, operator and report."""
        nonlocal stage, operator, last
        last = msgspec.json.decode(line, type=Report)
        if last.progress:
            progress(last.progress)
        if last.doing[0]:
            stage, operator = last.doing
        if last.log[0]:
            logging.getLogger(last.log[0]).log(last.log[1], "%s", last.log[2])

    ended = run_child(__name__, msgspec.msgpack.encode(order), heard)
    if last.done and ended.code == 0:
        sys.stderr.write(ended.words)
        return set(last.done)
    if last.error[0]:
        raise getattr(errors, last.error[0], errors.ModelError)(last.error[1])
    return _Death(ended.how, stage, operator, ended.last_words)


# --- The child ---


def serve(descriptor: int, folder: str) -> None:
    """Do the order in `folder` and report on `descriptor`."""
    end_with_parent()
    order = msgspec.msgpack.decode((Path(folder) / ORDER).read_bytes(), type=Order)
    with open(descriptor, "wb", buffering=0) as stream:

        def report(**fields: Any) -> None:
            stream.write(msgspec.json.encode(Report(**fields)) + b"\n")

        report(doing=("importing TVM", ""))
        from tvm_pipeline.tvm.relay.build import compile_module, element_types
        from tvm_pipeline.tvm.relay.importer import import_model

        logging.getLogger().addHandler(Sending(report))
        logging.getLogger().setLevel(order.log_level)
        try:
            report(doing=("importing the model", ""))
            mod, params = import_model(order.model, lambda line: report(progress=line))
            report(doing=("preparing the operators", ""))
            with _told(report, order.one_by_one):
                compile_module(
                    order.model.name,
                    mod,
                    params,
                    order.target,
                    Path(order.library),
                    lambda line: report(progress=line),
                    order.host,
                    choices_of(order.choices),
                )
            report(done=sorted(element_types(mod)))
        except errors.PipelineError as error:
            report(error=(type(error).__name__, str(error)))


class Sending(logging.Handler):
    """Sends records to the parent, whose handlers know what to do with them."""

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(log=(record.name, record.levelno, record.getMessage()))


@contextlib.contextmanager
def _told(report: Callable[..., None], one_by_one: bool) -> Iterator[None]:
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
