"""Transposed codes of rows for Hopper (Gluon): the kernel `turned_kernel` of fp8_kernels.py, by registers alone.

A thread loads two neighbouring columns of ROWS rows, and stores ROWS codes of each. So a warp reads 128 bytes
of a row at a time, and no byte is exchanged between threads, which takes most of the time in plain Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tmoe.ops.experts.fp8_kernels import po2, size


@gluon.jit
def block_of(base, here, c, j, C, LAST):
    """Columns 128 j to 128 j + 127 of rows; 0 from column C and from block LAST on."""
    column = j * 128 + c
    return gl.load(
        base[:, None] + column[None, :], mask=here[:, None] & ((column < C) & (j < LAST))[None, :], other=0.0
    )


@gluon.jit(do_not_specialize=["capacity"])
def turned_in_registers(
    x, codes, scales, first, order, tiles, capacity, offsets, C, K: gl.constexpr, GATHER: gl.constexpr,
    WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """As turned_kernel. ROWS: 256 / the number of warps."""
    WIDE: gl.constexpr = gl.BlockedLayout([ROWS, 2], [1, 32], [128 // ROWS, 2], [1, 0])
    TALL: gl.constexpr = gl.BlockedLayout([ROWS, 2], [1, 32], [128 // ROWS, 2], [0, 1])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [256 // ROWS], [0])
    p = gl.program_id(0)
    if p < gl.load(tiles):
        e = gl.load(tiles + 4 + p)
        row = gl.load(tiles + 4 + capacity + p)
        end = gl.load(offsets + e + 1)
        r = row + gl.arange(0, 128, layout=LINE)
        source = gl.load(order + r, mask=r < end, other=0) // K if GATHER else r
        source = gl.convert_layout(source, gl.SliceLayout(1, WIDE))
        here = row + gl.arange(0, 128, layout=gl.SliceLayout(1, WIDE)) < end
        c = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))
        base = x + source.to(gl.int64) * C
        begin = gl.program_id(1) * WIDTH
        last = gl.minimum(begin + WIDTH, gl.cdiv(C, 128))
        t = block_of(base, here, c, begin, C, last)
        for j in range(begin, last):
            later = block_of(base, here, c, j + 1, C, last)
            wide = t.to(gl.float32)
            scale, inverse = po2(gl.max(gl.max(size(wide), 0), 0))
            coded = gl.convert_layout(wide * inverse, TALL).to(codes.dtype.element_ty)
            column = j * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, TALL))
            to = codes + column.to(gl.int64)[None, :] * (128 * capacity) + p * 128
            to += gl.arange(0, 128, layout=gl.SliceLayout(1, TALL))[:, None]
            gl.store(to, coded, mask=(column < C)[None, :])
            gl.store(scales + j * capacity + p, scale)
            t = later
        if (begin == 0) & (row == gl.load(offsets + e)):
            gl.store(first + e, p)
