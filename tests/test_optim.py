"""python -m pytest tests/test_optim.py"""

import torch

import optim


def test_schedule_values():
    want = [0.2, 0.4, 0.6, 0.8, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    got = [optim.schedule(s, 10, 4, 1.0, 0.0, "cosine") for s in range(11)]
    assert all(abs(a - b) < 1e-3 for a, b in zip(got, want)), got


def test_zero_is_quantized_exactly():
    x = torch.randn(4, 256)
    x[:, ::3] = 0
    codes, scale = optim.quantize(x, signed=True)
    assert (optim.dequantize(codes, scale, signed=True)[x == 0] == 0).all()
