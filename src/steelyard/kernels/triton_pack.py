"""Quantize and pack with Triton: each weight is read once, each word written once.

A tile is (rows, words, codes of a word). Codes of a word are shifted into place and added: their
bits do not overlap. A code of 3, 5, 6 or 7 bits may lie in two words, and is computed for both.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from steelyard.kernels.compiled import SCALE_TYPES
from steelyard.kernels.triton_codes import CodeFormat, bits_of, code_of, held, widened
from steelyard.kernels.triton_launch import launch, next_power

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["pack", "pack_kernel"]

_WORDS, _NIBBLES = 0, 2  # layouts, as in kernels/pack.py; 1 stores a byte per weight
_ELEMENTS = 1024  # weights of a tile
_ROWS = 4


@triton.jit
def _float_code(magnitude, sign, BITS: tl.constexpr):
    """Return the bits of an E4M3 or E2M1 number, given its magnitude and the bits of its sign."""
    bits = bits_of(magnitude)
    if BITS == 8:
        code = tl.where(magnitude < 2.0**-6, (magnitude * 512.0).to(tl.int32), (bits >> 20) - 960)
        return code | ((sign >> 24) & 0x80)
    else:
        code = tl.where(magnitude < 1.0, (magnitude * 2.0).to(tl.int32), (bits >> 22) - 252)
        return code | ((sign >> 28) & 0x8)


@triton.jit
def pack_kernel(
    weight,
    scales,
    zero_points,
    divisor,
    out,
    errors,
    rows,
    columns,
    words,
    row_stride,
    column_stride,
    block_rows,
    block_columns,
    blocks,
    F: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    CODES: tl.constexpr,
    QUOTIENT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SHIFT: tl.constexpr,
    STORE: tl.constexpr,
    ERRORS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write the words of some rows, and the squared error of each row.

    UNIT:     bits of a word: 32, or 8
    CODES:    codes that are looked at for a word, a power of two
    QUOTIENT: the type that quotients are rounded to, as in SCALE_TYPES
    SHIFT:    log2 of block_columns, or -1
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    line = row.to(tl.int64) * row_stride
    scale_line = (row // block_rows) * blocks
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        # the first column with bits in the word
        column = ((word * UNIT) // BITS)[:, None] + tl.arange(0, CODES)[None, :]
        shift = column * BITS - (word * UNIT)[:, None]
        inside = (column < columns) & (shift < UNIT) & (word < words)[:, None]
        there = known[:, None, None] & inside[None, :, :]
        place = line[:, None, None] + (column * column_stride)[None, :, :]
        x = widened(tl.load(weight + place, mask=there, other=0.0))
        block = column >> SHIFT if SHIFT >= 0 else column // block_columns
        which = scale_line[:, None, None] + block[None, :, :]
        scale = tl.load(scales + which, mask=there, other=1.0)
        if F.has_global:
            scale = tl.div_rn(scale, tl.load(divisor) + tl.zeros_like(scale))
        y = tl.div_rn(x, scale)
        if QUOTIENT != 0:
            y = held(y, QUOTIENT)
        zero = 0.0
        if HAS_ZERO:
            zero = tl.load(zero_points + which, mask=there, other=0.0)
            y = y + zero
            if QUOTIENT != 0:
                y = held(y, QUOTIENT)
        code = code_of(y, F)
        if ERRORS:
            difference = tl.where(there, (code - zero) * scale - x, 0.0)
            if CODES * BITS > UNIT:  # a code in two words counts in the one where it begins
                difference = tl.where(shift[None, :, :] >= 0, difference, 0.0)
            difference = difference.to(tl.float64)
            total += tl.sum(tl.sum(difference * difference, 2), 1)
        if STORE:
            if F.is_int and UNIT == 32:
                stored = code.to(tl.int32) + (1 << (BITS - 1))
            elif F.is_int:
                stored = code.to(tl.int32) & 0xFF
            else:
                stored = _float_code(tl.abs(code), bits_of(y), BITS)
            stored = tl.where(there, stored, 0)
            left = tl.minimum(tl.maximum(shift, 0), UNIT - 1)[None, :, :]
            bits = (stored << left) >> tl.maximum(-shift, 0)[None, :, :]
            packed = tl.sum(bits, 2)
            at = row.to(tl.int64)[:, None] * words + word[None, :]
            tl.store(out + at, packed, mask=known[:, None] & (word < words)[None, :])
    if ERRORS:
        tl.store(errors + row, total, mask=known)


def pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
    block: tuple[int, int],
    layout: int,
    round_quotient: bool,
    out: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> None:
    """As `kernels.compiled.pack`; `errors` may be on another device."""
    weight = weight.detach()
    row_errors = None
    if errors is not None:
        row_errors = torch.empty(len(weight), dtype=torch.float64, device=weight.device)
    rows, columns = weight.shape
    bits, unit = args.num_bits, 32 if layout == _WORDS else 8
    if layout not in (_WORDS, _NIBBLES):
        bits = 8  # one weight to a byte, however few bits its code has
    words = -(-columns * bits // unit)
    codes = unit // bits if unit % bits == 0 else next_power(unit // bits + 2)
    target = out
    if out is not None:
        target = out.view(torch.int32) if layout == _WORDS else out
    wide = min(next_power(words), _ELEMENTS // codes)
    high = min(next_power(rows), max(1, _ELEMENTS // (wide * codes)), _ROWS)
    height, width = block
    launch(
        pack_kernel,
        (-(-rows // high),),
        weight,
        weight,
        scale.detach().to(torch.float32).contiguous(),
        None if zero_point is None else zero_point.to(torch.float32).contiguous(),
        None if global_scale is None else global_scale.to(torch.float32),
        target,
        row_errors,
        rows,
        columns,
        words,
        *weight.stride(),
        height,
        width,
        -(-columns // width),
        F=CodeFormat.of(args, torch.float32, global_scale is not None),
        BITS=bits,
        UNIT=unit,
        CODES=codes,
        QUOTIENT=SCALE_TYPES[weight.dtype if round_quotient else torch.float32],
        HAS_ZERO=zero_point is not None,
        SHIFT=width.bit_length() - 1 if width & (width - 1) == 0 else -1,
        STORE=out is not None,
        ERRORS=row_errors is not None,
        ROWS=high,
        WORDS=wide,
        num_warps=4,
    )
    if errors is not None and row_errors is not None:
        errors.copy_(row_errors)
