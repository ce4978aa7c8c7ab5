"""Oracles and inputs that several tests share."""

import numpy as np
import torch

import data


def random_rows(n_rows, seq_len, vocab_size, seed=0, ignored=0.3):
    """Packed rows as data.py stores them: random documents, some tokens not learned."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, vocab_size, (n_rows, seq_len + 1), dtype=np.uint32)
    starts = rng.random(rows.shape) < 8 / seq_len
    starts[:, 0], starts[:, -1] = True, False
    learn = (rng.random(rows.shape) > ignored) & ~starts
    return rows | np.where(starts, data.START, 0).astype(np.uint32) | np.where(learn, data.LEARN, 0).astype(np.uint32)


def random_batch(batch_size, seq_len, vocab_size, seed=0, ignored=0.3):
    return data.Batch.from_rows(random_rows(batch_size, seq_len, vocab_size, seed, ignored))


def naive_attention(q, k, v, borders):
    """One document and one head at a time, softmax written out. q [B, T, H, D], k and v [B, T, K, D]."""
    B, T, H, D = q.shape
    flat = [t.reshape(B * T, t.size(2), D) for t in (q, k, v)]
    out = []
    for a, b in zip(borders.tolist()[:-1], borders.tolist()[1:]):
        heads = []
        for h in range(H):
            group = h // (H // k.size(2))
            scores = flat[0][a:b, h] @ flat[1][a:b, group].T / D ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            heads.append(scores.softmax(-1) @ flat[2][a:b, group])
        out.append(torch.stack(heads, 1))
    return torch.cat(out).view(B, T, H, D)
