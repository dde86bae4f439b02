"""Hides AVX-512 and VNNI from libraries of other engines, so that they compute as on a processor with AVX2 alone.

A library asks the processor by the instruction `cpuid` what it can do. In an environment that `hide` was called for,
each `cpuid` of each library is an instruction that no processor has. Where such a library runs, a handler of SIGILL,
which the loader preloads, answers as the processor would, without AVX-512, AVX-VNNI and AMX. The library then chooses
its own kernels for AVX2, and they run at the speed of this processor. A clock that a processor lowers for AVX-512 is
not imitated, nor is the smaller cache of an older one.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

CPUID, UNDEFINED = b"\x0f\xa2", b"\x0f\x04"
HANDLER = r"""
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

#define BIT(number) (1u << (number))

static void answer(int signal_number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *at = (const unsigned char *)registers[REG_RIP];
  unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
  if (at[0] != 0x0f || at[1] != 0x04) { /* an instruction that is really wrong */
    signal(signal_number, SIG_DFL);
    return;
  }
  __cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) {
    b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26)); /* AVX512: F DQ IFMA PF */
    b &= ~(BIT(27) | BIT(28) | BIT(30) | BIT(31)); /* ER CD BW VL */
    c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14)); /* VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
    d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(23)); /* 4VNNIW 4FMAPS VP2INTERSECT FP16 */
    d &= ~(BIT(22) | BIT(24) | BIT(25)); /* AMX */
  }
  if (leaf == 7 && part == 1) {
    a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23)); /* AVX-VNNI BF16 AMX-FP16 AVX-IFMA */
    d &= ~(BIT(4) | BIT(5) | BIT(10) | BIT(19)); /* AVX-VNNI-INT8 AVX-NE-CONVERT AVX-VNNI-INT16 AVX10 */
  }
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, 0);
}
"""


def hide(environment: Path) -> None:
    """Replace each `cpuid` in the libraries of an environment, and build its handler. Needs objdump and cc."""
    for library in environment.rglob("*.so*"):
        if library.is_file() and not library.is_symlink():
            _replace(library)
    source, handler = environment / "avx2_only.c", _handler(environment)
    source.write_text(HANDLER)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", handler, source], check=True)


def preloaded(python: Path) -> dict[str, str]:
    """Return the settings under which a Python runs; none where `hide` was not called for its environment."""
    handler = _handler(python.parents[1])
    return {"LD_PRELOAD": str(handler)} if handler.exists() else {}


def _handler(environment: Path) -> Path:
    return environment / "avx2_only.so"


def _replace(library: Path) -> None:
    content = bytearray(library.read_bytes())
    if CPUID not in content:
        return
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", library], stdout=subprocess.PIPE, text=True) as found:
        addresses = [int(line.partition(":")[0], 16) for line in found.stdout if line.rstrip().endswith("\tcpuid")]
    for address in addresses:
        at = _offset(content, address)
        assert content[at : at + 2] == CPUID, f"{library}: no cpuid at {address:x}"
        content[at : at + 2] = UNDEFINED
    library.write_bytes(content)


def _offset(elf: bytearray, address: int) -> int:
    """Return where in a 64-bit ELF file the byte of an address stands, by the file's segments."""
    (headers,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for number in range(count):
        kind, _, offset, begin, _, length = struct.unpack_from("<IIQQQQ", elf, headers + number * size)
        if kind == 1 and begin <= address < begin + length:  # PT_LOAD
            return offset + address - begin
    raise ValueError(f"no segment holds {address:x}")
