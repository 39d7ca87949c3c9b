"""Counter-based random numbers in plain PyTorch, equal to those of the kernels.

Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011). The counter of an edge is (id, id >> 32, head, 0), the key is the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
# Numbers in one go: on the CPU the words of a block stay in cache.
BLOCK = {"cpu": 1 << 15}
_BLOCK_ELSEWHERE = 1 << 24
_WORD = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)


def kept(seed: Tensor, num_ids: int, heads: int, p: float) -> Tensor:
    """Which (edge id, head) pairs dropout keeps, ``[num_ids, heads]`` bool.

    Args:
        seed: One int64.
        num_ids: Ids from 0 on.
        heads: Heads.
        p: Probability of dropping; 1 keeps nothing.
    """
    out = torch.empty(num_ids, heads, dtype=torch.bool, device=seed.device)
    head = torch.arange(heads, device=seed.device).unsqueeze(0)  # [1, H]
    step = max(BLOCK.get(seed.device.type, _BLOCK_ELSEWHERE) // max(heads, 1), 1)
    for start in range(0, num_ids, step):
        rows = out[start : start + step]
        edge_id = torch.arange(start, start + rows.size(0), device=seed.device)
        word = _first_word(edge_id.unsqueeze(1), head, seed.view(()))
        torch.ge((word >> 8).to(torch.float32) * 2.0**-24, p, out=rows)
    return out


def _first_word(edge_id: Tensor, head: Tensor, seed: Tensor) -> Tensor:
    """First word ``[n, H]`` of ids ``[n, 1]`` and heads ``[1, H]``.

    Words that depend on one of the two alone keep its shape.
    """
    c0, c1, c2, c3 = edge_id & _WORD, edge_id >> 32, head, torch.zeros_like(head[:, :1])
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS - 1):
        high0, low0 = _multiply(_FACTORS[0], c0)
        high1, low1 = _multiply(_FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return _multiply(_FACTORS[1], c2)[0] ^ c1 ^ k0


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 64-bit product, without overflowing a signed one."""
    # The factors have their highest bit: less 2^32 they fit in 31, and a sign.
    product = word * (factor - (1 << 32))
    return (product >> 32) + word, product & _WORD
