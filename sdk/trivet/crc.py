"""CRC-32C (Castagnoli, reflected, as in iSCSI) of big buffers with numpy: many lanes at once, combined at the end."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

POLY = 0x82F63B78
LANES = 8192
BLOCK = 1 << 22  # bytes handled at once, small enough for the cache
U32 = np.ndarray[Any, np.dtype[np.uint32]]


@cache
def _tables() -> list[U32]:
    """Table k, entry b: what byte b, followed by k zero bytes, adds to the register."""
    t = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        t = np.where(t & 1, (t >> 1) ^ np.uint32(POLY), t >> 1).astype(np.uint32)
    out = [t]
    for _ in range(3):
        out.append(t[out[-1] & 0xFF] ^ (out[-1] >> np.uint32(8)))
    return out


@cache
def _pairs() -> tuple[U32, U32]:
    """The same for 16 bits at a time: the low and the high half of a word."""
    t = _tables()
    i = np.arange(65536, dtype=np.uint32)
    return t[3][i & 0xFF] ^ t[2][i >> 8], t[1][i & 0xFF] ^ t[0][i >> 8]


def _apply(op: U32, x: U32) -> U32:
    """The linear operator op (column per bit) applied to registers."""
    out = np.zeros_like(x)
    for bit in range(32):
        out ^= np.where((x >> np.uint32(bit)) & np.uint32(1), op[bit], np.uint32(0)).astype(np.uint32)
    return out


@cache
def _power(k: int) -> U32:
    """Operator of 2**k zero bytes."""
    if k == 0:
        x = np.uint32(1) << np.arange(32, dtype=np.uint32)
        one: U32 = _tables()[0][x & 0xFF] ^ (x >> np.uint32(8))
        return one
    half = _power(k - 1)
    return _apply(half, half)


@cache
def _zeros(n: int) -> U32:
    """Operator of n zero bytes."""
    op: U32 = (np.uint32(1) << np.arange(32, dtype=np.uint32)).astype(np.uint32)
    for k in range(n.bit_length()):
        if n >> k & 1:
            op = _apply(_power(k), op)
    return op


def _lanes(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Register (start 0, no final xor) of a block whose size is a multiple of 4 * LANES."""
    words = np.ascontiguousarray(data.view("<u4").reshape(LANES, -1).T)
    low, high = _pairs()
    reg = np.zeros(LANES, np.uint32)
    for row in words:
        reg ^= row
        reg = low[reg & np.uint32(0xFFFF)] ^ high[reg >> np.uint32(16)]
    size = data.size // LANES
    while reg.size > 1:
        reg = _apply(_zeros(size), reg[0::2]) ^ reg[1::2]
        size *= 2
    return int(reg[0])


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a buffer; crc: that of the bytes before it, to go on from.

    Args:
        data: bytes, or anything with the buffer protocol and contiguous memory.
        crc: result for the preceding bytes.

    Returns:
        The CRC as an unsigned 32-bit number.
    """
    view = np.frombuffer(data, np.uint8)
    reg = crc ^ 0xFFFFFFFF
    at = 0
    while view.size - at >= 4 * LANES:
        n = min(BLOCK, (view.size - at) // (4 * LANES) * (4 * LANES))
        # one operator for whole blocks, one for the last: _zeros is cached
        reg = int(_apply(_zeros(n), np.array([reg], np.uint32))[0]) ^ _lanes(view[at : at + n])
        at += n
    table = _byte_table()
    for b in view[at:].tobytes():
        reg = table[(reg ^ b) & 0xFF] ^ (reg >> 8)
    return reg ^ 0xFFFFFFFF


@cache
def _byte_table() -> list[int]:
    return [int(v) for v in _tables()[0]]
