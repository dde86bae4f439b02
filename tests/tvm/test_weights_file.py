"""Parameters in a mapped file: every type and shape comes back, all processes have the same pages, damage is said."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import SUMS, linked
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.library import load_library
from tvm_pipeline_tvm.relay.saved_params import PARAMS, UNMAPPED, read_params, write_params
from tvm_pipeline_tvm.weights_file import WEIGHTS, Weight

import tvm  # isort: skip

Compiled = Callable[..., RelayModel]
TYPES = ("float32", "float16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 3, 5), (64,))


def test_parameters_of_every_type_come_back(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    arrays = {
        f"{dtype}{index}": random.integers(0, 2 if dtype == "bool" else 99, shape).astype(dtype)
        for dtype in TYPES
        for index, shape in enumerate(SHAPES)
    }
    write_params(tmp_path, {name: tvm.nd.array(array) for name, array in arrays.items()})
    found = read_params(tmp_path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (str(array.dtype), array.shape)
        np.testing.assert_array_equal(found[name].numpy(), array)
        assert found[name].handle.contents.data % 64 == 0


def test_a_model_without_parameters(tmp_path: Path) -> None:
    write_params(tmp_path, {})
    assert read_params(tmp_path) == {}


def in_files(process: int | str = "self") -> dict[str, int]:
    """Return the bytes of each mapped file of weights that are in memory of its own, and those that it shares."""
    found, name = {"own": 0, "shared": 0}, ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line
        elif name.endswith(f"/{WEIGHTS}") and (kind := re.match(r"(Anonymous|Rss): +(\d+) kB", line)):
            found["own" if kind[1] == "Anonymous" else "shared"] += int(kind[2]) << 10
    return found


def test_what_is_loaded_and_run_is_the_page_cache_and_no_copy(compiled: Compiled, cpu: Device, tmp_path: Path) -> None:
    """A model and the one that it was saved as have the parameters in the same file; nobody writes into it."""
    model = compiled("branching")
    model.save(tmp_path)
    loaded = RelayModel.load(tmp_path, lambda _: None)
    frame, stages = random_frame(model.graph.inputs), [(model.graph.operator_names, cpu)]
    for one, other in zip(
        *(model_outputs(each, run_stages(each, stages, frame)) for each in (model, loaded)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    folders = [library.folder for each in (model, loaded) for library in each.libraries.values()]
    assert len({os.stat(folder / WEIGHTS).st_ino for folder in folders if folder}) == 1
    assert in_files()["shared"] > 0
    assert in_files()["own"] == 0


def test_a_library_of_an_earlier_version_is_read_and_saved_as_one_of_this(
    compiled: Compiled, target: str, tmp_path: Path
) -> None:
    library = compiled("branching").libraries[target]
    assert library.folder
    earlier, saved = tmp_path / "earlier", tmp_path / "saved"
    shutil.copytree(library.folder, earlier)
    (earlier / UNMAPPED).write_bytes(tvm.runtime.save_param_dict(library.params))
    for file in (WEIGHTS, PARAMS):
        (earlier / file).unlink()
    described = msgspec.json.decode((earlier / "kernels.json").read_bytes())
    described[3] = {name: size for name, size in described[3].items() if name not in (WEIGHTS, PARAMS)}
    described[3][UNMAPPED] = (earlier / UNMAPPED).stat().st_size
    (earlier / "kernels.json").write_bytes(msgspec.json.encode(described))
    read = load_library(earlier)
    saved.mkdir()
    read.save(saved)
    assert {file.name for file in saved.iterdir()} == {file.name for file in library.folder.iterdir()} - {SUMS}
    for each in (read, load_library(saved)):
        assert each.params.keys() == library.params.keys()
        for name, array in each.params.items():
            np.testing.assert_array_equal(array.numpy(), library.params[name].numpy())


@pytest.mark.parametrize(
    "wrong",
    [
        Weight(1, (1,), "float32"),
        Weight(-64, (1,), "float32"),
        Weight(0, (1 << 40,), "float32"),
        Weight(0, (-1,), "float32"),
        Weight(0, (1,), "no type"),
    ],
)
def test_weights_that_lie_elsewhere_are_refused(wrong: Weight, compiled: Compiled, target: str, tmp_path: Path) -> None:
    folder = compiled("branching").libraries[target].folder
    assert folder
    copy = tmp_path / "library"
    shutil.copytree(folder, copy)
    weights = msgspec.json.decode((copy / PARAMS).read_bytes(), type=dict[str, Weight])
    content = msgspec.json.encode({**weights, next(iter(weights)): wrong})
    (copy / PARAMS).write_bytes(content)
    described = msgspec.json.decode((copy / "kernels.json").read_bytes())
    described[3][PARAMS] = len(content)
    (copy / "kernels.json").write_bytes(msgspec.json.encode(described))
    with pytest.raises(BundleError, match=rf"{copy}: damaged compiled model .*; compile it again"):
        load_library(copy)


def test_a_file_that_cannot_be_linked_is_copied_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of /proc is on a file system of its own."""
    caplog.set_level("INFO")
    linked(Path("/proc/self/status"), tmp_path / "copy")
    assert (tmp_path / "copy").read_text().startswith("Name:")
    assert "is in memory for each of them: Invalid cross-device link" in caplog.text
