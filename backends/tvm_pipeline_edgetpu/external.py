"""TFLite's external delegates, by which NPUs of boards run .tflite files, and the child that tries them first.

A vendor ships a library with TFLite's plug-in interface (tensorflow/lite/delegates/external of TensorFlow's source), as
libvx_delegate.so of NXP or libQnnTFLiteDelegate.so of Qualcomm. What a delegate does not take, TFLite would compute on
the CPU without a word. So each kind of operator runs by itself first, in a child, because such a library may end its
process, and is compared with TFLite's own kernels. Next: `interpreter.py`.
"""

from __future__ import annotations

import socket
from typing import Any

from tvm_pipeline.backends.engine_agreement import check_results
from tvm_pipeline.backends.engine_targets import check_properties, parsed_target
from tvm_pipeline.backends.ports import Array, Port, noise
from tvm_pipeline.backends.trial import answer
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_edgetpu.delegate import tflite

ENGINE = "tflite"  # the target of TFLite's kernels, and with `delegate=` that of a delegate
LOAD_ALONE = b"-"  # in the place of a file
LIBRARY = "delegate"  # the property with the library's path; all others are the library's own


def is_external(target: str) -> bool:
    name, properties = parsed_target(target)
    return name == ENGINE and LIBRARY in properties


def check_target(device: Device) -> None:
    """Raise PlatformError where the target of a device names no delegate, or gives a property without a value."""
    _, properties = parsed_target(device.target)
    if not properties.get(LIBRARY):
        raise PlatformError(
            f"device {device.name}: {device.target!r} names no delegate; write the path of its library first, as "
            f"`{ENGINE} {LIBRARY}=/usr/lib/libvx_delegate.so`, or `{ENGINE}` for TFLite's own kernels"
        )
    check_properties(device, properties)


def load_external(target: str) -> Any:
    """Return the delegate of a target.

    Raises:
        PlatformError: the library cannot be loaded, or makes no delegate of these options.
    """
    _, options = parsed_target(target)
    path = options.pop(LIBRARY)
    try:
        return tflite().load_delegate(path, options)
    except (OSError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split()) or "it makes no delegate"
        raise PlatformError(
            f"{path} cannot be used as a delegate of TFLite: {reason}; install the vendor's package for this TFLite, "
            "and give the path of its library and the options that it documents"
        ) from error


def check_taken(interpreter: Any, target: str) -> None:
    """Raise ModelError where the delegate of a new interpreter took no operator; tensors are not allocated yet."""
    if not any(one["op_name"].startswith("DELEGATE") for one in interpreter._get_ops_details()):
        raise ModelError(f"{target} takes none of its operators")


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child: load a delegate, or run a file on noise by it and by TFLite's kernels; raise where they differ."""

    def answered(target: str, content: bytes) -> None:
        if content == LOAD_ALONE:
            load_external(target)
        else:
            _try(target, content)

    answer(channel, answered)


def _try(target: str, content: bytes) -> None:
    module = tflite()
    interpreter = module.Interpreter(model_content=content, experimental_delegates=[load_external(target)])
    check_taken(interpreter, target)
    plain = module.Interpreter(
        model_content=content,
        experimental_op_resolver_type=module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    check_results(target, *_outputs(plain), _outputs(interpreter)[1], "float16")


def _outputs(interpreter: Any) -> tuple[list[str], list[Array]]:
    """Return the names of the outputs, and what they are for noise; integers are 0, since they may be indices."""
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        port = Port(detail["name"], tuple(map(int, detail["shape"])), detail["dtype"].__name__)
        array = noise(port)
        if not port.dtype.startswith("float") and not detail["quantization_parameters"]["scales"].size:
            array.fill(0)
        interpreter.set_tensor(detail["index"], array)
    interpreter.invoke()
    found = interpreter.get_output_details()
    return [detail["name"] for detail in found], [interpreter.get_tensor(detail["index"]) for detail in found]
