"""Write `cpu_pipeline` as a series of patches against TVM, from the sources of this repository.

    python upstream/make_series.py FOLDER                   # against the TVM that is installed
    python upstream/make_series.py FOLDER --tvm CHECKOUT    # against a checkout of TVM's main

`series.toml` lists the patches and their files, and what is replaced in a file. A file also gets TVM's licence header,
imports of TVM's tree and TVM's layout: sections as numpydoc has them, lines of 100 columns. git makes the patches in a
temporary repository. The script stops if TVM has a file of the series already, if a text that is to be replaced is
gone, if a file still names this project, or if TVM's rules for ruff find anything.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SERIES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("series.toml").read_text())
COLUMNS = 100
GAP = re.compile(r"(?<=\S) {3,}(?=\S)")  # between the columns of a drawing
# TVM's rules, as its pyproject.toml has them.
FORMAT = (f"line-length={COLUMNS}", "target-version='py310'")
LINT = (
    *FORMAT,
    "lint.select=['E','F','I','UP','RUF']",
    "lint.ignore=['UP028','UP030','UP031','RUF043','RUF059']",
    "lint.isort.known-first-party=['tvm']",
    "lint.per-file-ignores={'__init__.py'=['E402','F401','F403','F405']}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the patches go")
    parser.add_argument("--tvm", type=Path, metavar="CHECKOUT", help="a checkout of TVM, in place of the one installed")
    options = parser.parse_args()
    for patch in make_series(options.folder, options.tvm):
        print(patch)


def make_series(folder: Path, checkout: Path | None = None) -> list[Path]:
    """Write the patches into a folder; return their files, in order."""
    installed = find_spec("tvm")
    if checkout is None and (installed is None or installed.origin is None):
        raise SystemExit("TVM is not installed; name a checkout by --tvm")
    python = checkout / "python/tvm" if checkout else Path(installed.origin).parent
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        shutil.copytree(python, base / "python/tvm", ignore=_all_but_python)
        git(base, "init", "--quiet")
        commit(base, "base")
        licence = licence_of(base / "python/tvm/relax/backend/cpu_generic/pipeline.py")
        ours: set[Path] = set()
        for patch in SERIES["patch"]:
            made = {base / patch["folder"] / Path(file).name: text_of(file) for file in patch["files"]}
            made |= {base / patch["folder"] / name: text.lstrip() for name, text in patch.get("texts", {}).items()}
            if taken := [path for path in made if path.exists() and path not in ours]:
                raise SystemExit(f"TVM has {taken[0].relative_to(base)} already; name another place in series.toml")
            for path, text in made.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(licence + text)
            lay_out(list(made))
            ours |= made.keys()
            commit(base, f"{patch['subject']}\n\n{patch['message'].strip()}")
        options = ("--zero-commit", "--no-signature", "--output-directory", str(folder.resolve()))
        return [Path(line) for line in git(base, "format-patch", *options, f"-{len(SERIES['patch'])}").splitlines()]


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or Path(folder, name).is_dir())]


def git(folder: Path, *arguments: str) -> str:
    author = {"NAME": SERIES["author"], "EMAIL": SERIES["email"], "DATE": SERIES["date"]}
    identity = {f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in author.items()}
    command = ["git", "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | identity, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]}: {done.stderr}")
    return done.stdout


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", message)


def licence_of(file: Path) -> str:
    """Return the header of the Apache Software Foundation that a file of TVM has."""
    header = re.search(r"^# Licensed to .*\n(?:#.*\n)*?# under the License\.\n", file.read_text(), re.MULTILINE)
    if header is None:
        raise SystemExit(f"{file} has no licence header")
    return header[0]


# ---------------------------------------------------------------------------------------------- what changes in a file


def text_of(file: str) -> str:
    """Return a file of this repository as TVM gets it, before it is laid out."""
    name, text = Path(file).name, (ROOT / file).read_text()
    for old, new in SERIES["edits"].get(name, ()):
        if text.count(old) != 1:
            raise SystemExit(f"{file} has {text.count(old)} times what series.toml replaces once: {old!r}")
        text = text.replace(old, new)
    text = without(text, SERIES["without"].get(name, ()))
    for pattern, new in SERIES["everywhere"].items():
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    # What is not found is gone when ruff has removed the imports that nothing uses.
    return re.sub(r"(?<=\bfrom )(tvm_pipeline\S*)(?= import (\w*))", _in_tvm, text)


def without(text: str, names: Sequence[str]) -> str:
    """Return a module without these definitions, methods and loops, and without the comments right above them."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        targets = (node, *getattr(node, "targets", ()), getattr(node, "target", None))
        bound = {getattr(target, key, None) for target in targets for key in ("name", "id")}
        if isinstance(node, ast.stmt) and bound.intersection(names):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            lines[first : node.end_lineno] = [""] * (node.end_lineno - first)
    return "".join(lines)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").partition("/")[2].replace("/", ".")


# Modules here -> modules in TVM.
PLACES = {
    _dotted(file): _dotted(f"{patch['folder']}/{Path(file).name}")
    for patch in SERIES["patch"]
    for file in patch["files"]
}


def _in_tvm(found: re.Match[str]) -> str:
    """Return the package in TVM of what is imported; the same package where TVM gets no such module."""
    package, name = found.groups()
    module = PLACES.get(f"{package}.{name}")
    return module.rpartition(".")[0] if module else PLACES.get(package, package)


# ---------------------------------------------------------------------------------------------- how it is laid out


def lay_out(files: Sequence[Path]) -> None:
    """Bring files into TVM's layout; stop where its linter finds anything, or this project is named."""
    ruff("check", *files, "--fix", "--exit-zero")
    for _ in range(2):  # ruff breaks lines with long comments behind them, and makes other lines long
        for file in files:
            file.write_text(short_lines(numpydoc(file.read_text())))
            if found := re.search(r".*tvm.pipeline.*", file.read_text()):
                raise SystemExit(f"{file.name} still names this project: {found[0]}")
        ruff("format", *files)
    ruff("check", *files)


def ruff(command: str, *arguments: str | Path) -> None:
    settings = [part for setting in (LINT if command == "check" else FORMAT) for part in ("--config", setting)]
    line = [sys.executable, "-m", "ruff", command, "--isolated", "--no-cache", *settings, *arguments]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ruff {command}: {done.stdout}{done.stderr}")


def prose(text: str) -> dict[int, str]:
    """Return which lines, from 0, are of docstrings ("doc"), comments ("comment") or have a comment behind code."""
    kinds = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string.startswith('"""'):
            kinds |= dict.fromkeys(range(token.start[0] - 1, token.end[0]), "doc")
        elif token.type == tokenize.COMMENT:
            kinds[token.start[0] - 1] = "behind" if token.line[: token.start[1]].strip() else "comment"
    return kinds


def numpydoc(text: str) -> str:
    """Return a module whose docstrings have the sections of numpydoc."""
    kinds, made, title, outer = prose(text), [], "", ""
    for number, line in enumerate(text.splitlines()):
        header = re.fullmatch(r"( *)(Args|Raises|Attributes|Examples):", line) if kinds.get(number) == "doc" else None
        if header:
            outer, title = header[1], header[2].replace("Args", "Parameters")
            made += [f"{outer}{title}", f"{outer}{'-' * len(title)}"]
        elif title and line.startswith(f"{outer}    "):
            entry = re.fullmatch(rf"{outer}([\w, *]+): (.*)", line[4:]) if title != "Examples" else None
            made += [f"{outer}{entry[1]}", f"{outer}    {entry[2]}"] if entry else [line[4:]]
        else:
            title = ""
            made.append(line)
    return "\n".join(made) + "\n"


def short_lines(text: str) -> str:
    """Return a module whose docstrings, comments and texts keep to TVM's columns: what is beyond goes on below."""
    kinds, made = prose(text), []
    lines = [(line, kinds.get(number, "code")) for number, line in enumerate(narrowed(text.splitlines(), kinds))]
    while lines:
        line, kind = lines.pop(0)
        indent = re.match(" *(?:# )?" if kind == "comment" else " *", line)[0]
        is_text = kind == "code" and re.fullmatch(r' *f?".* .*",?', line)
        if len(line) <= COLUMNS or (kind == "code" and not is_text):
            made.append(line)
        elif kind == "behind":
            code, _, comment = line.rpartition("  # ")
            lines[:0] = [(f"{indent}# {comment}", "comment"), (code, "code")]
        elif is_text:
            head, start = line[: COLUMNS - 1].rpartition(" ")[0], re.match(r' *f?"', line)[0]
            made.append(f'{head} "')
            rest, below = f"{start}{line[len(head) + 1 :]}", lines[0][0]
            if re.fullmatch(r' *"[^{}]*",?', below) and rest.endswith('"'):  # a text that goes on in the next line
                lines[0] = (rest[:-1] + below.strip()[1:], kind)
            else:
                lines.insert(0, (rest, kind))
        else:
            gap = GAP.search(line)
            hang = " " * gap.end() if gap else indent + " " * len(_bullet(line[len(indent) :]))
            head = line[: COLUMNS + 1].rpartition(" ")[0]
            made.append(head)
            rest, (below, kind_below) = line[len(head) + 1 :], lines[0] if lines else ("", "")
            goes_on = re.match(r"[^\s\"]", below[len(hang) :]) and not _bullet(below[len(hang) :])
            if kind_below == kind and below.startswith(hang) and goes_on:
                lines[0] = (f"{hang}{rest} {below[len(hang) :]}", kind)
            else:
                lines.insert(0, (f"{hang}{rest}", kind))
    return "\n".join(made) + "\n"


def narrowed(lines: list[str], kinds: dict[int, str]) -> list[str]:
    """Return lines in which drawings of docstrings have less between their two columns, if that brings them in."""
    first = 0
    for number in range(len(lines) + 1):
        if number == len(lines) or kinds.get(number) != "doc" or not lines[number].strip():
            block = {index: gap for index in range(first, number) if (gap := GAP.search(lines[index]))}
            excess = max((len(lines[index]) for index in block), default=0) - COLUMNS
            if excess > 0 and all(len(gap[0]) >= excess + 3 for gap in block.values()):
                for index, gap in block.items():
                    lines[index] = lines[index][: gap.start()] + lines[index][gap.start() + excess :]
            first = number + 1
    return lines


def _bullet(words: str) -> str:
    """Return what begins an entry of a list, under which its other lines do not go."""
    found = re.match(r"\d+\. |- |>>> |-+$|(before|after): +", words)
    return found[0] if found else ""


if __name__ == "__main__":
    main()
