"""Note which arguments each kernel may overwrite, while TVM compiles it; `tvm/overwriting.py` has the proof."""

from __future__ import annotations

import tvm

from tvm_pipeline.tvm.overwriting import overwritable


@tvm.instrument.pass_instrument
class NoteOverwriting:
    """Sees functions as they are lowered, which TVM hands to nobody: the last time that they have buffers.

        with tvm.transform.PassContext(instruments=[NoteOverwriting(found)]):
            tvm.compile(functions, target=target, tir_pipeline=lowering.PIPELINE)

    Args:
        found: is filled: of each function the positions of the arguments that its result may overwrite.
    """

    def __init__(self, found: dict[str, tuple[int, ...]]) -> None:
        self._found = found

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        if info.name == "tirx.MakePackedAPI":
            self._found.update({str(symbol.name_hint): overwritable(each) for symbol, each in mod.functions.items()})
