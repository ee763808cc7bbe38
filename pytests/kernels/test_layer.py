"""The kernels between the matmuls of a layer, emulated, against operations of torch in f64 or f32; and these against
those of transformers."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from sweeps import swept
from torch import Tensor

import lowbit
from lowbit import LowbitLinear, QuantConfig
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.attention import AttentionPlan, attention_program
from lowbit.passes.kernels.rope import Heads
from lowbit.passes.kernels.shift import shift_program
from lowbit.passes.pipeline import lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.layer import by_kernel, reference
from lowbit.pylib.runtime import own_kernels

TARGET = "emulator:sm_90a"
TARGETS = [TARGET, "emulator:sm_80", "cpu"]
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Asserts that numbers differ by one rounding to their type at most, and of a few by more than none."""
    bound = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.float(), exact.to(found.dtype).float(), rtol=bound, atol=bound * 1e-3)
    assert (found != exact.to(found.dtype)).double().mean() < 0.05


# -- norms


@TYPES
@pytest.mark.parametrize(("tokens", "hidden", "shift"), [(1, 64, 0.0), (3, 2880, 1.0), (2, 4096, 0.0), (1, 8, 0.0)])
def test_norm(tokens: int, hidden: int, shift: float, dtype: torch.dtype) -> None:
    x, gain = numbers(1, tokens, hidden, dtype=dtype), numbers(hidden, dtype=dtype, seed=1)
    x[0, 0] *= 100
    found = by_kernel.rms_norm(x, gain, 1e-5, shift, TARGET)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (gain.double() + shift)
    assert found.shape == x.shape
    assert_rounded(found, exact)
    assert_rounded(by_kernel.rms_norm(x, gain, 1e-5, shift, "cpu"), exact)


@pytest.mark.parametrize("target", [TARGET, "cpu"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_norm_counts(target: str, kind: torch.dtype) -> None:
    counter = torch.tensor([5, 9], dtype=kind)
    x = numbers(2, 64)
    found = by_kernel.rms_norm(x, numbers(64), 1e-5, 0.0, target, counter[:1], 3)
    assert counter.tolist() == [8, 9]
    assert torch.equal(found, by_kernel.rms_norm(x, numbers(64), 1e-5, 0.0, target))


@TYPES
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("hidden", [64, 2880])
def test_join(hidden: int, normed: bool, target: str, dtype: torch.dtype) -> None:
    x, residual = numbers(2, 1, hidden, dtype=dtype), numbers(2, 1, hidden, dtype=dtype, seed=1)
    gains = [numbers(hidden, dtype=dtype, seed=seed) for seed in (2, 3)]
    norm, following = reference.Norm(gains[0], 1e-5, 1.0), reference.Norm(gains[1], 1e-6, 0.5)
    counter = torch.tensor([5, 9])
    given = x, residual, 0.25, norm if normed else None, target
    y, h = by_kernel.join(*given, following, counter[:1], 3)
    assert h is not None and counter.tolist() == [8, 9]
    wide = x.double()
    if normed:
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (gains[0].double() + 1)
    assert_rounded(y, residual.double() + 0.25 * wide)
    exact = y.double() / (y.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (gains[1].double() + 0.5)
    assert_rounded(h, exact)
    alone, nothing = by_kernel.join(*given)
    assert torch.equal(alone, y) and nothing is None


def test_sizes_that_no_norm_kernel_has() -> None:
    x, gain = numbers(2, 60), numbers(60)
    assert torch.equal(by_kernel.rms_norm(x, gain, 1e-5, 0.0, TARGET), reference.rms_norm(x, gain, 1e-5, 0.0))


# -- rotation and cache


@TYPES
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("b", "t", "queries", "keys", "columns"), [(1, 1, 4, 2, 128), (2, 3, 3, 1, 64), (2, 1, 2, 2, 80), (1, 2, 2, 1, 16)]
)
def test_rope(b: int, t: int, queries: int, keys: int, columns: int, normed: bool, dtype: torch.dtype) -> None:
    x = numbers(b, t, (queries + 2 * keys) * columns, dtype=dtype)
    cos, sin = (numbers(1, t, columns // 2, dtype=dtype, seed=seed).repeat(b, 1, 2) for seed in (1, 2))
    gains = (numbers(columns, dtype=dtype, seed=3), numbers(columns, dtype=dtype, seed=4)) if normed else None
    held = torch.tensor(5)
    found = list[tuple[Tensor, ...]]()
    for target in (TARGET, "cpu"):
        cache = [torch.full((b, keys, 10, columns), 7.0, dtype=dtype) for _ in range(2)]
        q = by_kernel.rope(x, cos, sin, gains, *cache, held, 1e-6, 1.0 if normed else 0.0, target)
        found.append((q, *cache))
        assert all((each[:, :, place] == 7).all() for each in cache for place in (*range(5), *range(5 + t, 10)))
        values = x.unflatten(-1, (-1, columns))[:, :, queries + keys :].transpose(1, 2)
        assert torch.equal(cache[1][:, :, 5 : 5 + t], values)
    for kernels, torchs in zip(*found):
        assert_rounded(kernels, torchs.float())


def test_rope_is_that_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = numbers(2, 3, 4 * 64, dtype=torch.float32)
    cos, sin = (numbers(2, 3, 32, dtype=torch.float32, seed=seed).repeat(1, 1, 2) for seed in (1, 2))
    keys, values = torch.zeros(2, 1, 5, 64), torch.zeros(2, 1, 5, 64)
    q = by_kernel.rope(x, cos, sin, None, keys, values, torch.tensor([1]), 0.0, 0.0, "cpu")
    heads = x.unflatten(-1, (-1, 64)).transpose(1, 2)
    expected = llama.apply_rotary_pos_emb(heads[:, :2], heads[:, 2:3], cos, sin)
    torch.testing.assert_close(q.unflatten(-1, (-1, 64)).transpose(1, 2), expected[0])
    torch.testing.assert_close(keys[:, :, 1:4], expected[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("columns", "turned", "repeated", "beside"),
    [
        (128, 96, True, False), (64, 32, True, False), (64, 64, False, False), (128, 32, False, False),
        (64, 0, True, False), (80, 16, True, False), (128, 128, True, True), (128, 64, True, True),
        (64, 16, True, True), (128, 96, False, True),
    ],
)  # fmt: skip
def test_rotation_of_some_columns(columns: int, turned: int, repeated: bool, beside: bool, target: str) -> None:
    """The first columns of a head are rotated, in halves or pairs, the others left; cos and sin may have one half."""
    x, half = numbers(2, 2, 4 * columns), numbers(2, 2, turned // 2, seed=1)
    given = torch.cat([half, half], -1) if repeated else half
    turn = (given, given.flip(0)) if turned else (None, None)
    cache = [torch.zeros(2, 1, 5, columns, dtype=torch.bfloat16) for _ in range(2)]
    gains = numbers(columns, seed=3), numbers(columns, seed=4)
    q = by_kernel.rope(x, *turn, gains, *cache, torch.tensor(1), 1e-6, 1.0, target, repeated, beside)
    heads = x.double().unflatten(-1, (-1, columns))
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = list[Tensor]()
    for each, gain in zip((normed[:, :, :2], normed[:, :, 2:3]), gains):
        both, rest = (each * (gain.double() + 1)).split((turned, columns - turned), -1)
        a, b = (both[..., ::2], both[..., 1::2]) if beside else both.tensor_split(2, -1)
        cos, sin = half.double()[:, :, None], half.double().flip(0)[:, :, None]
        pairs = a * cos - b * sin, b * cos + a * sin
        both = torch.stack(pairs, -1).flatten(-2) if beside else torch.cat(pairs, -1)
        expected.append(torch.cat([both, rest], -1))
    assert_rounded(q, expected[0].flatten(2))
    assert_rounded(cache[0][:, :, 1:3], expected[1].transpose(1, 2))
    assert torch.equal(cache[1][:, :, 1:3], x.unflatten(-1, (-1, columns))[:, :, 3:].transpose(1, 2))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("length", "columns"), [(5, 64), (256, 64), (300, 48), (2100, 16)])
def test_a_full_cache_drops_its_first_token(length: int, columns: int, target: str) -> None:
    cache = [numbers(2, 3, length, columns, seed=seed) for seed in (1, 2)]
    before, held = [each.clone() for each in cache], torch.tensor([7, 9])
    by_kernel.drop_first(*cache, held[:1], target)
    assert held.tolist() == [length - 1, 9]
    for each, old in zip(cache, before):
        assert torch.equal(each[:, :, :-1], old[:, :, 1:])


@pytest.mark.parametrize("target", [TARGET, "cpu"])
def test_a_cache_that_is_full_stays_as_it_is(target: str) -> None:
    x, turn = numbers(2, 2, 4 * 64), numbers(2, 2, 64)
    cache = [torch.full((2, 1, 5, 64), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    by_kernel.rope(x, turn, turn, None, *cache, torch.tensor(4), 0.0, 0.0, target)
    assert all((each[:, :, :4] == 7).all() and not (each[:, :, 4] == 7).all() for each in cache)


# -- attention


def assert_attends(
    b: int, t: int, heads: Heads, held: int, dtype: torch.dtype, masked: bool, rows: int | None = None
) -> None:
    length = 200
    q = numbers(b, t, heads.queries * heads.columns, dtype=dtype)
    keys, values = (numbers(b, heads.keys, length, heads.columns, dtype=dtype, seed=seed) for seed in (1, 2))
    keys[:, :, held + t :] = values[:, :, held + t :] = torch.nan
    mask = None
    if masked:
        mask = torch.rand(rows or b, 1, t, length, generator=torch.Generator().manual_seed(3)) > 0.3
        mask[..., 0] = True
    scale = heads.columns**-0.5
    found = by_kernel.attention(q, keys, values, torch.tensor(held), mask, scale, TARGET)
    assert found.shape == q.shape
    exact = reference.attention(
        q.unflatten(-1, (-1, heads.columns)).double().float(), *(each.nan_to_num(0) for each in (keys, values)),
        torch.tensor(held), mask, scale,
    )  # fmt: skip
    torch.testing.assert_close(
        found.float(), exact.flatten(2), rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4
    )


@TYPES
@pytest.mark.parametrize("held", [0, 1, 63, 150])
def test_attention_of_parts(held: int, dtype: torch.dtype) -> None:
    assert_attends(1, 1, Heads(4, 2, 128), held, dtype, masked=False)


@pytest.mark.parametrize(
    ("b", "t", "heads"),
    [(2, 3, Heads(7, 1, 64)), (1, 1, Heads(8, 1, 128)), (1, 2, Heads(2, 2, 256)), (64, 1, Heads(4, 4, 64))],
)
def test_attention_with_a_mask(b: int, t: int, heads: Heads) -> None:
    assert_attends(b, t, heads, 100, torch.bfloat16, masked=True)


def test_attention_with_one_mask_for_all_sequences() -> None:
    assert_attends(2, 2, Heads(2, 1, 64), 70, torch.float16, masked=True, rows=1)


def attention_in_f64(
    q: Tensor, keys: Tensor, values: Tensor, end: int, mask: Tensor | None, sinks: Tensor | None, cap: float
) -> Tensor:
    """Returns what one token of each sequence makes of the first places [b, 1, queries * columns]."""
    b, heads, _, columns = keys.shape
    queries = q.double().unflatten(-1, (heads, -1, columns))[:, 0]  # [b, heads, group, columns]
    products = queries @ keys[:, :, :end].double().transpose(2, 3) * columns**-0.5
    products = cap * (products / cap).tanh() if cap else products
    products = products if mask is None else products + mask[..., :end].double()
    rest = [] if sinks is None else [sinks.double().view(1, heads, -1, 1).expand(b, -1, -1, 1)]
    return (torch.cat([products, *rest], -1).softmax(-1)[..., :end] @ values[:, :, :end].double()).flatten(1)[:, None]


CASES = [(target, 1, Heads(4, 2, 64), held) for target in TARGETS for held in (3, 150)]
CASES += [(target, 3, Heads(7, 1, 64), 90) for target in (TARGET, "cpu")] + [(TARGET, 64, Heads(2, 1, 64), 3)]


EXTRAS = ((True, 0.0, False), (False, 3.0, False), (False, 0.0, True), (True, 2.0, True))  # sunk, cap, added


@pytest.mark.parametrize(
    ("target", "b", "heads", "held", "sunk", "cap", "added"),
    swept((*case, *extra) for case in CASES for extra in EXTRAS),
)
def test_attention_with_sinks_caps_and_numbers_as_a_mask(
    target: str, b: int, heads: Heads, held: int, sunk: bool, cap: float, added: bool
) -> None:
    q = 3 * numbers(b, 1, heads.queries * heads.columns)
    keys, values = (numbers(b, heads.keys, 200, heads.columns, seed=seed) for seed in (1, 2))
    sinks, mask = numbers(heads.queries, seed=3) * 2 if sunk else None, None
    if added:
        mask = torch.where(numbers(b, 1, 1, 200, seed=4) > 1, torch.finfo(q.dtype).min, numbers(b, 1, 1, 200, seed=5))
    found = by_kernel.attention(q, keys, values, torch.tensor(held), mask, heads.columns**-0.5, target, sinks, cap)
    exact = attention_in_f64(q, keys, values, held + 1, mask, sinks, cap)
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_that_may_look_at_nothing_but_its_sink(target: str) -> None:
    q, cache = numbers(1, 1, 128), numbers(1, 1, 40, 64)
    for mask in (torch.full((1, 1, 1, 40), -torch.inf).bfloat16(), torch.zeros(1, 1, 1, 40, dtype=torch.bool)):
        y = by_kernel.attention(q, cache, cache, torch.tensor(20), mask, 1.0, target, numbers(2, seed=1))
        assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("target", [TARGET, "cpu"])
def test_attention_with_sinks_has_equal_bits_for_any_number_of_tokens(target: str) -> None:
    q, keys, values = numbers(3, 2, 4 * 64), numbers(3, 2, 90, 64, seed=1), numbers(3, 2, 90, 64, seed=2)
    sinks = numbers(4, seed=3)
    with lowbit.batch_invariant():
        whole = by_kernel.attention(q, keys, values, torch.tensor(70), None, 0.1, target, sinks, 5.0)
        for b in range(3):
            given = q[b : b + 1, 1:], keys[b : b + 1], values[b : b + 1], torch.tensor(71), None
            assert torch.equal(by_kernel.attention(*given, 0.1, target, sinks, 5.0), whole[b : b + 1, 1:])


def test_attention_counts_zero_again() -> None:
    """A second launch finds the workspace as the first did."""
    for held in (60, 190):
        assert_attends(1, 1, Heads(2, 1, 64), held, torch.float16, masked=False)


@pytest.mark.parametrize("columns", [80, 96])
def test_columns_that_no_attention_kernel_has(columns: int) -> None:
    q, cache = numbers(1, 1, 2 * columns), numbers(1, 1, 10, columns)
    found = by_kernel.attention(q, cache, cache, torch.tensor(3), None, 1.0, TARGET)
    expected = reference.attention(q.unflatten(-1, (2, columns)), cache, cache, torch.tensor(3), None, 1.0)
    assert torch.equal(found, expected.flatten(2))


HEADS = (Heads(32, 8, 128), Heads(32, 4, 128), Heads(28, 4, 128), Heads(8, 4, 256))


@pytest.mark.parametrize(("heads", "parts", "more"), swept(product(HEADS, (1, 16), (False, True))), ids=str)
def test_attention_spills_no_registers(heads: Heads, parts: int, more: bool) -> None:
    plan = AttentionPlan(heads, "bf16", parts, masked=True, added=more, sinks=more, capped=more)
    kernel = lower_program(partial(attention_program, plan), parse_target("sm_90a"))
    used = resource_usage(kernel.ptx, kernel.target)
    assert used.spill_stores <= 64 and used.registers <= 255


@pytest.mark.parametrize(("length", "columns"), [(128, 64), (1024, 256), (4096, 128)])
def test_a_cache_that_moves_is_held_in_registers(length: int, columns: int) -> None:
    kernel = lower_program(partial(shift_program, length, columns, "bf16"), parse_target("sm_90a"))
    assert resource_usage(kernel.ptx, kernel.target).spill_stores == 0


def test_memory_on_a_gpu_is_asked_for_by_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of torch that allocates takes nothing else."""
    asked = list[tuple[object, ...]]()
    monkeypatch.setattr(own_kernels, "allocate", lambda *given: asked.append(given))
    like = SimpleNamespace(is_cuda=True, dtype=torch.float16)
    own_kernels.unwritten_like(torch.zeros(2, 3, 4).shape, like)  # type: ignore[arg-type]
    assert asked == [((2, 3, 4), (12, 4, 1), torch.float16)] and {type(each) for each in asked[0][:2]} == {tuple}


def test_a_guess_is_read_again() -> None:
    """How many tokens are held is read before the kernel in front has ended, to prefetch, and again after it."""
    program = partial(attention_program, AttentionPlan(Heads(4, 2, 128), "bf16"))
    before, after = lower_program(program, parse_target("sm_90a")).ptx.split("griddepcontrol.wait")
    assert "prefetch.global.L2" in before and "prefetch.global.L2" not in after
    assert before.count("ld.global") == before.count("ld.global.b32") == after.count("ld.global.b32") == 1


# -- operators


def test_operators_are_traced() -> None:
    from lowbit.pylib.operator import layer_schema  # noqa: F401

    ops, x, gain = torch.ops.lowbit, numbers(1, 1, 4 * 64), numbers(4 * 64)
    turn, held = numbers(1, 1, 64), torch.tensor([2])
    cache = [torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16) for _ in range(2)]

    def layer(x: Tensor, keys: Tensor, values: Tensor, held: Tensor) -> Tensor:
        normed = ops.rms_norm(x, gain, 1e-5, 0.0, "")
        q = ops.rope(normed, turn, turn, None, None, keys, values, held, 0.0, 0.0, "")
        y = ops.decode_attention(q, keys, values, held, None, 0.125, "")
        return ops.rms_norm_counting(y, gain[:128], held, 1, 1e-5, 0.0, "")

    eager = [each.clone() for each in (*cache, held)]
    expected = layer(x, *eager)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, *cache, held)
    assert torch.equal(found, expected) and held.tolist() == [3]
    assert all(torch.equal(a, b) for a, b in zip(eager, (*cache, held)))


@pytest.mark.parametrize("name", ["rms_norm", "rope", "decode_attention"])
def test_operators_pass_torchs_checks(name: str) -> None:
    from lowbit.pylib.operator import layer_schema  # noqa: F401

    x, turn, cache = numbers(1, 1, 4 * 64), numbers(1, 1, 64), torch.zeros(1, 1, 5, 64, dtype=torch.bfloat16)
    arguments = {
        "rms_norm": (x, numbers(4 * 64), 1e-5, 0.0, ""),
        "rope": (x, turn, turn, None, None, cache, cache.clone(), torch.tensor([1]), 0.0, 0.0, ""),
        "decode_attention": (x, cache, cache, torch.tensor([1]), None, 1.0, ""),
    }
    torch.library.opcheck(getattr(torch.ops.lowbit, name).default, arguments[name])


def test_plus_adds_a_residual_to_a_layer() -> None:
    layer = LowbitLinear.from_linear(torch.nn.Linear(64, 32).bfloat16(), QuantConfig("u4", 32))
    x, residual = numbers(2, 3, 64), numbers(2, 3, 32, seed=1)
    found, apart = layer.plus(x, residual), layer(x).float() + residual.float()
    torch.testing.assert_close(found.float(), apart, rtol=2**-7, atol=2**-7)  # the sum is rounded once, not twice
    assert torch.equal(torch.compile(layer.plus, fullgraph=True, backend="aot_eager")(x, residual), found)
