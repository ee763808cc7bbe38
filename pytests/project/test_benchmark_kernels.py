"""The kernels that others are compared with: the read floor, and a link of a chain of matmuls."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import chain
from benchmarks.floor import Reader, compile_reader, launch_for
from lowbit.dialect.errors import SpecError
from lowbit.pylib import MatmulSpec
from lowbit.pylib.emulator import Emulator


@pytest.mark.parametrize("units", [64, 1024, 1537])
def test_the_floor_reads_everything(units: int) -> None:
    reader = Reader(threads=64, unroll=4, most_blocks=3)
    kernel = compile_reader(reader, "emulator:sm_90a", never=0)  # stores its sums
    launch = launch_for(reader, kernel.launch, units)
    data = np.random.default_rng(0).integers(1, 8, (units, 4)).astype(np.float32)
    blocks = launch.grid[0].number
    sums = np.zeros((blocks * reader.chunk, 4), np.float32)
    Emulator(kernel.ptx).run(launch, {"memory": data, "sums": sums, "units": units})
    beyond = blocks * reader.rounds(units) * reader.chunk - units  # read the last unit once more
    np.testing.assert_array_equal(sums.sum(0), data.sum(0) + beyond * data[-1])
    assert beyond < reader.rounds(units) * reader.chunk


def test_the_floor_loads_16_bytes_and_never_stores() -> None:
    ptx = compile_reader(Reader(threads=64, unroll=4), "sm_90a").ptx
    assert ptx.count("ld.global.v4") == 4
    assert ptx.index("ld.global.v4") < ptx.index("griddepcontrol.wait") < ptx.index("st.global")


@pytest.mark.parametrize("left_out", [(), ("x",), ("weight",), ("weight", "x")])
def test_a_link_of_a_chain_reads_and_stores_everything(left_out: tuple[str, ...]) -> None:
    spec, threads = MatmulSpec(128, 256, "u4", group_size=128), 64
    each = chain.link(spec, 8, 5, threads).without(*left_out)
    assert 5 * chain.link(spec, 8, 5, threads).units * threads * 16 >= spec.bytes and each.rows * 5 * 4 >= 128 * 8
    kernel = chain.compile_link(each, "emulator:sm_90a")
    rng = np.random.default_rng(0)
    counts = (5 * each.units, each.x_units)
    weight, x = (rng.integers(1, 8, (count * threads, 4)).astype(np.float32) for count in counts)
    y = np.zeros((5, each.rows, 4), np.float16)
    Emulator(kernel.ptx).run(kernel.launch, {"weight": weight, "x": x, "y": y})
    expected = weight.reshape(5, -1, threads, 4).sum(1) + x.reshape(-1, threads, 4).sum(0)
    np.testing.assert_array_equal(y, expected[:, : each.rows])


def test_a_chain_loads_the_weight_before_it_waits_and_x_after() -> None:
    each = chain.link(MatmulSpec(4096, 4096, "u4", group_size=128), 8, 132)
    before, after = chain.compile_link(each, "sm_90a").ptx.split("griddepcontrol.wait;")
    assert (before.count("ld.global.v4"), after.count("cp.async.cg")) == (each.units, each.x_units) == (16, 16)
    assert "ld.global" not in after and "cp.async.cg" not in before
    for n, m in ((8192, 1), (4096, 32)):
        with pytest.raises(SpecError, match=f"{n} x {n}, m = {m}: a block of a chain has at most 65536 bytes"):
            chain.link(MatmulSpec(n, n, "u4", group_size=128), m, 132)
