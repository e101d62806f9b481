# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Functions with which Triton kernels read the formats of formats/, a tile of weights at a time.

The public functions all have the same arguments. Each returns the weights of outputs `n` and of the
STEP inputs from `k` on, (outputs, STEP): in DTYPE, or in float32 where that is still to be rounded.
Each word of codes is loaded once, and each scale once for all the inputs of the tile that share it.

A code becomes a number without a conversion: written into the mantissa of a power of two, it is
that number more. Codes that are a few bits further up are so many times as large, which one fused
multiply-add takes back together with the power of two and the zero point, without rounding.

Args:
    parts: pointers to the contiguous tensors of PackedFormat.parts, in that order, then to the
        format's table if it has one. float8 tensors are given as bytes.
    n: (outputs,) indices of outputs, all of them within the weight.
    k: the first input, a multiple of STEP, which divides the inputs.
    K, N: inputs and outputs of the weight.
    SETTINGS: TritonForm.settings of the format, as each function's docstring lists them.
    DTYPE: what the weights will be rounded to.
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
def _bytes(place):
    return tl.load(place).to(tl.int32)


@triton.jit
def _words(place):
    return tl.load(place).to(tl.uint32, bitcast=True)


@triton.jit
def _halves(pointer, place):
    """The float16 that begin at even bytes, as float32; read with the whole word that each is in.

    Whole words alone can be copied while others are computed.
    """
    words = tl.load(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + place // 4)
    return _half(words >> (place % 4 * 8).to(tl.uint32))


@triton.jit
def _scales(place, KIND: tl.constexpr):
    """Items of a tensor of scales, of safetensors' dtype KIND, as float32."""
    if KIND == "U8" or KIND == "F8_E8M0":
        return _power_of_two(_bytes(place))
    elif KIND == "F8_E4M3":
        return _float8(_bytes(place), True)
    else:
        return tl.load(place).to(tl.float32)


@triton.jit
def _inputs(k, GROUP: tl.constexpr, STEP: tl.constexpr):
    """(1, n) inputs of a tile: the first of each group of GROUP (0: all), or else every one."""
    if GROUP == 0 or GROUP % STEP == 0:
        return k + tl.arange(0, 1)[None, :]
    elif STEP % GROUP == 0:
        return k + tl.arange(0, STEP // GROUP)[None, :] * GROUP
    else:
        return k + tl.arange(0, STEP)[None, :]


@triton.jit
def _firsts(k, GROUP: tl.constexpr, STEP: tl.constexpr, EACH: tl.constexpr):
    """Inputs of a tile: the first of each group of GROUP (0: all), or else of every EACH."""
    if GROUP == 0 or GROUP % STEP == 0:
        return k + tl.arange(0, 1)
    elif STEP % GROUP == 0:
        return k + tl.arange(0, STEP // GROUP) * GROUP
    else:
        return k + tl.arange(0, STEP // EACH) * EACH


@triton.jit
def _spread_down(values, ROWS: tl.constexpr):
    """(n, outputs) values, each for its share of ROWS rows: (ROWS, outputs); or (1, outputs)."""
    COUNT: tl.constexpr = values.shape[0]
    if COUNT == 1 or COUNT == ROWS:
        return values
    else:
        wide = tl.broadcast_to(values[:, None, :], (COUNT, ROWS // COUNT, values.shape[1]))
        return tl.reshape(wide, (ROWS, values.shape[1]))


@triton.jit
def _spread(values, STEP: tl.constexpr):
    """(outputs, n) values, each for its share of a tile's STEP inputs: (outputs, STEP)."""
    OUTPUTS: tl.constexpr = values.shape[0]
    COUNT: tl.constexpr = values.shape[1]
    if COUNT == STEP:
        return values
    elif COUNT == 1:
        return tl.broadcast_to(values, (OUTPUTS, STEP))
    else:
        wide = tl.broadcast_to(values[:, :, None], (OUTPUTS, COUNT, STEP // COUNT))
        return tl.reshape(wide, (OUTPUTS, STEP))


@triton.jit
def _joined(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight (A, B) tensors side by side: (A, B, 8)."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (v0.shape[0], v0.shape[1], 8))


@triton.jit
def _number(words, BIT: tl.constexpr, BITS: tl.constexpr, zero):
    """The BITS bits from bit BIT on of words, less zero (float32, broadcast), as float32."""
    UP: tl.constexpr = BIT % 16
    half = words >> 16 if BIT >= 16 else words
    raised = (half & (((1 << BITS) - 1) << UP)) | 0x4B000000
    back = -(zero + 8388608.0 / (1 << UP))
    return tl.fma(raised.to(tl.float32, bitcast=True), 1.0 / (1 << UP), back)


@triton.jit
def _half_numbers(words, UP: tl.constexpr, zero):
    """The 4 bits from bit UP (0 or 4) on of words' lower and upper halves, less zero, as
    float16."""
    raised = (words & (0x000F000F << UP)) | 0x64006400
    low = raised.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (raised >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    share = tl.full(low.shape, 1.0 / (1 << UP), tl.float16)
    back = tl.broadcast_to(-(zero + 1024.0 / (1 << UP)).to(tl.float16), low.shape)
    return tl.fma(low, share, back), tl.fma(high, share, back)


@triton.jit
def _numbers(words, scale, zero, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of 4 or 8 bits of (A, B) words, less zero, times scale, lowest first.

    Args:
        scale: in any float dtype, broadcast to the words.
        zero: likewise, whole numbers.
    Returns:
        (A, B, 32 / BITS)
    """
    if BITS == 8:
        wide = scale.to(tl.float32)
        even = tl.join(wide * _number(words, 0, 8, zero), wide * _number(words, 16, 8, zero))
        odd = tl.join(wide * _number(words, 8, 8, zero), wide * _number(words, 24, 8, zero))
        return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1], 4)).to(DTYPE)
    elif scale.dtype == tl.float16 and scale.dtype == DTYPE:
        # the float32 product of such a scale and such a number is exact, so both round alike
        v0, v4 = _half_numbers(words, 0, zero)
        v1, v5 = _half_numbers(words, 4, zero)
        v2, v6 = _half_numbers(words >> 8, 0, zero)
        v3, v7 = _half_numbers(words >> 8, 4, zero)
        return _joined(
            scale * v0, scale * v1, scale * v2, scale * v3,
            scale * v4, scale * v5, scale * v6, scale * v7,
        )  # fmt: skip
    else:
        wide = scale.to(tl.float32)
        return _joined(
            (wide * _number(words, 0, 4, zero)).to(DTYPE),
            (wide * _number(words, 4, 4, zero)).to(DTYPE),
            (wide * _number(words, 8, 4, zero)).to(DTYPE),
            (wide * _number(words, 12, 4, zero)).to(DTYPE),
            (wide * _number(words, 16, 4, zero)).to(DTYPE),
            (wide * _number(words, 20, 4, zero)).to(DTYPE),
            (wide * _number(words, 24, 4, zero)).to(DTYPE),
            (wide * _number(words, 28, 4, zero)).to(DTYPE),
        )


@triton.jit
def _codes_of_two(words):
    """The sixteen codes of 2 bits of (A, B) words, lowest first: (A, B, 16) int32."""
    quarters = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
    even = tl.join(quarters, quarters >> 4)
    odd = tl.join(quarters >> 2, quarters >> 6)
    return tl.reshape(tl.join(even, odd) & 3, (words.shape[0], words.shape[1], 16)).to(tl.int32)


@triton.jit
def _codes_of_three(place, step):
    """The 32 codes of 3 bits of three words each, `step` apart, of (A, B) places: (A, B, 32)."""
    first, second, third = _words(place), _words(place + step), _words(place + 2 * step)
    # each quarter has eight codes
    even = tl.join(first, (second >> 16) | (third << 16))
    odd = tl.join((first >> 24) | (second << 8), third >> 8)
    quarters = tl.join(even, odd)
    even = tl.join(tl.join(quarters, quarters >> 12), tl.join(quarters >> 6, quarters >> 18))
    odd = tl.join(tl.join(quarters >> 3, quarters >> 15), tl.join(quarters >> 9, quarters >> 21))
    return tl.reshape(tl.join(even, odd) & 7, (place.shape[0], place.shape[1], 32)).to(tl.int32)


@triton.jit
def _bits_at(pointer, first, step, at, BITS: tl.constexpr):
    """The BITS bits from bit `at` on of words that are `step` items apart, as int32."""
    value = _words(pointer + first + at // 32 * step) >> (at % 32).to(tl.uint32)
    if 32 % BITS != 0:
        high = _words(pointer + first + (at + BITS - 1) // 32 * step)
        # (high << 1) << (31 - bit) is high << (32 - bit) without the undefined shift by 32
        value = value | ((high << 1) << (31 - (at % 32).to(tl.uint32)))
    return (value & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def plain(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """A weight that is not packed; no settings."""
    inputs = k + tl.arange(0, STEP)[None, :]
    return tl.load(parts[0] + n[:, None].to(tl.int64) * K + inputs).to(tl.float32)


@triton.jit
def fp4(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: group, dtype of the scales, and how a factor is applied: "", "*" or "/"."""
    GROUP: tl.constexpr = SETTINGS[0]
    KIND: tl.constexpr = SETTINGS[1]
    FACTOR: tl.constexpr = SETTINGS[2]
    row = n[:, None].to(tl.int64)
    packed = _bytes(parts[0] + row * (K // 2) + k // 2 + tl.arange(0, STEP // 2)[None, :])
    code = tl.reshape(tl.join(packed & 15, packed >> 4), (n.shape[0], STEP))
    # as a float16 its exponent is 14 too small
    value = _half(((code & 8) << 12) | ((code & 7) << 9)) * 16384.0
    place = row * (K // GROUP) + _inputs(k, GROUP, STEP) // GROUP
    scale = _scales(parts[1] + place, KIND)
    if FACTOR == "*":
        scale = scale * tl.load(parts[2])
    elif FACTOR == "/":
        scale = tl.div_rn(scale, tl.load(parts[2]) + tl.zeros_like(scale))
    return value * _spread(scale, STEP)


@triton.jit
def fp8(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: whether E4M3, outputs and inputs of a tile, 0 for all, dtype of the scales."""
    E4M3: tl.constexpr = SETTINGS[0]
    OUTPUTS: tl.constexpr = SETTINGS[1]
    INPUTS: tl.constexpr = SETTINGS[2]
    KIND: tl.constexpr = SETTINGS[3]
    code = _bytes(parts[0] + n[:, None].to(tl.int64) * K + k + tl.arange(0, STEP)[None, :])
    scale = _scales(parts[1] + _tile(n, k, K, OUTPUTS, INPUTS, STEP), KIND)
    return _float8(code, E4M3) * _spread(scale, STEP)


@triton.jit
def _tile(n, k, K, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STEP: tl.constexpr):
    """Numbers of the OUTPUTS x INPUTS tiles (0: all) that the weights lie in: (outputs, n)."""
    inputs = _inputs(k, INPUTS, STEP)
    place = n[:, None].to(tl.int64) // OUTPUTS if OUTPUTS > 0 else n[:, None].to(tl.int64) * 0
    if INPUTS > 0:
        return place * tl.cdiv(K, INPUTS) + inputs // INPUTS
    else:
        return place + inputs * 0


@triton.jit
def integers(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: bits, inputs of a group (0: all), whether there are zero points, and an index of
    groups."""
    BITS: tl.constexpr = SETTINGS[0]
    GROUP: tl.constexpr = SETTINGS[1]
    ZEROS: tl.constexpr = SETTINGS[2]
    EACH: tl.constexpr = 32 // BITS
    row = n[:, None].to(tl.int64)
    words = tl.cdiv(K * BITS, 32)
    groups = K // GROUP if GROUP > 0 else 1
    if (BITS == 4 or BITS == 8) and not SETTINGS[3] and GROUP % EACH == 0:
        word = _words(parts[0] + row * words + k // EACH + tl.arange(0, STEP // EACH)[None, :])
        group = _firsts(k, GROUP, STEP, EACH)[None, :] // GROUP if GROUP > 0 else 0
        scale = _spread(tl.load(parts[1] + row * groups + group), STEP // EACH)
        if ZEROS:  # down the outputs
            zero = _bits_at(parts[2], group, groups, n[:, None] * BITS, BITS).to(tl.float32)
            found = _numbers(word, scale, _spread(zero, STEP // EACH), BITS, DTYPE)
        else:
            found = _numbers(word, scale, tl.full((1, 1), 1 << (BITS - 1), tl.float32), BITS, DTYPE)
        return tl.reshape(found, (n.shape[0], STEP))
    else:
        return _integers_by_code(parts, n, k, K, BITS, GROUP, ZEROS, SETTINGS[3], STEP)


@triton.jit
def _integers_by_code(
    parts, n, k, K, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    SHUFFLED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Codes of other than 4 or 8 bits, or with an index of groups."""
    row = n[:, None].to(tl.int64)
    words = tl.cdiv(K * BITS, 32)
    groups = K // GROUP if GROUP > 0 else 1
    if BITS == 3:
        place = parts[0] + row * words + (k // 32 + tl.arange(0, STEP // 32)[None, :]) * 3
        code = tl.reshape(_codes_of_three(place, 1), (n.shape[0], STEP))
    else:
        bit = (k + tl.arange(0, STEP)[None, :]) * BITS
        code = _bits_at(parts[0], row * words, 1, bit, BITS)
    if SHUFFLED:
        group = tl.load(parts[2 + ZEROS] + k + tl.arange(0, STEP)[None, :])
    else:
        group = _inputs(k, GROUP, STEP) // GROUP if GROUP > 0 else _inputs(k, 0, STEP) * 0
    if ZEROS:
        zero = _bits_at(parts[2], group, groups, n[:, None] * BITS, BITS)
        code -= _spread(zero, STEP)
    else:
        code -= 1 << (BITS - 1)
    scale = tl.load(parts[1] + row * groups + group).to(tl.float32)
    return _spread(scale, STEP) * code.to(tl.float32)


@triton.jit
def _gptq_zero(pointer, row, n, BITS: tl.constexpr, MINUS_ONE: tl.constexpr):
    """Zero points of outputs `n` in rows of words that begin at `row`, as int32."""
    if MINUS_ONE and BITS != 3:  # the one is added to whole words, carry included
        ones: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)
        word = _words(pointer + row + n * BITS // 32) + ones
        return ((word >> (n * BITS % 32).to(tl.uint32)) & ((1 << BITS) - 1)).to(tl.int32)
    else:
        return (_bits_at(pointer, row, 1, n * BITS, BITS) + MINUS_ONE) & ((1 << BITS) - 1)


@triton.jit
def gptq(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: bits, inputs of a group (0: all), whether zero points are stored minus one, and
    whether there is an index of groups."""
    BITS: tl.constexpr = SETTINGS[0]
    GROUP: tl.constexpr = SETTINGS[1]
    MINUS_ONE: tl.constexpr = SETTINGS[2]
    EACH: tl.constexpr = 32 // BITS
    if (BITS == 4 or BITS == 8) and not SETTINGS[3] and GROUP % EACH == 0:
        row = k // EACH + tl.arange(0, STEP // EACH)[:, None]
        words = _words(parts[0] + row * N + n[None, :])
        group = _firsts(k, GROUP, STEP, EACH)[:, None] // GROUP if GROUP > 0 else n[None, :] * 0
        zero = _gptq_zero(parts[1], group * (N // EACH), n[None, :], BITS, MINUS_ONE)
        scale = _spread_down(tl.load(parts[2] + group * N + n[None, :]), STEP // EACH)
        zero = _spread_down(zero.to(tl.float32), STEP // EACH)
        found = tl.permute(_numbers(words, scale, zero, BITS, DTYPE), (0, 2, 1))
        return tl.trans(tl.reshape(found, (STEP, n.shape[0])))
    else:
        return _gptq_by_code(parts, n, k, N, BITS, GROUP, MINUS_ONE, SETTINGS[3], STEP)


@triton.jit
def _gptq_by_code(
    parts, n, k, N, BITS: tl.constexpr, GROUP: tl.constexpr, MINUS_ONE: tl.constexpr,
    SHUFFLED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Codes of 2 or 3 bits, or with an index of groups."""
    EACH: tl.constexpr = 32 // BITS
    if BITS == 3:
        row = (k // 32 + tl.arange(0, STEP // 32)[:, None]) * 3
        found = _codes_of_three(parts[0] + row * N + n[None, :], N)
    elif BITS == 2:
        row = k // 16 + tl.arange(0, STEP // 16)[:, None]
        found = _codes_of_two(_words(parts[0] + row * N + n[None, :]))
    else:
        row = k // EACH + tl.arange(0, STEP // EACH)[:, None]
        words = _words(parts[0] + row * N + n[None, :])
        one = tl.full((1, 1), 1.0, tl.float32)
        found = _numbers(words, one, one * 0.0, BITS, tl.float32).to(tl.int32)
    code = tl.trans(tl.reshape(tl.permute(found, (0, 2, 1)), (STEP, n.shape[0])))
    if SHUFFLED:
        group = tl.load(parts[3] + k + tl.arange(0, STEP)[None, :])
    else:
        group = _inputs(k, GROUP, STEP) // GROUP if GROUP > 0 else _inputs(k, 0, STEP) * 0
    zero = _gptq_zero(parts[1], group * (N * BITS // 32), n[:, None], BITS, MINUS_ONE)
    scale = tl.load(parts[2] + group * N + n[:, None]).to(tl.float32)
    return _spread(scale, STEP) * (code - _spread(zero, STEP)).to(tl.float32)


@triton.jit
def awq(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: inputs of a group (0: all).

    A word has the codes of eight outputs, so `n` begins at a multiple of 8 and has no gap, but that
    0 follows the last output.
    """
    GROUP: tl.constexpr = SETTINGS[0]
    column = tl.min(tl.reshape(n, (n.shape[0] // 8, 8)), axis=1) // 8
    row = k + tl.arange(0, STEP)[:, None]
    code = _awq_order(_words(parts[0] + row * (N // 8) + column[None, :]))
    group = (
        _firsts(k, GROUP, STEP, 1)[:, None] // GROUP if GROUP > 0 else tl.zeros((1, 1), tl.int32)
    )
    zero = _awq_order(_words(parts[1] + group * (N // 8) + column[None, :]))
    scale = tl.load(parts[2] + group * N + n[None, :])
    difference = code - _spread_down(zero, STEP)
    if scale.dtype == tl.float16 and scale.dtype == DTYPE:
        found = _spread_down(scale, STEP) * difference
    else:
        found = _spread_down(scale.to(tl.float32), STEP) * difference.to(tl.float32)
    return tl.trans(found)


@triton.jit
def _awq_order(words):
    """(A, B) words as (A, 8 * B) float16 codes: outputs 0 2 4 6 1 3 5 7 from a word's bit 0 on."""
    nothing = tl.zeros((1, 1), tl.float32)
    v0, v1 = _half_numbers(words, 0, nothing)
    v2, v3 = _half_numbers(words, 4, nothing)
    v4, v5 = _half_numbers(words >> 8, 0, nothing)
    v6, v7 = _half_numbers(words >> 8, 4, nothing)
    found = _joined(v0, v1, v2, v3, v4, v5, v6, v7)
    return tl.reshape(found, (words.shape[0], words.shape[1] * 8))


@triton.jit
def int8(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: outputs and inputs of a tile, 0 for all, whether there are zero points, and the
    factor of all scales."""
    row = n[:, None].to(tl.int64)
    code = tl.load(parts[0] + row * K + k + tl.arange(0, STEP)[None, :]).to(tl.float32)
    OUTPUTS: tl.constexpr = SETTINGS[0]
    INPUTS: tl.constexpr = SETTINGS[1]
    place = _tile(n, k, K, OUTPUTS, INPUTS, STEP)
    if SETTINGS[2]:
        code -= _spread(tl.load(parts[2] + place).to(tl.float32), STEP)
    scale = tl.load(parts[1] + place).to(tl.float32)
    return code * _spread(scale, STEP) * SETTINGS[3]


@triton.jit
def table4(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: weights of an absmax, of a nested one (0: none), and the offset of nested ones."""
    RUN: tl.constexpr = SETTINGS[0]
    NESTED: tl.constexpr = SETTINGS[1]
    row = n[:, None].to(tl.int64)
    packed = _bytes(parts[0] + row * (K // 2) + k // 2 + tl.arange(0, STEP // 2)[None, :])
    code = tl.reshape(tl.join(packed >> 4, packed & 15), (n.shape[0], STEP))
    place = row * (K // RUN) + _inputs(k, RUN, STEP) // RUN
    if NESTED > 0:
        found = tl.load(parts[3] + _bytes(parts[1] + place))
        scale = found * tl.load(parts[2] + place // NESTED) + SETTINGS[2]
        value = _looked_up(parts[4], code)
    else:
        scale = tl.load(parts[1] + place)
        value = _looked_up(parts[2], code)
    return value * _spread(scale, STEP)


@triton.jit
def _looked_up(table, code):
    """The float32 of a table of 16 for each of (A, B) codes."""
    row = tl.load(table + tl.arange(0, 16))[None, :]
    return tl.gather(tl.broadcast_to(row, (code.shape[0], 16)), code, axis=1)


@triton.jit
def _unaligned(pointer, first, COUNT: tl.constexpr):
    """COUNT words from each of (outputs, blocks) even bytes on: (outputs, blocks, COUNT).

    They are put together from whole words, see `_halves`.
    """
    words = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
    apart = (first % 4 // 2)[:, :, None]
    place = words + (first // 4)[:, :, None] + tl.arange(0, COUNT)[None, None, :]
    shift = (apart * 16).to(tl.uint32)
    # (high << 1) << (31 - shift) is high << (32 - shift) without the undefined shift by 32
    return (tl.load(place) >> shift) | ((tl.load(place + apart) << 1) << (31 - shift))


@triton.jit
def _by_byte(words, scale, zero, UP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The BITS bits from bit UP on of each byte of words, less zero, times scale: (*words, 2, 2).

    Args:
        scale: float32, broadcast to the words.
        zero: a whole number.
    """
    v0 = (scale * _number(words, UP, BITS, zero)).to(DTYPE)
    v1 = (scale * _number(words, UP + 8, BITS, zero)).to(DTYPE)
    v2 = (scale * _number(words, UP + 16, BITS, zero)).to(DTYPE)
    v3 = (scale * _number(words, UP + 24, BITS, zero)).to(DTYPE)
    return tl.join(tl.join(v0, v2), tl.join(v1, v3))


@triton.jit
def _byte_pairs(pointer, place):
    """Two bytes from each even byte of (A, B) on, as int32: (A, 2 * B)."""
    pairs = tl.load(pointer.to(tl.pointer_type(tl.uint16), bitcast=True) + place // 2).to(tl.int32)
    return tl.reshape(tl.join(pairs & 255, pairs >> 8), (pairs.shape[0], pairs.shape[1] * 2))


@triton.jit
def q4_0(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """No settings; STEP is a multiple of 32, as of all formats from here on."""
    block = (n[:, None].to(tl.int64) * (K // 32) + _inputs(k, 32, STEP) // 32) * 18
    place = (block + 2)[:, :, None] + 2 * tl.arange(0, 8)[None, None, :]
    packed = _byte_pairs(parts[0], tl.reshape(place, (n.shape[0], STEP // 4)))
    packed = tl.reshape(packed, (n.shape[0], STEP // 32, 16))
    code = tl.permute(tl.join(packed & 15, packed >> 4), (0, 1, 3, 2))
    code = tl.reshape(code, (n.shape[0], STEP)) - 8
    return _spread(_halves(parts[0], block), STEP) * code.to(tl.float32)


@triton.jit
def q8_0(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    block = (n[:, None].to(tl.int64) * (K // 32) + _inputs(k, 32, STEP) // 32) * 34
    words = _unaligned(parts[0], block + 2, 8) ^ 0x80808080
    scale = _halves(parts[0], block)[:, :, None]
    return tl.reshape(_by_byte(words, scale, 128.0, 0, 8, DTYPE), (n.shape[0], STEP))


@triton.jit
def q4_k(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """STEP is 64: the lower nibbles of 32 bytes, then the upper ones."""
    block = (n[:, None].to(tl.int64) * (K // 256) + k // 256) * 144
    quarter = k % 256 // 64  # times a constant, so that the compiler knows what divides places
    packed = _bytes(parts[0] + block + 16 + 32 * quarter + tl.arange(0, 32)[None, :])
    group = 2 * quarter
    header = parts[0].to(tl.pointer_type(tl.uint32), bitcast=True) + block // 4
    both, first = tl.load(header), tl.load(header + 1)
    second, third = tl.load(header + 2), tl.load(header + 3)
    scale, least = _scale_and_minimum(both, first, second, third, group)
    lower = (scale * (packed & 15).to(tl.float32) - least).to(DTYPE)
    scale, least = _scale_and_minimum(both, first, second, third, group + 1)
    upper = (scale * (packed >> 4).to(tl.float32) - least).to(DTYPE)
    return tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (n.shape[0], STEP))


@triton.jit
def _scale_and_minimum(both, first, second, third, group):
    """Of a group of Q4_K, from the four words of its block's header, as float32."""
    byte = (group % 4 * 8).to(tl.uint32)
    if group < 4:
        scale, least = (first >> byte) & 63, (second >> byte) & 63
    else:  # the upper two bits of the last four stand behind the first four
        code = third >> byte
        scale = (code & 15) | ((first >> byte) >> 2 & 48)
        least = (code >> 4 & 15) | ((second >> byte) >> 2 & 48)
    scale, least = scale.to(tl.int32).to(tl.float32), least.to(tl.int32).to(tl.float32)
    return _half(both) * scale, _half(both >> 16) * least


@triton.jit
def q4_0_apart(
    parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Of each output all codes, then all scales; see formats.ggml.Apart."""
    row = n[:, None].to(tl.int64) * tl.multiple_of(K // 32 * 18, 16)
    words = parts[0].to(tl.pointer_type(tl.uint32), bitcast=True)
    word = tl.load(words + row // 4 + k // 8 + tl.arange(0, STEP // 8)[None, :])
    word = tl.reshape(word, (n.shape[0], STEP // 32, 4))
    scales = (parts[0] + K // 2).to(tl.pointer_type(tl.float16), bitcast=True)
    scale = tl.load(scales + row // 2 + _inputs(k, 32, STEP) // 32).to(tl.float32)[:, :, None]
    lower = _by_byte(word, scale, 8.0, 0, 4, DTYPE)
    upper = _by_byte(word, scale, 8.0, 4, 4, DTYPE)
    lower = tl.reshape(lower, (n.shape[0], STEP // 32, 16))
    upper = tl.reshape(upper, (n.shape[0], STEP // 32, 16))
    return tl.reshape(tl.permute(tl.join(lower, upper), (0, 1, 3, 2)), (n.shape[0], STEP))


@triton.jit
def q8_0_apart(
    parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Of each output all codes, then all scales; see formats.ggml.Apart."""
    row = n[:, None].to(tl.int64) * tl.multiple_of(K // 32 * 34, 16)
    codes = parts[0].to(tl.pointer_type(tl.int8), bitcast=True)
    code = tl.load(codes + row + k + tl.arange(0, STEP)[None, :]).to(tl.float32)
    scales = (parts[0] + K).to(tl.pointer_type(tl.float16), bitcast=True)
    scale = tl.load(scales + row // 2 + _inputs(k, 32, STEP) // 32).to(tl.float32)
    return code * _spread(scale, STEP)


@triton.jit
def q6_k(parts, n, k, K, N, SETTINGS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr):
    """SETTINGS: whether blocks are taken apart, see formats.ggml.Apart. STEP is 64: two of the four
    runs of 32 codes that share 32 bytes of upper bits."""
    half = k % 256 // 128
    upper = k % 128 // 64
    if SETTINGS[0]:
        row = n[:, None].to(tl.int64) * tl.multiple_of(K // 256 * 210, 16)
        low = _bytes(parts[0] + row + k // 128 * 64 + tl.arange(0, 64)[None, :])
        high = _bytes(parts[0] + K // 2 + row + k // 128 * 32 + tl.arange(0, 32)[None, :])
        factor = _bytes(parts[0] + K // 4 * 3 + row + k // 16 + tl.arange(0, 4)[None, :])
        scales = (parts[0] + K // 16 * 13).to(tl.pointer_type(tl.float16), bitcast=True)
        scale = tl.load(scales + row // 2 + k // 256).to(tl.float32)
    else:
        block = (n[:, None].to(tl.int64) * (K // 256) + k // 256) * 210
        low = _byte_pairs(parts[0], block + 64 * half + 2 * tl.arange(0, 32)[None, :])
        high = _byte_pairs(parts[0], block + 128 + 32 * half + 2 * tl.arange(0, 16)[None, :])
        factor = _bytes(parts[0] + block + 192 + k % 256 // 16 + tl.arange(0, 4)[None, :])
        scale = _halves(parts[0], block + 208)
    high = high >> (4 * upper)
    high = tl.permute(tl.join(high & 3, (high >> 2) & 3), (0, 2, 1))
    code = (low >> (4 * upper) & 15) | (tl.reshape(high, (n.shape[0], STEP)) << 4)
    factor -= (factor & 128) * 2
    return _spread(scale * factor.to(tl.float32), STEP) * (code - 32).to(tl.float32)
