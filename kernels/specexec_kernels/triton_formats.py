# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Functions with which Triton kernels read the formats of formats/.

The public functions all have the same arguments. Each returns the float32 weights of outputs `n` (a
column of int64 indices) and inputs `k` (a row); weights that are not `inside` may be anything.

Args:
    parts: pointers to the contiguous tensors of PackedFormat.parts, in that order, then to the
        format's table if it has one. float8 tensors are given as bytes.
    K, N: inputs and outputs of the weight.
    SETTINGS: TritonForm.settings of the format, as each function's docstring lists them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(bits):
    """The float16 of the lower 16 bits, as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _float8(code, E4M3: tl.constexpr):
    """int32 from 0 to 255 as the float8 that they encode."""
    if E4M3:  # exponents of a float16 are 8 larger
        magnitude = code & 0x7F
        value = _half(((code & 0x80) << 8) | (magnitude << 7)) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        return _half(code << 8)


@triton.jit
def _power_of_two(code):
    """2 to the code - 127; 255 is NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _code(pointer, place, inside):
    """Bytes as int32."""
    return tl.load(pointer + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def _number(pointer, place, inside, KIND: tl.constexpr):
    """Items of a tensor of scales, of safetensors' dtype KIND, as float32."""
    if KIND == "U8" or KIND == "F8_E8M0":
        return _power_of_two(_code(pointer, place, inside))
    elif KIND == "F8_E4M3":
        return _float8(_code(pointer, place, inside), True)
    else:
        return tl.load(pointer + place, mask=inside, other=0).to(tl.float32)


@triton.jit
def _word(pointer, place, inside):
    return tl.load(pointer + place, mask=inside, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def fp4(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: group, dtype of the scales, and how a factor is applied: "", "*" or "/"."""
    GROUP: tl.constexpr = SETTINGS[0]
    FACTOR: tl.constexpr = SETTINGS[2]
    code = _code(parts[0], n * (K // 2) + k // 2, inside) >> (k % 2 * 4)
    # as a float16 its exponent is 14 too small
    value = _half(((code & 8) << 12) | ((code & 7) << 9)) * 16384.0
    scale = _number(parts[1], n * (K // GROUP) + k // GROUP, inside, SETTINGS[1])
    if FACTOR == "*":
        scale = scale * tl.load(parts[2])
    elif FACTOR == "/":
        scale = tl.div_rn(scale, tl.load(parts[2]) + tl.zeros_like(scale))
    return value * scale


@triton.jit
def fp8(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: whether E4M3, outputs and inputs of a tile, 0 for all, dtype of the scales."""
    code = _code(parts[0], n * K + k, inside)
    place = _tile(n, k, K, SETTINGS[1], SETTINGS[2])
    scale = _number(parts[1], place, inside, SETTINGS[3])
    return _float8(code, SETTINGS[0]) * scale


@triton.jit
def _tile(n, k, K, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Number of the tile that a weight lies in, in every place."""
    place = (n + k) * 0
    if OUTPUTS > 0:
        place += n // OUTPUTS
    if INPUTS > 0:
        place = place * tl.cdiv(K, INPUTS) + k // INPUTS
    return place


@triton.jit
def integers(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: bits, inputs of a group (0: all), whether there are zero points, and an index of
    groups."""
    BITS: tl.constexpr = SETTINGS[0]
    GROUP: tl.constexpr = SETTINGS[1]
    ZEROS: tl.constexpr = SETTINGS[2]
    SHUFFLED: tl.constexpr = SETTINGS[3]
    groups = K // GROUP if GROUP > 0 else 1
    if SHUFFLED:
        group = tl.load(parts[2 + ZEROS] + k, mask=inside, other=0)
    else:
        group = k // GROUP if GROUP > 0 else k * 0
    words = tl.cdiv(K * BITS, 32)
    difference = _field(parts[0], n * words, 1, k * BITS, inside, BITS)
    if ZEROS:
        # down the outputs
        difference -= _field(parts[2], group, groups, n * BITS, inside, BITS)
    else:
        difference -= 1 << (BITS - 1)
    scale = tl.load(parts[1] + n * groups + group, mask=inside, other=0).to(tl.float32)
    return scale * difference.to(tl.float32)


@triton.jit
def gptq(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: bits, inputs of a group (0: all), whether zero points are stored minus one, and
    whether there is an index of groups."""
    BITS: tl.constexpr = SETTINGS[0]
    GROUP: tl.constexpr = SETTINGS[1]
    if SETTINGS[3]:
        group = tl.load(parts[3] + k, mask=inside, other=0)
    else:
        group = k // GROUP if GROUP > 0 else k * 0
    code = _field(parts[0], n, N, k * BITS, inside, BITS)
    row = group * (N * BITS // 32)  # of words
    if SETTINGS[2] and BITS != 3:  # the one is added to whole words, carry included
        ones: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)
        word = _word(parts[1], row + n * BITS // 32, inside) + ones
        zero = ((word >> (n * BITS % 32).to(tl.uint32)) & ((1 << BITS) - 1)).to(tl.int32)
    else:
        zero = _field(parts[1], row, 1, n * BITS, inside, BITS)
        if SETTINGS[2]:
            zero = (zero + 1) & 7
    scale = tl.load(parts[2] + group * N + n, mask=inside, other=0).to(tl.float32)
    return scale * (code - zero).to(tl.float32)


@triton.jit
def awq(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: inputs of a group (0: all)."""
    group = k // SETTINGS[0] if SETTINGS[0] > 0 else k * 0
    # outputs 0 2 4 6 1 3 5 7 of a word, from its lowest bits on
    shift = ((n % 8 // 2 + n % 2 * 4) * 4).to(tl.uint32)
    code = (_word(parts[0], k * (N // 8) + n // 8, inside) >> shift) & 15
    zero = (_word(parts[1], group * (N // 8) + n // 8, inside) >> shift) & 15
    scale = tl.load(parts[2] + group * N + n, mask=inside, other=0).to(tl.float32)
    return scale * (code.to(tl.int32) - zero.to(tl.int32)).to(tl.float32)


@triton.jit
def _field(pointer, first, step, at, inside, BITS: tl.constexpr):
    """The BITS bits from bit `at` on of words that are `step` items apart, as int32."""
    low = _word(pointer, first + at // 32 * step, inside)
    shift = (at % 32).to(tl.uint32)
    value = low >> shift
    if 32 % BITS != 0:
        high = _word(pointer, first + (at + BITS - 1) // 32 * step, inside)
        # (high << 1) << (31 - bit) is high << (32 - bit) without the undefined shift by 32
        value = value | ((high << 1) << (31 - shift))
    return (value & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def int8(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: outputs and inputs of a tile, 0 for all, whether there are zero points, and the
    factor of all scales."""
    place = _tile(n, k, K, SETTINGS[0], SETTINGS[1])
    code = tl.load(parts[0] + n * K + k, mask=inside, other=0).to(tl.float32)
    if SETTINGS[2]:
        code -= tl.load(parts[2] + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(parts[1] + place, mask=inside, other=0).to(tl.float32)
    return code * scale * SETTINGS[3]


@triton.jit
def table4(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    """SETTINGS: weights of an absmax, of a nested one (0: none), and the offset of nested ones."""
    RUN: tl.constexpr = SETTINGS[0]
    NESTED: tl.constexpr = SETTINGS[1]
    code = _code(parts[0], n * (K // 2) + k // 2, inside) >> (4 - k % 2 * 4)
    place = n * (K // RUN) + k // RUN
    if NESTED > 0:
        found = tl.load(parts[3] + _code(parts[1], place, inside), mask=inside, other=0)
        nested = tl.load(parts[2] + place // NESTED, mask=inside, other=0)
        scale = found * nested + SETTINGS[2]
        value = tl.load(parts[4] + (code & 15), mask=inside, other=0)
    else:
        scale = tl.load(parts[1] + place, mask=inside, other=0)
        value = tl.load(parts[2] + (code & 15), mask=inside, other=0)
    return value * scale


@triton.jit
def _stored_half(pointer, place, inside):
    """The float16 at any byte."""
    low = _code(pointer, place, inside)
    return _half(low | (_code(pointer, place + 1, inside) << 8))


@triton.jit
def q4_0(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    block = (n * (K // 32) + k // 32) * 18
    code = _code(parts[0], block + 2 + k % 16, inside) >> (k % 32 // 16 * 4)
    return _stored_half(parts[0], block, inside) * ((code & 15) - 8).to(tl.float32)


@triton.jit
def q8_0(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    block = (n * (K // 32) + k // 32) * 34
    code = _code(parts[0], block + 2 + k % 32, inside)
    code -= (code & 128) * 2
    return _stored_half(parts[0], block, inside) * code.to(tl.float32)


@triton.jit
def q4_k(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    block = (n * (K // 256) + k // 256) * 144
    group = k % 256 // 32
    code = _code(parts[0], block + 16 + group // 2 * 32 + k % 32, inside) >> (group % 2 * 4)
    # of 6 bits each: the last four's upper two stand behind the first four
    first = _code(parts[0], block + 4 + group % 4, inside)
    second = _code(parts[0], block + 8 + group % 4, inside)
    third = _code(parts[0], block + 12 + group % 4, inside)
    scale = tl.where(group < 4, first & 63, (third & 15) | (first >> 6 << 4)).to(tl.float32)
    least = tl.where(group < 4, second & 63, (third >> 4) | (second >> 6 << 4)).to(tl.float32)
    scale = _stored_half(parts[0], block, inside) * scale
    least = _stored_half(parts[0], block + 2, inside) * least
    return scale * (code & 15).to(tl.float32) - least


@triton.jit
def q6_k(parts, n, k, inside, K, N, SETTINGS: tl.constexpr):
    block = (n * (K // 256) + k // 256) * 210
    half = k % 256 // 128
    quarter = k % 128 // 32
    low = _code(parts[0], block + 64 * half + k % 64, inside) >> (quarter // 2 * 4)
    high = _code(parts[0], block + 128 + 32 * half + k % 32, inside) >> (quarter * 2)
    level = ((low & 15) | ((high & 3) << 4)) - 32
    factor = _code(parts[0], block + 192 + k % 256 // 16, inside)
    factor -= (factor & 128) * 2
    scale = _stored_half(parts[0], block + 208, inside) * factor.to(tl.float32)
    return scale * level.to(tl.float32)
