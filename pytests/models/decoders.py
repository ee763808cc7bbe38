"""Dense weights out of other libraries' files, decoded with NumPy from the definitions of their formats.

Nothing here is shared with the importers: files are taken apart by their own header, codes are cut out of bits, and all
is computed in f64.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
State = dict[str, Array]
Decoded = tuple[Array, Array]
"""The weight [n, k], and the sizes of the terms that it is the sum of."""

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
INTEGERS = {"I64": np.int64, "I32": np.int32, "U32": np.uint32, "I16": np.int16, "I8": np.int8}


def read_file(path: Path) -> tuple[State, dict[str, tuple[int, int]]]:
    """Returns the tensors of a safetensors file and where their bytes lie in it. bf16 and f64 become f64; e4m3 and
    bytes stay bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = {name: about for name, about in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}
    places = {n: (8 + length + a["data_offsets"][0], 8 + length + a["data_offsets"][1]) for n, a in header.items()}
    tensors = {n: _array(data[slice(*places[n])], a["dtype"]).reshape(a["shape"]) for n, a in header.items()}
    return tensors, places


def _array(data: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, FLOATS.get(dtype) or INTEGERS.get(dtype) or np.uint8)


def stream(rows: Array, bits: int, count: int) -> Array:
    """Returns codes [rows, count] of rows of words, in which codes follow one another, lowest bits first."""
    data = np.ascontiguousarray(rows).view(np.uint8)
    digits = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits]
    return digits.reshape(len(data), count, bits) @ (1 << np.arange(bits))


def small_float(codes: Array, exponent: int, mantissa: int) -> Array:
    """Returns the numbers of codes with a sign and so many bits of exponent and mantissa, without infinities."""
    magnitude = codes & ((1 << (exponent + mantissa)) - 1)
    high, low, bias = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1), (1 << (exponent - 1)) - 1
    value = (low + (high > 0) * (1 << mantissa)) * 2.0 ** (np.maximum(high, 1) - bias - mantissa)
    return np.where(codes >> (exponent + mantissa) & 1, -value, value)


def e4m3(codes: Array) -> Array:
    codes = codes.astype(np.int64)
    return np.where(codes & 127 == 127, np.nan, small_float(codes, 4, 3))


def e8m0(exponents: Array) -> Array:
    return np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))


def each(numbers: Array, shape: tuple[int, int], rows: int, columns: int) -> Array:
    """Returns a number for each weight, of numbers for blocks of so many rows and columns."""
    return np.repeat(np.repeat(numbers, rows, 0), columns, 1)[: shape[0], : shape[1]].astype(np.float64)


def affine(codes: Array, scales: Array, zeros: Array | float = 0.0, offsets: Array | float = 0.0) -> Decoded:
    """Returns (code - zero) * scale + offset."""
    size = np.abs(scales) * (np.abs(codes) + np.abs(zeros)) + np.abs(offsets)
    return (codes - zeros) * scales + offsets, size


# -- the formats


def gptq(config: dict[str, Any], t: State) -> Decoded:
    bits, plus = config["bits"], int(config.get("checkpoint_format", "gptq") == "gptq")
    columns = t["qweight"].T
    k = columns.shape[1] * 32 // bits
    zeros = (stream(t["qzeros"], bits, t["scales"].shape[1]) + plus) % (1 << bits)
    size = k if config["group_size"] == -1 else config["group_size"]
    groups = t["g_idx"] if "g_idx" in t else np.arange(k) // size
    return affine(stream(columns, bits, k), t["scales"].T.astype(np.float64)[:, groups], zeros.T[:, groups])


def awq(config: dict[str, Any], t: State) -> Decoded:
    n, k = t["scales"].shape[1], len(t["qweight"])
    order = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7).index(i % 8) for i in range(n)]
    codes, zeros = (stream(t[name], 4, n)[:, order].T for name in ("qweight", "qzeros"))
    size = k // t["scales"].shape[0]
    return affine(codes, each(t["scales"].T, (n, k), 1, size), each(zeros, (n, k), 1, size))


def awq_of_kernels(config: dict[str, Any], t: State) -> Decoded:
    """Code by code, from what AutoAWQ's functions say of each."""
    version = config["version"]
    if version == "gemm":
        return awq(config, t)
    if version == "gemv":
        k = t["qweight"].shape[1] * 8
        groups = k // config["group_size"]
        scales, zeros = t["scales"][:, :groups], stream(t["qzeros"], 4, groups)
        return _with_blocks(stream(t["qweight"], 4, k), scales.astype(np.float64), zeros, {})
    return _gemv_fast(config, t) if version == "gemv_fast" else _marlin(t["qweight"], t["scales"])


def _gemv_fast(config: dict[str, Any], t: State) -> Decoded:
    n, k = len(t["qweight"]) * 4, t["qweight"].shape[1]
    flat = stream(t["qweight"], 4, 4 * k).reshape(n // 4, k // 64, 4, 64)
    codes = np.empty((n, k), np.int64)
    for row, column in np.ndindex(n, k):
        eights, rest = divmod(column % 32, 8)  # packed as [0, 1, 8, 9, 16, 17, 24, 25], [2, 3, ..., of 32
        place = (rest // 2) * 8 + eights * 2 + rest % 2
        place = place // 8 * 8 + (0, 2, 4, 6, 1, 3, 5, 7).index(place % 8)  # and in eights even ones before odd ones
        codes[row, column] = flat[row // 4, column // 64, row % 4, column % 64 // 32 * 32 + place]
    scales, offsets = (each(t[name].T, (n, k), 1, config["group_size"]) for name in ("scales", "qzeros"))
    return affine(codes, scales, 0.0, offsets)


def _marlin(packed: Array, scales: Array) -> Decoded:
    """A lane of a warp takes rows 2 i, 2 i + 1 and those eight below of its column and of that eight further right."""
    k, n = len(packed) * 16, packed.shape[1] // 2
    words, codes = packed.reshape(k // 16, n // 64, 32, 4).view(np.uint32), np.empty((n, k), np.int64)
    for i, j, lane, tile, nibble in np.ndindex(k // 16, n // 64, 32, 4, 8):
        number = (0, 2, 4, 6, 1, 3, 5, 7)[nibble]
        row = 2 * (lane % 4) + number % 2 + 8 * (number % 4 // 2)
        column = 64 * j + 16 * tile + lane // 4 + 8 * (number // 4)
        codes[column, 16 * i + row] = words[i, j, lane, tile] >> np.uint32(4 * nibble) & np.uint32(15)
    size = 32 if len(scales) == 1 else 64
    places = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    places = places if size == 32 else [i + 8 * j for i in range(8) for j in range(8)]
    ordered = np.empty_like(scales)
    for start in range(0, n, size):
        ordered[:, start + np.array(places)] = scales[:, start : start + size]
    return _with_blocks(codes - 8, ordered.T.astype(np.float64), None, {})


def quanto(config: dict[str, Any], t: State) -> Decoded:
    scale = t["weight._scale"].astype(np.float64)
    if "weight._data" in t:
        data = t["weight._data"]
        return affine(e4m3(data) if data.dtype == np.uint8 else data.astype(np.float64), scale)
    packed, n = t["weight._data._data"], len(t["bias"])
    bits = 8 * len(packed) // len(scale)
    codes = np.concatenate([packed >> bits * part & ((1 << bits) - 1) for part in range(8 // bits)])
    value, size = affine(codes, scale, 0.0, -t["weight._shift"].astype(np.float64))
    return value.reshape(n, -1), size.reshape(n, -1)


def quark(config: dict[str, Any], t: State) -> Decoded:
    scheme, weight, scales = config["global_quant_config"]["weight"], t["weight"], t["weight_scale"]
    if isinstance(scheme, list):
        return modelopt({"quant_algo": "NVFP4"}, t)
    dtype = scheme["dtype"]
    if dtype.startswith(("fp4", "fp6")):
        bits, exponent = int(dtype[2]), int(dtype[5]) if dtype[2] == "6" else 2
        codes = stream(weight, bits, weight.shape[1] * 8 // bits)
        return _with_blocks(small_float(codes, exponent, bits - 1 - exponent), e8m0(scales), None, {})
    if dtype == "fp8_e4m3":
        return fp8({}, {"weight": weight, "weight_scale": scales.reshape(-1, 1)})
    codes, zeros = (_quark_integers(t[name], dtype, config) for name in ("weight", "weight_zero_point"))
    if scheme["qscheme"] == "per_group":
        return _with_blocks(codes.T, scales.T.astype(np.float64), zeros.T, {})
    return affine(codes, scales.reshape(-1, 1).astype(np.float64), zeros.reshape(-1, 1))


def _quark_integers(packed: Array, dtype: str, config: dict[str, Any]) -> Array:
    if dtype.endswith("8"):
        return packed.astype(np.int64)
    rows = np.atleast_2d(packed)
    codes = stream(rows, 4, rows.shape[1] * 8)
    if config["export"]["pack_method"] == "reorder":
        codes = codes[:, [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7).index(i % 8) for i in range(codes.shape[1])]]
    codes = np.where(codes > 7, codes - 16, codes) if dtype == "int4" else codes
    return codes.reshape(*packed.shape[:-1], -1)


def auto_round(config: dict[str, Any], t: State) -> Decoded:
    config = {**config, **next(iter(config.get("extra_config", {}).values()), {})}
    if "weight_scale_inv" in t:
        return fp8({"weight_block_size": config["group_size"]}, t)
    if "weight_scale" in t:
        scales = t["weight_scale"]
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        return _compressed_floats({}, config["bits"], {**t, "weight_scale": scales})
    if config["packing_format"].endswith("awq"):
        return awq(config, t)
    version = "gptq" if config["packing_format"].endswith("gptq") else "gptq_v2"
    return gptq({**config, "checkpoint_format": version}, t)


def hqq(config: dict[str, Any], t: State) -> Decoded:
    (n, k), rows, bits = t["shape"], len(t["scale"]), int(t["nbits"])
    words = np.ascontiguousarray(t["W_q"]).view(np.int32 if bits == 3 else np.uint8).astype(np.int64) & 0xFFFFFFFF
    width = {8: 8, 6: 8, 5: 8}.get(bits, bits)
    count = 10 if bits == 3 else 8 // width
    codes = np.concatenate([words >> width * (count - 1 - i) & ((1 << width) - 1) for i in range(count)])[:rows]
    return affine(
        codes.reshape(n, k),
        each(t["scale"].reshape(n, -1), (n, k), 1, k * n // rows),
        each(t["zero"].reshape(n, -1), (n, k), 1, k * n // rows),
    )


def bitsandbytes(config: dict[str, Any], t: State) -> Decoded:
    if "SCB" in t:
        return affine(t["weight"].astype(np.float64), t["SCB"].astype(np.float64)[:, None] / 127)
    state = json.loads(bytes(next(value for name, value in t.items() if "quant_state" in name)))
    packed = t["weight"].reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(state["shape"])
    blocks = (np.arange(codes.size) // state["blocksize"]).reshape(codes.shape)
    scales, offset = t["weight.absmax"].astype(np.float64), 0.0
    if "nested_offset" in state:
        outer = t["weight.nested_absmax"].astype(np.float64)[np.arange(len(scales)) // state["nested_blocksize"]]
        table, offset = t["weight.nested_quant_map"].astype(np.float64), state["nested_offset"]
        scales = table[t["weight.absmax"]] * outer
    values = t["weight.quant_map"].astype(np.float64)[codes]
    return values * (scales[blocks] + offset), np.abs(values) * (np.abs(scales[blocks]) + abs(offset))


def compressed_tensors(config: dict[str, Any], t: State) -> Decoded:
    (group,) = config["config_groups"].values()
    scheme, scales = group["weights"], t["weight_scale"]
    bits = scheme["num_bits"]
    if scheme["type"] == "float":
        return _compressed_floats(scheme, bits, t)
    if "weight" in t:
        codes, zeros = t["weight"].astype(np.int64), t.get("weight_zero_point", np.zeros_like(scales))
    else:
        n, k = t["weight_shape"]
        codes, middle = stream(t["weight_packed"], bits, k), 1 << (bits - 1)
        given = t.get("weight_zero_point")
        zeros = np.full(scales.shape, middle) if given is None else stream(given.T, bits, n).T
    return _with_blocks(codes, scales, zeros, scheme)


def _compressed_floats(scheme: dict[str, Any], bits: int, t: State) -> Decoded:
    scales = t["weight_scale"]
    if bits == 8:
        return _with_blocks(e4m3(t["weight"]), e8m0(scales) if scales.dtype == np.uint8 else scales, None, scheme)
    packed = t["weight_packed"]
    values = small_float(stream(packed, bits, packed.shape[1] * 8 // bits), 2, {4: 1, 6: 3}[bits])
    if "weight_global_scale" in t:
        return _with_blocks(values, e4m3(scales) / t["weight_global_scale"].astype(np.float64), None, scheme)
    return _with_blocks(values, e8m0(scales), None, scheme)


def _with_blocks(codes: Array, scales: Array, zeros: Array | None, scheme: dict[str, Any]) -> Decoded:
    n, k = codes.shape
    scales = scales.reshape(1, 1) if scales.size == 1 else scales
    rows, columns = scheme.get("block_structure") or (-(-n // len(scales)), -(-k // scales.shape[1]))
    middle = 0.0 if zeros is None else each(zeros.reshape(scales.shape), (n, k), rows, columns)
    return affine(codes, each(scales, (n, k), rows, columns), middle)


def fp8(config: dict[str, Any], t: State) -> Decoded:
    scales = next(t[name] for name in ("weight_scale_inv", "weight_scale") if name in t)
    scales = e8m0(scales) if scales.dtype == np.uint8 else scales.reshape(scales.shape or (1, 1))
    block = config.get("weight_block_size")
    return _with_blocks(e4m3(t["weight"]), scales, None, {"block_structure": block} if block else {})


def modelopt(config: dict[str, Any], t: State) -> Decoded:
    algorithm, scales = config["quant_algo"], t["weight_scale"]
    if algorithm.startswith("W8"):
        return affine(t["weight"].astype(np.int64), scales.reshape(-1, 1).astype(np.float64))
    if "FP4" not in algorithm.upper() and algorithm[0] != "W":
        return fp8(config, {**t, "weight_scale": scales if scales.ndim == 2 else scales.reshape(-1, 1)})
    if "AWQ" in algorithm:
        nibbles = np.stack([t["weight"] & 15, t["weight"] >> 4], 1).reshape(len(scales), -1).astype(np.int64)
        return _with_blocks(np.where(nibbles > 7, nibbles - 16, nibbles), scales, None, {})
    values = small_float(stream(t["weight"], 4, t["weight"].shape[1] * 2), 2, 1)
    if "weight_scale_2" not in t:
        return _with_blocks(values, e8m0(scales), None, {})
    return _with_blocks(values, e4m3(t["weight_scale"]) * float(t["weight_scale_2"]), None, {})


def bitnet(config: dict[str, Any], t: State) -> Decoded:
    codes = np.concatenate([t["weight"] >> 2 * part & 3 for part in range(4)]).astype(np.int64) - 1
    (scale,) = t["weight_scale"].astype(np.float64)
    return affine(codes, np.full((1, 1), 1 / scale if config["linear_class"] == "bitlinear" else scale))


def mlx(config: dict[str, Any], t: State) -> Decoded:
    (n, groups), size = t["scales"].shape, config["group_size"]
    names = "scales", "qbiases" if "qbiases" in t else "biases"
    scales, offsets = (each(t[name], (n, groups * size), 1, size) for name in names)
    return affine(stream(t["weight"], config["bits"], groups * size), scales, 0.0, offsets)


def gemma(config: dict[str, Any], t: State) -> Decoded:
    weight, bits = t["weight"], config["num_bits"]
    if weight.dtype == np.int8:
        return affine(weight.astype(np.int64), t["weight_scale"].astype(np.float64))
    codes = np.stack([weight >> bits * part & (1 << bits) - 1 for part in range(8 // bits)], -1)
    codes = codes.reshape(len(weight), -1).astype(np.int64)
    return affine(codes, t["weight_scale"].astype(np.float64), float(1 << bits - 1))


def mxfp4(config: dict[str, Any], t: State) -> Decoded:
    """The experts one below the other."""
    blocks = t["blocks"].reshape(-1, t["blocks"].shape[2] * 16)
    values = small_float(stream(blocks, 4, blocks.shape[1] * 2), 2, 1)
    return _with_blocks(values, e8m0(t["scales"].reshape(len(blocks), -1)), None, {})


def spqr(config: dict[str, Any], t: State) -> Decoded:
    order = t["in_perm"].view(np.uint16).astype(int)
    k = len(order)
    n = len(t["dense_weights"]) * 16 // k
    words = t["dense_weights"].view(np.uint64).reshape(n // 16, k // 16, 16)
    weight, size = np.zeros((n, k)), np.zeros((n, k))
    for i, j in np.ndindex(n // 16, k // 16):
        level = (words[i, j, ::2] | words[i, j, 1::2]) >> np.uint64(54)
        level = level.astype(np.uint8).view(np.float16).astype(np.float64)
        for r in range(16):
            scale, zero, *codes = (int(words[i, j, r]) >> 3 * number & 7 for number in range(18))
            s, z = level[0] * (scale - level[2]), level[1] * (zero - level[3])
            weight[16 * i + r, 16 * j : 16 * j + 16] = s * (np.array(codes) - z)
            sizes = np.abs(level) * (7 + np.abs(level[[2, 3, 2, 3]]))
            size[16 * i + r, 16 * j : 16 * j + 16] = sizes[0] * (7 + sizes[1])
    for row, word in _spqr_outliers(t, n):
        value = np.array([word >> 16], np.uint16).view(np.float16)[0].astype(np.float64)
        weight[row, word & 0xFFFF] += value
        size[row, word & 0xFFFF] += abs(value)
    back = np.argsort(order)
    return weight[:, back], size[:, back]


def _spqr_outliers(t: State, n: int) -> list[tuple[int, int]]:
    """Returns outliers as rows and words, without those that fill up."""
    offsets, words = t["row_offsets"], [int(word) & 0xFFFFFFFF for word in t["col_vals"]]
    if len(offsets) == n + 1:
        return [(row, words[i]) for row in range(n) for i in range(offsets[row], offsets[row + 1])]
    blocks = [(b, i) for b in range(n // 16) for i in range(offsets[b], offsets[b + 1])]
    return [(16 * b + (i - offsets[b]) % 16, words[i]) for b, i in blocks if words[i] >> 16 & 0x7FFF]


def exl2(config: dict[str, Any], t: State) -> Decoded:
    """Group by group, of rows that lie one below the other; each number of scales and zeros is one of f16."""
    columns, places, words, n = t["q_weight"].shape[1], t["q_invperm"], t["q_weight"], len(t["bias"])
    pairs = t["q_groups"].reshape(-1, 2).astype(int)
    numbers, parts, left = stream(t["q_scale"], 4, columns) + 1, list[Decoded](), len(places)
    for (bits, first), (_, end), number, most in zip(
        pairs, [*pairs[1:], (0, len(words))], numbers, t["q_scale_max"], strict=True
    ):
        count = min((end - first) * 32 // bits, left)
        left -= count
        scale = (number * number).astype(np.float16) * (most / np.float16(256))
        codes = stream(words[first:end].T, bits, count) - (1 << bits >> 1)
        parts.append(affine(codes, scale.astype(np.float64)[:, None]))
    value, size = (np.concatenate(rows, 1)[:n, places] for rows in zip(*parts, strict=True))
    return value, size


def torchao(config: dict[str, Any], t: State) -> Decoded:
    data, scales, zeros = t["_weight_qdata"], t["_weight_scale"], t.get("_weight_zero_point")
    if zeros is not None and zeros.dtype.kind == "f":
        codes = stream(data, 4, data.shape[1] * 2)
        codes, size = np.where(codes > 7, codes - 16, codes), data.shape[1] * 2 // len(scales)
        return affine(codes, each(scales.T, codes.shape, 1, size), 0.0, each(zeros.T, codes.shape, 1, size))
    return _with_blocks(e4m3(data) if data.dtype == np.uint8 else data.astype(np.int64), scales, zeros, {})


DECODERS: dict[str, Callable[[dict[str, Any], State], Decoded]] = {
    "auto-round": auto_round,
    "awq": awq_of_kernels,
    "bitnet": bitnet,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "exl2": exl2,
    "fbgemm_fp8": fp8,
    "fp8": fp8,
    "gptq": gptq,
    "hqq": hqq,
    "metal": mlx,
    "mlx": mlx,
    "gemma": gemma,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "mxfp8": fp8,
    "quanto": quanto,
    "quark": quark,
    "spqr": spqr,
    "torchao": torchao,
}
"""By quant_method: functions of a quantization_config and the tensors of a layer, by their names in it."""
