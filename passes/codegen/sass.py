"""Machine code of NVIDIA GPUs as text, SASS, with the control codes of every instruction, by nvdisasm.

nvdisasm prints instructions and, by `-hex`, their 128 bits, but not what stands in bits 105 to 125: how the instruction
is scheduled, since the hardware does not look for hazards itself. (Since Volta; found by measurements, as in
https://arxiv.org/abs/2503.20481, section 3.)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lowbit.dialect.errors import TargetError
from lowbit.passes.codegen.cubin import wheel_files

WHEEL = "nvidia-cuda-nvdisasm"
_OPTIONS = ("-c", "-g", "-hex", "-ndf")  # no data flow analysis: the branch stack, which it is for, ended with Volta
_FIRST = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_\w+):")
_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_NO_BARRIER = 7


@dataclass(frozen=True)
class Control:
    """How an instruction is scheduled.

    stall    clocks until the warp may issue its next instruction
    yields   whether the scheduler rather takes another warp next
    write    the barrier, 0 to 5, that opens when the result is written; None: the stall is enough
    read     the barrier that opens when the operands have been read
    waits    the barriers that must be open before it is issued
    reuse    the operands that stay in the operand cache
    """

    stall: int
    yields: bool
    write: int | None
    read: int | None
    waits: tuple[int, ...]
    reuse: tuple[int, ...]

    @staticmethod
    def of(encoding: int) -> Control:
        """Reads the control code of an instruction's 128 bits."""
        return _control(encoding >> 105 & (1 << 21) - 1)

    @property
    def words(self) -> str:
        """What it says, in words."""
        parts = [f"stalls {self.stall} clocks"]
        parts += ["lets another warp go first"] * self.yields
        parts += [f"waits for barriers {', '.join(map(str, self.waits))}"] * bool(self.waits)
        parts += [f"opens barrier {self.write} with its result"] * (self.write is not None)
        parts += [f"opens barrier {self.read} when its operands are read"] * (self.read is not None)
        parts += [f"keeps operands {', '.join(map(str, self.reuse))} for reuse"] * bool(self.reuse)
        return "; ".join(parts)

    def __str__(self) -> str:
        """As maxas and CuAssembler write it, without reuse flags, which stand at the operands: "B01----:R-:W2:Y:S13"
        waits for barriers 0 and 1, opens barrier 2 with its result, yields, and stalls for 13 clocks."""
        waits = "".join(str(i) if i in self.waits else "-" for i in range(6))
        read, write = ("-" if barrier is None else barrier for barrier in (self.read, self.write))
        return f"B{waits}:R{read}:W{write}:{'Y' if self.yields else '-'}:S{self.stall:02}"


@lru_cache(maxsize=4096)
def _control(code: int) -> Control:
    def field(at: int, bits: int) -> int:
        return code >> at & (1 << bits) - 1

    def barrier(at: int) -> int | None:
        return None if field(at, 3) == _NO_BARRIER else field(at, 3)

    def members(at: int, bits: int) -> tuple[int, ...]:
        return tuple(i for i in range(bits) if field(at, bits) >> i & 1)

    return Control(field(0, 4), not field(4, 1), barrier(5), barrier(8), members(11, 6), members(17, 4))


@dataclass(frozen=True)
class Sass:
    """One instruction: its offset in bytes, its text, its 128 bits, the labels in front of it, and the line that the
    cubin's line information gives; 0 without one."""

    offset: int
    text: str
    encoding: int
    labels: tuple[str, ...]
    line: int

    @property
    def control(self) -> Control:
        return Control.of(self.encoding)


def disassemble(cubin: bytes) -> list[Sass]:
    """The instructions of a cubin. Raises TargetError where there is no nvdisasm."""
    program = find_nvdisasm()
    if program is None:
        raise TargetError(f"SASS needs nvdisasm, which is not here; pip install {WHEEL}")
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([program, *_OPTIONS, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TargetError(f"{program} does not read the cubin ({done.stderr.strip()}); install a newer {WHEEL}")
    return _instructions(done.stdout)


def find_nvdisasm() -> str | None:
    """The program, on the path or in its wheel."""
    found = shutil.which("nvdisasm") or next(wheel_files("bin/nvdisasm"), None)
    return found and str(found)


def _instructions(text: str) -> list[Sass]:
    found: list[Sass] = []
    labels: list[str] = []
    line, first = 0, None
    for written in text.splitlines():
        if at := _LINE.match(written):
            line = int(at[2])
        elif label := _LABEL.match(written):
            labels.append(label[1])
        elif head := _FIRST.match(written):
            first = head
        elif first and (tail := _SECOND.match(written)):
            encoding = int(tail[1], 16) << 64 | int(first[3], 16)
            found.append(Sass(int(first[1], 16), first[2], encoding, tuple(labels), line))
            labels, first = [], None
    return found
