"""Several backends on one machine: who compiles, what devices are called, and what is refused or said."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_backend import chain_model, make_plan, random_model
from tests.support.installed import install
from tvm_pipeline import Bundle, Pipeline, open_bundle, write_bundle
from tvm_pipeline.backends import bundle as bundles
from tvm_pipeline.backends import registry
from tvm_pipeline.backends.registry import compose, detect_platform, find_backend, settle_platform
from tvm_pipeline.backends.sliced import SlicedBackend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import BundleError, PlanError, PlatformError
from tvm_pipeline.testing import FakeBackend, FakeModel, check_backend

MODEL = Model("chain", "onnx", b"")


def cpu(name: str, *, cuts: tuple[str, ...] = (), model: FakeModel | None = None) -> FakeBackend:
    """Return a backend of two CPU devices with the names that every CPU backend gives them."""
    devices = [Device(f"cpu{index}", name, (index,), target=f"{name}:{index}") for index in range(2)]
    return FakeBackend(devices, [model or chain_model(4)], name=name, cuts=cuts)


def in_any_order(monkeypatch: pytest.MonkeyPatch, *backends: FakeBackend, own: str = "") -> itertools.permutations:
    """Install the backends in every order, one after the other."""
    for order in itertools.permutations(backends):
        install(monkeypatch, *order, own=own)
        yield order


# No platform file


def test_a_second_backend_for_the_same_models_changes_nothing(monkeypatch, caplog):
    """They cannot share the model: the one that comes with tvm-pipeline has it, as before the other was installed."""
    host, other = cpu("host"), cpu("another")
    install(monkeypatch, host, own="host")
    alone = detect_platform(MODEL)
    assert caplog.text == ""
    for _ in in_any_order(monkeypatch, host, other, own="host"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert detect_platform(MODEL) == alone
        assert "cpu0, cpu1 of another left out of chain" in caplog.text
        assert "none of the backends another, host cuts onnx files for the others" in caplog.text
        assert "host is taken, since it comes with tvm-pipeline" in caplog.text
        assert "give `platform`" in caplog.text
        backend, platform = settle_platform(alone)
        assert backend is host
        assert backend.compile(MODEL, platform.devices).graph.name == "chain"


def test_of_strangers_the_first_by_name_is_taken_whatever_the_order(monkeypatch, caplog):
    for _ in in_any_order(monkeypatch, cpu("b"), cpu("a"), cpu("c")):
        caplog.clear()
        assert {device.backend for device in detect_platform(MODEL).devices} == {"a"}
        assert "cpu0, cpu1, cpu0, cpu1 of b, c left out" in caplog.text
        assert "a is taken, since it is first by name" in caplog.text


def test_backends_share_a_model_where_one_cuts_its_file(monkeypatch, caplog):
    for _ in in_any_order(monkeypatch, cpu("host"), cpu("other", cuts=("onnx",)), own="host"):
        platform = detect_platform(MODEL)
        assert [device.name for device in platform.devices] == ["host-cpu0", "host-cpu1", "other-cpu0", "other-cpu1"]
        assert caplog.text == ""
        backend, settled = settle_platform(platform)
        assert backend.name == "host+other"
        assert settled == platform


def test_of_two_that_cut_one_is_left_out_and_said(monkeypatch, caplog):
    both = cpu("a", cuts=("onnx",)), cpu("b", cuts=("onnx",))
    for _ in in_any_order(monkeypatch, *both, cpu("host"), own="host"):
        caplog.clear()
        assert {device.backend for device in detect_platform(MODEL).devices} == {"a", "host"}
        assert "cpu0, cpu1 of b left out of chain: the backends a and b both cut onnx files" in caplog.text


def test_devices_of_one_name_are_told_apart_where_no_model_chooses(monkeypatch):
    install(monkeypatch, cpu("host"), cpu("other"))
    names = [device.name for device in detect_platform().devices]
    assert names == ["host-cpu0", "host-cpu1", "other-cpu0", "other-cpu1"]


# A platform file


def mixed(*names: str) -> Platform:
    return Platform("desk", tuple(Device(f"{name}0", name, target=f"{name}:0") for name in names))


@pytest.mark.parametrize(
    ("cutting", "message"),
    [
        ((), r"mixes the backends a, b, and none of them cuts onnx files for the others; split the platform file"),
        (("a", "b"), r"a and b each cut onnx files: .* Leave the devices of all but one of a and b out"),
    ],
)
def test_who_compiles_is_never_decided_by_order(monkeypatch, cutting, message):
    backends = [cpu(name, cuts=("onnx",) if name in cutting else ()) for name in ("a", "b")]
    for order in in_any_order(monkeypatch, *backends):
        backend, settled = settle_platform(mixed(*(b.name for b in order)))
        with pytest.raises(PlatformError, match=message):
            backend.compile(MODEL, settled.devices)


def test_two_packages_with_a_backend_of_one_name(monkeypatch):
    install(monkeypatch, cpu("a"))
    [point] = registry.entry_points(group=registry.GROUP)
    twin = replace(point, package="another-package")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point, twin])
    with pytest.raises(PlatformError, match=r"two packages bring a backend called a: .*; uninstall one of them"):
        find_backend("a")


# One model on devices of two backends


@pytest.fixture
def model() -> FakeModel:
    return random_model(np.random.default_rng(3), 6)


@pytest.fixture
def two(monkeypatch, model) -> tuple[SlicedBackend, Platform]:
    install(monkeypatch, cpu("other", cuts=("onnx",), model=model), cpu("host", model=model))
    backend, platform = settle_platform(mixed("host", "other"))
    assert isinstance(backend, SlicedBackend)
    return backend, platform


def split(model: FakeModel) -> Plan:
    names = model.graph.operator_names
    return make_plan(model.graph, (["other0"], names[:2]), (["host0"], names[2:5]), (["other0"], names[5:]))


def assert_computes(compiled, plan, platform, model) -> None:
    draw = np.random.default_rng(0)
    frames = [{t.name: draw.integers(-9, 9, t.shape).astype(t.dtype) for t in model.graph.inputs} for _ in range(9)]
    with Pipeline(compiled, plan, platform) as pipeline:
        for frame, result in zip(frames, pipeline.map(frames), strict=True):
            for name, expected in model.unsplit(frame).items():
                np.testing.assert_array_equal(result.outputs[name], expected)


def test_stages_of_both_make_one_pipeline(two, model):
    backend, platform = two
    compiled = backend.compile(Model("random", "onnx", b""), platform.devices)
    assert_computes(compiled, split(model), platform, model)
    for device in platform.devices:
        seconds = compiled.time_operators(device, 3)
        assert seconds.shape == (3, 6)
        assert (seconds > 0).all()
        assert compiled.time_transfers(device, [64], 2) is None
    with pytest.raises(PlanError, match="the model random has no operator op99"):
        compiled.stage(["op99"], platform.device("host0"))
    compiled.close()


def test_the_composition_keeps_the_contract_itself(two):
    backend, platform = two
    for device in platform.devices:
        assert backend.settle(device) == device
    compiled = backend.compile(Model("random", "onnx", b""), platform.devices, "memory")
    assert compiled.order == "memory"
    assert backend.versions() == {"host": "1", "other": "1"}
    only = FakeBackend(platform.devices[1:], [compiled.inner], name="other", cuts=("onnx",))
    check_backend(only, Model("random", "onnx", b""))


def bundle_of(two, model, path: Path) -> Bundle:
    backend, platform = two
    compiled = backend.compile(Model("random", "onnx", b""), platform.devices, "memory")
    made = Bundle(model.graph, platform, unmeasured(model.graph), split(model), compiled)
    write_bundle(path, made)
    return made


def test_a_bundle_of_both(two, model, tmp_path):
    bundle_of(two, model, tmp_path / "net.tar")
    with open_bundle(tmp_path / "net.tar") as opened:
        assert opened.compiled.order == "memory"
        assert len(opened.compiled._compiled) == 1  # the slice for the other backend is not compiled again
        assert_computes(opened.compiled, opened.plan, opened.platform, model)


def test_a_bundle_of_before_the_core_composed_backends(two, model, tmp_path, monkeypatch):
    """The backend that cut saved into the folder itself, and listed the slices in its own index."""
    made = bundle_of(two, model, tmp_path / "new.tar")
    save = type(made.compiled).save

    def as_before(self, folder, stages, platform):
        save(self, folder, stages, platform)
        _, keys = json.loads((folder / "sliced.json").read_bytes())
        (folder / "sliced.json").unlink()
        for file in (folder / "whole").iterdir():
            shutil.move(file, folder)
        (folder / "whole").rmdir()
        (folder / "index.json").write_text(json.dumps([self.graph.name, keys]))

    monkeypatch.setattr(type(made.compiled), "save", as_before)
    monkeypatch.setattr(bundles, "platform_backend", lambda platform: find_backend("other"))  # as its name was written
    write_bundle(tmp_path / "old.tar", made)
    monkeypatch.setattr(bundles, "platform_backend", registry.platform_backend)
    with open_bundle(tmp_path / "old.tar") as opened:
        assert len(opened.compiled._compiled) == 1
        assert_computes(opened.compiled, opened.plan, opened.platform, model)


def test_a_damaged_saved_model(two, model, tmp_path):
    backend, platform = two
    with pytest.raises(BundleError, match="damaged compiled model"):
        backend.load(tmp_path, [])
    compiled = backend.compile(Model("random", "onnx", b""), platform.devices)
    compiled.save(tmp_path, split(model).stages, platform)
    install_without_host = SlicedBackend([backend.backends["other"]])
    with pytest.raises(BundleError, match="needs the backend host"):
        install_without_host.load(tmp_path, [])


def test_each_backend_prepares_its_own_part(two, model, monkeypatch):
    backend, platform = two
    compiled = backend.compile(Model("random", "onnx", b""), platform.devices)
    told = {}
    for name, member in backend.backends.items():
        monkeypatch.setattr(member, "share", lambda residents, platform, name=name: told.setdefault(name, residents))
    plan = split(model)
    backend.share([(compiled, plan.stages)], platform)
    names = model.graph.operator_names
    [(whole, stages)] = told["other"]
    assert whole.graph == model.graph
    assert stages == [Stage(("other0",), tuple(names[:2])), Stage(("other0",), tuple(names[5:]))]
    [(part, stages)] = told["host"]
    assert part.graph.operator_names == names[2:5]
    assert stages == [Stage(("host0",), tuple(names[2:5]))]


def test_one_backend_alone_is_itself(monkeypatch):
    install(monkeypatch, cpu("a"), cpu("b"))
    assert compose(["a", "a"]) is find_backend("a")


def test_what_a_device_of_the_cutting_backend_does_not_compute_is_known(monkeypatch):
    lead = cpu("lead", cuts=("onnx",), model=chain_model(4, refused={"cpu1": ["op2"]}))
    install(monkeypatch, lead, cpu("other"))
    devices = [*lead.detect(), replace(cpu("other").detect()[0], name="other0")]
    compiled = compose(["lead", "other"]).compile(MODEL, devices)
    assert [compiled.computes(device) for device in devices] == [
        ["op0", "op1", "op2", "op3"],
        ["op0", "op1", "op3"],
        ["op0", "op1", "op2", "op3"],
    ]
    compiled.close()


def test_operators_that_another_backend_refuses_stay_with_the_one_that_cuts(monkeypatch):
    """`refuses_slice` is asked for each operator: its devices compute the others alone, and plans know it."""

    class Choosy(FakeBackend):
        def refuses_slice(self, model: Model) -> str:
            return "it has no op2" if model.name.endswith("op2") else ""

    model = chain_model(4)
    lead, other = cpu("lead", cuts=("onnx",), model=model), Choosy(cpu("other").detect(), [model], name="other")
    install(monkeypatch, lead, other)
    backend, platform = settle_platform(mixed("lead", "other"))
    with closing(backend.compile(MODEL, platform.devices)) as compiled:
        assert compiled.computes(platform.device("other0")) == ["op0", "op1", "op3"]
        assert compiled.computes(platform.device("lead0")) == ["op0", "op1", "op2", "op3"]
        seconds = compiled.time_operators(platform.device("other0"), 2)
        assert np.isnan(seconds).tolist() == [[False, False, True, False]] * 2
        with pytest.raises(PlanError, match="device other0 cannot compute operator op2 of chain: it has no op2"):
            compiled.stage(["op1", "op2"], platform.device("other0"))
        compiled.stage(["op0", "op1"], platform.device("other0")).close()
