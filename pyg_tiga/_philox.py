"""Counter-based random numbers in plain PyTorch, equal to those of the kernels.

Philox-4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011). The counter of an edge is (id, id >> 32, head, 0), the key is the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
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
    edge_id = torch.arange(num_ids, device=seed.device).unsqueeze(1)
    head = torch.arange(heads, device=seed.device).unsqueeze(0)
    zero = torch.zeros_like(edge_id + head)
    words = [edge_id & _WORD, edge_id >> 32, head, zero]
    counter = [word + zero for word in words]
    uniform = (_first_word(counter, seed.view(())) >> 8).to(torch.float32) * 2.0**-24
    return uniform >= p


def _first_word(counter: list[Tensor], seed: Tensor) -> Tensor:
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        high0, low0 = _multiply(_FACTORS[0], c0)
        high1, low1 = _multiply(_FACTORS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return c0


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 64-bit product, without overflowing a signed one."""
    low = factor * (word & 0xFFFF)
    high = factor * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
