"""Machine code from nvJitLink and ptxas: resources, spills and errors."""

from __future__ import annotations

import shutil
import sys

import pytest
from llvm_programs import PLAIN

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.codegen import cubin as cubin_module
from lowbit.passes.codegen.cubin import NvJitLink, Ptxas, assemble, assembler, emit_cubin, resource_usage
from lowbit.passes.codegen.llvm import binding
from lowbit.passes.codegen.ptx import emit_ptx
from lowbit.passes.targets import GPUS, parse_target

SHARED = """
.version 8.0
.target sm_80
.address_size 64
.shared .align 16 .b8 whole[2048];
.visible .entry first(.param .u64 p) {
  .reg .b32 %r<3>; .reg .b64 %d<3>;
  .shared .align 4 .b8 own[512];
  ld.param.u64 %d1, [p];
  cvta.to.global.u64 %d2, %d1;
  ld.global.u32 %r1, [%d2];
  st.shared.u32 [own], %r1;
  st.shared.u32 [whole+4], %r1;
  bar.sync 0;
  ld.shared.u32 %r1, [own+8];
  ld.shared.u32 %r2, [whole+16];
  add.u32 %r1, %r1, %r2;
  st.global.u32 [%d2], %r1;
  ret;
}
.visible .entry second() { ret; }
"""


def installed_assemblers() -> list[NvJitLink | Ptxas]:
    ptxas = shutil.which("ptxas") or next(cubin_module.wheel_files("bin/ptxas"), None)
    found = [Ptxas(str(ptxas))] if ptxas else []
    best = assembler()
    return [best, *found] if isinstance(best, NvJitLink) else [*found]


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"])
def test_resources(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas, arch: str) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    target, ptx = parse_target(arch), SHARED.replace("sm_80", arch).replace(".version 8.0", ".version 8.8")
    cubin = assemble(ptx, target)
    assert cubin.image[:4] == b"\x7fELF"
    used = cubin.resources
    assert used.shared == 2048 + 512
    assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
    assert 4 <= used.registers <= 32
    assert emit_cubin(ptx, target) == cubin.image
    assert resource_usage(ptx, target) == used
    assert one.version


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
def test_spills_are_reported(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    n = 64
    loads = "\n".join(f"ld.volatile.global.f32 %f{i}, [%d1+{4 * i}];" for i in range(n))
    stores = "\n".join(f"st.volatile.global.f32 [%d1+{4 * i}], %f{n - 1 - i};" for i in range(n))
    ptx = (
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) .maxnreg 24 {\n"
        f".reg .f32 %f<{n}>; .reg .b64 %d<2>;\nld.param.u64 %d1, [p];\n{loads}\n{stores}\nret;\n}}\n"
    )
    target = parse_target("sm_80")
    tight, free = resource_usage(ptx, target), resource_usage(ptx.replace(".maxnreg 24", ""), target)
    assert tight.registers <= 24
    assert tight.spill_stores >= 4 * 40 <= tight.spill_loads
    assert tight.stack >= 4 * 40
    assert free.registers >= 64
    assert (free.spill_stores, free.spill_loads, free.stack) == (0, 0, 0)


@pytest.mark.parametrize("one", installed_assemblers(), ids=lambda one: type(one).__name__)
def test_assembler_errors_show_the_line(monkeypatch: pytest.MonkeyPatch, one: NvJitLink | Ptxas) -> None:
    monkeypatch.setattr(cubin_module, "assembler", lambda: one)
    wrong = SHARED.replace("add.u32 %r1, %r1, %r2;", "add.u31 %r1, %r1, %r2;")
    number = wrong.splitlines().index("  add.u31 %r1, %r1, %r2;") + 1
    with pytest.raises(PassError, match=rf"refuses the PTX:\nline {number}: .*u31.*\n    add\.u31 %r1, %r1, %r2;"):
        emit_cubin(wrong, parse_target("sm_80"))
    with pytest.raises(PassError, match=r"(?s)refuses the PTX.*SM version"):
        emit_cubin(SHARED.replace("sm_80", "sm_90"), parse_target("sm_80"))
    assert emit_cubin(SHARED, parse_target("sm_80")), "an error leaves nothing behind"


def test_ptx_of_llvm_assembles_for_every_gpu() -> None:
    for target in GPUS:
        assert resource_usage(emit_ptx(PLAIN, target), target).registers > 0


def test_nvjitlink_says_what_it_can_not_do() -> None:
    """Its words for an architecture that it does not know, and its log for PTX without a line that is wrong."""
    if not isinstance(link := assembler(), NvJitLink):
        pytest.skip("nvJitLink is not here")
    with pytest.raises(TargetError, match=r"nvJitLink \d+\.\d+ takes no sm_333 \(.*ARCH.*\); install a newer"):
        link.run(SHARED, "sm_333")
    with pytest.raises(PassError, match=r"(?s)refuses the PTX:\n.*SM version"):
        link.run(SHARED.replace("sm_80", "sm_90"), "sm_80")


def _raise(fault: Exception) -> None:
    raise fault


def test_a_missing_assembler_names_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin_module, "find_spec", lambda _: None)
    monkeypatch.setattr(cubin_module.shutil, "which", lambda _: None)
    for fault in (ImportError("no cuda.bindings"), RuntimeError("no libnvJitLink")):
        monkeypatch.setattr(cubin_module, "import_module", lambda _, fault=fault: _raise(fault))
        with pytest.raises(TargetError, match="pip install cuda-bindings nvidia-nvjitlink"):
            assembler.__wrapped__()
    with pytest.raises(TargetError, match="no cubin for target cpu"):
        emit_cubin(SHARED, parse_target("cpu"))


def test_a_missing_llvmlite_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(TargetError, match=r"pip install 'llvmlite>=0\.48'"):
        binding.__wrapped__()
