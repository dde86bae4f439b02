"""Settings from strangers: small files that would take all memory are refused, and mistakes are said with the file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.plan import read_plan
from tvm_pipeline.core.platform import read_platform
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.documents import DEEPEST, MOST_TOML_BYTES, TomlFile, blamed, read_toml
from tvm_pipeline.errors import BundleError, GraphError, PipelineError, PlatformError

HOSTILE_TOML = {
    "key of many names": b"a" + b".a" * 50_000 + b" = 1",
    "table of many names": b"[a" + b" . a" * 50_000 + b"]",
    "quoted names": b'"a"' + b'."#"' * 50_000 + b" = 1",
    "inside a table": b"x = { a" + b".a" * 50_000 + b" = 1 }",
    "brackets": b"a = " + b"[" * 5_000 + b"]" * 5_000,
    "tables in tables": b"a = " + b"{ b = " * 5_000 + b"1" + b"}" * 5_000,
    "a long file": b"#" * (MOST_TOML_BYTES + 1),
    "a long number": b"a = " + b"9" * 5_000,
    "no UTF-8": b"a = '\xff'",
}


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_toml_that_would_take_all_memory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_toml(HOSTILE_TOML[name])


def test_dots_and_brackets_in_values_are_no_depth() -> None:
    text = f'''
    # {"." * 200} [[[[
    prose = "{"word. " * 200}" # {"[" * 200}
    path = '{"../" * 100}'
    long = """{"." * 200}
    "[" {"[" * 200} """
    figures = [{", ".join(["0.5"] * 200)}]
    a.b.c = [{"[], " * 200}]
    '''
    tables = read_toml(text.encode())
    assert (len(tables["figures"]), len(tables["a"]["b"]["c"]), len(tables["prose"])) == (200, 200, 1200)
    deep = DEEPEST - 1
    assert read_toml(b"a = " + b"[" * deep + b"]" * deep)["a"] != []


READERS = {
    "platform.toml": read_platform,
    "profile.json": read_profile,
    "graph.json": read_graph,
    "plan.txt": read_plan,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"{}", b"[]", b"\x00", b'{"a":' * 100_000])
def test_every_reader_names_the_file_and_nothing_of_python(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PipelineError) as raised:
        READERS[name](path)
    said = str(raised.value)
    assert said.startswith((f"{path}: ", f"{path}, line "))
    assert not any(word in said for word in ("Error", "Exception", "Traceback", "codec"))
    assert len(said) < 600


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (KeyError("kernels"), "'kernels' is missing in it"),
        (IndexError("list index out of range"), "lies beyond the end"),
        (RecursionError(), "nested too deeply"),
        (MemoryError(), "more memory"),
        (AttributeError("'int' object has no attribute 'items'"), "it is damaged"),
        (
            RuntimeError("Traceback (most recent call last):\n  5: tvm::X()\nTVMError: no such function"),
            "(no such function)",
        ),
        (msgspec.DecodeError(""), "it is damaged"),
    ],
)
def test_what_a_reader_raises_is_said_in_words(raised: Exception, words: str) -> None:
    with pytest.raises(BundleError, match=r"^net\.tar: ") as said, blamed("net.tar", BundleError, "compile it again"):
        raise raised
    assert words in str(said.value)
    assert str(said.value).endswith("; compile it again")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "figures",
    ["macs_per_s = 1e-320", "operator_s = 1e308", "call_s = nan", "macs_per_s = 1e12\ninput_bytes_per_s = 5e-324"],
)
def test_figures_whose_sums_are_not_finite_are_refused(figures: str, tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(f'name = "x"\n[[device]]\nname = "tpu0"\n[device.model]\n{figures}\n')
    with pytest.raises(PlatformError, match=r"box\.toml: .*tpu0"):
        read_platform(path)


@pytest.mark.parametrize("target", [" ", "\\u0000", "llvm\\n", "llvm -mcpu=\\u0000"])
def test_targets_that_end_the_compiler_s_process_are_refused(target: str, tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(f'name = "x"\n[[device]]\nname = "cpu"\ntarget = "{target}"\n')
    with pytest.raises(PlatformError, match=r"box\.toml: .*device cpu: target"):
        read_platform(path)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ('{"name": "a", "output_bytes": 9223372036854775808}', "tensor a"),
        ('{"name": "a", "output_bytes": 1, "macs": 1e300}', "operator a"),
        ('{"name": "a", "output_bytes": 1, "param_bytes": 9223372036854775808}', "operator a"),
    ],
)
def test_figures_beyond_integers_are_refused(node: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(f'{{"name": "net", "nodes": [{node}], "edges": []}}')
    with pytest.raises(GraphError, match=rf"graph\.json: .*{reason}"):
        read_graph(path)


@pytest.mark.parametrize("dtype", [",", "object", "float32,int8", "U8", "V2", "x" * 5000, ""])
def test_types_that_are_no_numbers_are_refused(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    tensor = f'{{"name": "x", "shape": [1], "dtype": "{dtype}"}}'
    path.write_text(f'{{"name": "net", "inputs": [{tensor}], "operators": [], "outputs": []}}')
    with pytest.raises(GraphError, match=r"graph\.json: graph net: tensor x has dtype"):
        read_graph(path)


NESTED = """
[[host]]
name = "attic" # name = 3
fps.faces = 2

[[host]]
"name" = "barn"
models = [
    "a = b",
]
[host.fps]
plates = 3

[[host.kind]]
factor = 1
[[host.kind]]
factor = 2
"""


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("host", 0, "name"), "3: host attic: "),
        (("host", 0, "fps", "faces"), "4: host attic, fps: "),
        (("host", 1), "6: host barn: "),
        (("host", 1, "models", 0), "8: host barn: "),
        (("host", 1, "fps", "plates"), "12: host barn, fps: "),
        (("host", 1, "kind", 1, "factor"), "17: host barn, kind number 2: "),
        (("host", 1, "kind", 1, "missing"), "16: host barn, kind number 2: "),
    ],
)
def test_a_mistake_in_a_nested_table_has_its_line(place: tuple[str | int, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "nested.toml").write_text(NESTED)
    file = TomlFile(tmp_path / "nested.toml", PlatformError, "write it anew")
    assert str(file.mistake("it is wrong", *place)) == f"{file.path}, line {said}it is wrong; write it anew"
    assert isinstance(file.mistake("it is wrong"), PlatformError)


@pytest.mark.parametrize("text", ["a" * 10**6, "[" + " " * 10**6, "a." * 500_000, "a" + " " * 10**6, '"' * 10**6])
def test_lines_of_a_long_text_are_found_at_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(f"prose = '''\n{text[:-100]}\n'''\nlast = 1\n")
    assert TomlFile(tmp_path / "long.toml", PlatformError).where("last").endswith(", line 4")
