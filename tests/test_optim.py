"""python -m pytest tests/test_optim.py"""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model as llama
import offload
import optim
import train
from helpers import random_batch

HERE = os.path.dirname(os.path.abspath(__file__))
paged_on_cpu = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(optimizer, grads, lr=1e-3):
    """One step in which the parameters receive exactly these gradients."""
    optimizer.begin(lr)
    torch.autograd.backward(list(optimizer.names), [g.clone() for g in grads])
    return optimizer.finish()


def one(value, make=optim.Adam8bit, name="w", **settings):
    """A single parameter and its optimizer."""
    p = nn.Parameter(value.clone())
    return p, make([(name, p)], **settings)


def parameters(dtype=torch.float32):
    """All kinds: matrices that fill whole blocks and that do not, a small one, vectors."""
    shapes = {"wide": (80, 256), "odd": (91, 101), "small": (16, 32), "norm": (512,), "long": (16384,)}
    return {name: nn.Parameter(random(*shape, seed=i, dtype=dtype if len(shape) > 1 else torch.float32) * 0.02)
            for i, (name, shape) in enumerate(shapes.items())}


def random_grads(params, seed, scale=1e-2):
    return [random(*p.shape, seed=100 * seed + i, dtype=p.dtype) * scale for i, p in enumerate(params)]


def states(optimizer):
    return {f"{name}|{key}": t.clone() for name, state in optimizer.state() for key, t in state.items()}


def equal(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def distance(a, b):
    return (a.detach().float() - b.detach().float()).norm()


# -----------------------------------------------------------------------------
# learning rate

def rates(max_steps, warmup, lr=1.0, min_lr=0.0, kind="cosine"):
    return [optim.schedule(s, max_steps, warmup, lr, min_lr, kind) for s in range(max_steps + 1)]


def test_the_schedule_has_nanogpts_form():
    want = [0.2, 0.4, 0.6, 0.8, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    assert rates(10, 4) == pytest.approx(want, abs=5e-4)
    assert rates(10, 4, kind="linear") == pytest.approx([0.2, 0.4, 0.6, 0.8, *(1 - i / 6 for i in range(7))])
    assert rates(10, 4, kind="constant") == pytest.approx([0.2, 0.4, 0.6, 0.8] + [1.0] * 7)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 11])
def test_every_update_has_a_positive_rate_whatever_the_warmup(kind, warmup):
    values = rates(10, warmup, kind=kind)[:10]
    assert all(0 < v <= 1 for v in values)
    assert values[:warmup] == pytest.approx([(i + 1) / (warmup + 1) for i in range(min(warmup, 10))])
    assert warmup > 9 or values[warmup] == 1.0


def test_the_rate_ends_at_the_minimum_and_stays_there():
    assert rates(220, 22, 1.0, 0.1)[198] > 0.12
    assert optim.schedule(219, 220, 22, 1.0, 0.1, "cosine") == pytest.approx(0.1, abs=1e-3)
    assert [optim.schedule(s, 220, 22, 1.0, 0.1, "cosine") for s in (220, 300)] == [0.1, 0.1]
    assert optim.schedule(15, 16, 0, 1.0, 0.1, "cosine") == pytest.approx(0.1, abs=0.01)  # the last of 16 updates
    assert set(rates(10, 0, 1e-4, 1e-3)) == {1e-4}  # min_lr above lr counts as lr


# -----------------------------------------------------------------------------
# the whole machinery against plain autograd

def plain_loss(model, batches):
    """The loss of a step by the book."""
    logits = []
    for b in batches:
        x = model.tok_embeddings(b.tokens)
        for block in model.layers:
            x = block(x, model.rope(b.positions), model.documents(b))
        logits.append(model.output(model.norm(x)).flatten(0, 1)[b.index])
    return F.cross_entropy(torch.cat(logits), torch.cat([b.targets for b in batches]))


def plain_adamw(params, lr, weight_decay=0.0, **settings):
    params = list(params)
    groups = [{"params": [p for p in params if (p.dim() >= 2) == matrix], "weight_decay": weight_decay * matrix} for matrix in (True, False)]
    return torch.optim.AdamW(groups, lr=lr, **settings)


def train_both_ways(make_optimizer, tied, steps):
    """(losses, model) with hooks, recompute, offload and micro-batches, (losses, model) of the plain loop, the start."""
    config = llama.ModelConfig(n_layers=2, tie_word_embeddings=tied)
    models = [llama.Llama(config), llama.Llama(config)]
    for model in models:
        model.init_weights(3)
    start = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    batches = [random_batch(2, 32, 512, seed=s) for s in range(4)]
    offloader = offload.ActivationOffload(models[0].parameters(), torch.device("cpu"), ahead_bytes=2 ** 20)
    ours, theirs = make_optimizer(models[0]), plain_adamw(models[1].parameters(), 1e-3, 0.1, betas=(0.9, 0.95), eps=1e-8)
    losses = [], []
    for _ in range(steps):
        loss, norm = train.train_step(models[0], ours, batches, 1e-3, lambda *a: offload.run_layer(*a, offload=offloader), 32)
        losses[0].append(loss)
        theirs.zero_grad()
        loss = plain_loss(models[1], batches)
        loss.backward()
        losses[1].append(loss.item())
        want = torch.nn.utils.get_total_norm([p.grad for p in models[1].parameters()])
        assert norm.item() == pytest.approx(want.item(), rel=0.02)
        theirs.step()
    return (losses[0], models[0]), (losses[1], models[1]), start


@pytest.mark.parametrize("tied", [False, True])
def test_twenty_steps_follow_plain_adamw_within_8_bits(tied):
    def adam8bit(model):
        return optim.Adam8bit(model.named_parameters(), 0.9, 0.95, 1e-8, 0.1)

    (got, ours), (want, theirs), start = train_both_ways(adam8bit, tied, 20)
    assert want[-1] < 0.8 * want[0]
    assert got == pytest.approx(want, rel=1e-3)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        # most codes are less than 3 % off their value, m's and v's alike, and their errors are independent
        assert distance(p, q) < 0.04 * distance(q, start[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_three_steps_with_torchs_adamw_in_the_hooks_equal_plain_ones(tied):
    def adamw(model):
        return optim.StockOptimizer("adamw", model.named_parameters(), 0.9, 0.95, 1e-8, 0.1)

    (got, ours), (want, theirs), start = train_both_ways(adamw, tied, 3)
    assert got == pytest.approx(want, rel=1e-5)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert distance(p, q) < 1e-4 * distance(q, start[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_steps_once_per_update(tied, monkeypatch):
    model = llama.Llama(llama.ModelConfig(n_layers=2, tie_word_embeddings=tied))
    model.init_weights()
    optimizer, stepped = optim.Adam8bit(model.named_parameters()), []
    real = optimizer.update
    monkeypatch.setattr(optimizer, "update", lambda p, grad: stepped.append(optimizer.names[p]) or real(p, grad))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    batches = [random_batch(2, 32, 512, seed=s) for s in range(4)]
    train.train_step(model, optimizer, batches, 1e-3, offload.run_layer, 16)
    assert stepped == [n for n, _ in model.named_parameters()][::-1] and optimizer.steps == 1
    assert all(p.grad is None and not torch.equal(p, before[n]) for n, p in model.named_parameters())


class Gains(nn.Module):
    """The least that run_layer takes: y = x * gain + (x * gain) @ w2.T."""

    def __init__(self):
        super().__init__()
        self.gain, self.feed_forward = nn.Parameter(torch.ones(3)), nn.Module()
        self.feed_forward.w2 = nn.Linear(3, 3, bias=False)
        nn.init.zeros_(self.feed_forward.w2.weight)

    def attended(self, x):
        return x * self.gain

    def hidden(self, h):
        return h * 1


@pytest.mark.parametrize("make", [optim.Adam8bit, lambda named: optim.StockOptimizer("adamw", named)])
@pytest.mark.parametrize("cut", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
def test_accumulated_micro_batches_make_one_adam_step(make, cut):
    block = Gains()
    block.forward = lambda x: block.attended(x) + block.feed_forward.w2(block.hidden(block.attended(x)))
    optimizer = make(list(block.named_parameters()))
    rows = torch.tensor([[1.0, 2, 3], [4, -5, 6], [-7, 8, 9], [1, 0, -1]])
    optimizer.begin(0.1)
    xs = [x[None].requires_grad_() for x in rows.split(cut)]
    sum(y.sum() for y in offload.run_layer(block, xs, [()] * len(xs))).backward()
    optimizer.finish()
    assert block.gain.tolist() == pytest.approx([1.1, 0.9, 0.9], abs=1e-6)
    assert optimizer.steps == 1


@pytest.mark.parametrize("run_layer", [lambda block, xs, contexts: [block(x, *c) for x, c in zip(xs, contexts)], offload.run_layer])
@pytest.mark.parametrize("make", [optim.Adam8bit, lambda named: optim.StockOptimizer("adamw", named)])
def test_a_parameter_without_gradient_is_named(run_layer, make):
    model = llama.Llama(llama.ModelConfig(n_layers=2))
    model.init_weights()
    norm = model.layers[1].ffn_norm
    norm.forward = lambda x: llama.rms_norm(x, norm.weight.detach(), norm.eps)
    with pytest.raises(optim.GradientError, match=r"^no gradient reached layers\.1\.ffn_norm\.weight$"):
        train.train_step(model, make(model.named_parameters()), [random_batch(2, 32, 512)], 1e-3, run_layer, 16)


def test_the_first_gradient_that_is_not_finite_is_named():
    params = parameters()
    optimizer = optim.Adam8bit(params.items())
    grads = random_grads(params.values(), 0)
    step(optimizer, grads)
    assert optimizer.worst() == ""
    grads[1][3, 3] = math.inf
    assert not torch.isfinite(step(optimizer, grads)) and optimizer.worst() == "odd"


@pytest.mark.parametrize("make", [optim.Adam8bit, pytest.param(lambda named: optim.StockOptimizer("bnb_paged_adamw8bit", named), marks=paged_on_cpu)])
def test_from_the_first_gradient_that_is_not_finite_on_nothing_is_updated(make):
    params = {n: torch.nn.Parameter(torch.ones(s)) for n, s in (("low", (64, 256)), ("norm", (64,)), ("bad", (64, 256)), ("high", (64, 256)))}
    optimizer = make(params.items())
    optimizer.begin(1e-3)
    sum((params[n] * (torch.inf if n == "bad" else 1.0)).sum() for n in params).backward()
    assert not torch.isfinite(optimizer.finish())
    moved = {n: not torch.equal(p, torch.ones_like(p)) for n, p in params.items()}
    assert not moved["bad"] and all(torch.isfinite(p).all() for p in params.values()) and not all(moved.values())
    if make is optim.Adam8bit:  # what had begun before it has its step, the rest has not even a moment
        state = dict(optimizer.state())
        assert all(moved[n] == bool((state[n]["m"] if n == "norm" else state[n]["m_scale"]).any()) for n in params)


# -----------------------------------------------------------------------------
# settings

def test_states_of_large_matrices_are_8_bit_and_all_others_fp32():
    params = {"large": torch.zeros(64, 128), "below": torch.zeros(63, 130), "embedding": torch.zeros(512, 64),
              "norm": torch.zeros(4096), "vector": torch.zeros(100_000)}
    optimizer = optim.Adam8bit([(n, nn.Parameter(t)) for n, t in params.items()])
    for name, state in optimizer.state():
        if name in ("large", "embedding"):
            assert {k: t.dtype for k, t in state.items()} == {"m": torch.uint8, "v": torch.uint8, "m_scale": torch.float32, "v_scale": torch.float32}
            assert state["m"].numel() == params[name].numel() and state["m_scale"].numel() == params[name].numel() / 256
        else:
            assert {k: t.dtype for k, t in state.items()} == {"m": torch.float32, "v": torch.float32}
    small = 63 * 130 + 4096 + 100_000
    assert optimizer.memory() == {"host": (64 * 128 + 512 * 64) * (2 + 8 / 256), "device": small * 8}


ODD = train.Config(learning_rate=0.123, beta1=0.7, beta2=0.8, eps=1e-5, weight_decay=0.3, seed=7)


@paged_on_cpu
@pytest.mark.parametrize("kind", ["adamw", "bnb_paged_adamw8bit"])
def test_settings_reach_every_stock_optimizer(kind):
    model = llama.Llama(llama.ModelConfig(n_layers=1))
    model.init_weights()
    optimizer = train.make_optimizer(train.dataclasses.replace(ODD, optimizer=kind), model)
    train.train_step(model, optimizer, [random_batch(2, 32, 512)], 0.123, offload.run_layer, 64)
    for p in model.parameters():
        group, = optimizer.optimizers[p].param_groups
        assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (0.123, (0.7, 0.8), 1e-5, 0.3 * (p.dim() >= 2))


@pytest.mark.parametrize("name, value", {"beta1": 0.5, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.0, "seed": 8, "rounding": "nearest",
                                         "master": "residual", "grad_clip": 1e-3}.items())
def test_each_setting_of_adam8bit_changes_the_weights(name, value):
    def weights(cfg):
        model = llama.Llama(llama.ModelConfig(n_layers=1), torch.bfloat16)
        model.init_weights()
        optimizer = train.make_optimizer(cfg, model)
        for i in range(2):
            train.train_step(model, optimizer, [random_batch(2, 32, 512, seed=i)], 1e-3, offload.run_layer, 64)
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])

    base = train.dataclasses.replace(ODD, dtype="bfloat16")
    assert not torch.equal(weights(base), weights(train.dataclasses.replace(base, **{name: value})))


# -----------------------------------------------------------------------------
# the update: decay, zero gradients, single steps

@pytest.mark.parametrize("shape", [(64, 128), (16, 32)])
@pytest.mark.parametrize("dtype, settings", [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"residual": True})])
def test_weight_decay_shrinks_matrices_and_leaves_vectors(shape, dtype, settings):
    p, norm = nn.Parameter(torch.ones(shape, dtype=dtype)), nn.Parameter(torch.ones(512))
    optimizer = optim.Adam8bit([("w", p), ("norm", norm)], weight_decay=0.1, **settings)
    for _ in range(1000):
        step(optimizer, [torch.zeros_like(p), torch.zeros_like(norm)], lr=1e-3)
    # one stochastic rounding is off by about 0.001, 1000 of them by 0.03 per weight, which the mean of 512 divides by 23
    assert p.float().mean().item() == pytest.approx(0.9048, abs=0.002 if p.numel() > 8000 else 0.006)
    assert (norm == 1).all()


@pytest.mark.parametrize("half", [lambda g: g[:, ::2], lambda g: g[:32]])  # beside others within a block, and blocks of its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_without_gradient_do_not_move(half, dtype):
    start = random(64, 128, dtype=dtype)
    p, optimizer = one(start)
    for _ in range(500):
        g = torch.ones(64, 128, dtype=dtype)
        half(g).zero_()
        step(optimizer, [g])
    assert torch.equal(half(p), half(start))
    assert (p != start).float().mean() == 0.5


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_rows_that_have_gradients_only_now_and_then_follow_adamw(scale):
    """As an embedding's do: where v is small beside its block's largest, m must not be divided by eps."""
    p, optimizer = one(torch.zeros(64, 256))
    q = nn.Parameter(torch.zeros(64, 256))
    reference = torch.optim.AdamW([q], lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    for i in range(40):
        q.grad = random(64, 256, seed=i) * scale * (torch.rand(64, 1, generator=torch.Generator().manual_seed(i)) < 0.2)
        before = p.detach().clone()
        step(optimizer, [q.grad])
        reference.step()
        assert (p - before).abs().max() < 1.1e-3
    assert distance(p, q) < 0.05 * q.norm()


def test_one_step_of_fp32_weights_equals_torchs():
    params, other = parameters(), parameters()
    optimizer, reference = optim.Adam8bit(params.items(), weight_decay=0.1), plain_adamw(other.values(), 1e-3, 0.1, betas=(0.9, 0.95))
    grads = random_grads(params.values(), 0)
    step(optimizer, grads)
    for p, g in zip(other.values(), grads):
        p.grad = g
    reference.step()
    for name in params:
        torch.testing.assert_close(params[name], other[name], rtol=1e-5, atol=1e-8)


def test_quantized_values_are_the_nearest_of_the_code_book():
    x = random(8, 256) ** 3
    for signed, values in ((True, x), (False, x.abs())):
        book, *_ = optim.code_book(signed, x.device)
        codes, scale = optim.quantize(values, signed)
        unit = values / scale[:, None]
        assert torch.equal(scale, values.abs().amax(1))
        assert torch.allclose((unit - book[codes.int()]).abs(), (unit[..., None] - book[0 if signed else 1:]).abs().amin(-1), atol=1e-7)
        assert torch.equal(optim.quantize(optim.dequantize(codes, scale, signed), signed)[0], codes)


@pytest.mark.parametrize("signed", [True, False])
def test_quantized_codes_equal_a_search_at_and_around_every_midpoint(signed):
    _, middle, _ = optim.code_book(signed, torch.device("cpu"))
    middle = middle[:-1]
    up, down = torch.nextafter(middle, torch.tensor(2.0)), torch.nextafter(middle, torch.tensor(-2.0))
    values = torch.cat([middle, up, down, torch.ones(3), random(256 * 16).clamp(0.0 if not signed else -1.0, 1.0)])  # the scale is 1
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 255), value=0.5).view(-1, 255)
    blocks = torch.cat([blocks, torch.ones(len(blocks), 1)], 1)
    want = torch.bucketize(blocks, middle).clamp(min=0 if signed else 1)
    assert torch.equal(optim.quantize(blocks, signed)[0].long(), want)


def test_zero_is_quantized_exactly_in_m_and_never_stored_in_v():
    x = random(4, 256)
    x[:, ::3] = 0
    codes, scale = optim.quantize(x, signed=True)
    assert (optim.dequantize(codes, scale, signed=True)[x == 0] == 0).all()
    codes, scale = optim.quantize(x ** 2, signed=False)
    assert (optim.dequantize(codes, scale, signed=False) > 0).all()
    for signed in (True, False):
        zeros = torch.zeros(2, 256)
        assert (optim.dequantize(*optim.quantize(zeros, signed), signed) == 0).all()


@paged_on_cpu
def test_states_after_a_step_are_those_of_bitsandbytes():
    from bitsandbytes.optim import PagedAdamW8bit
    p, optimizer = one(random(96, 128))
    q = nn.Parameter(p.detach().clone())
    theirs = PagedAdamW8bit([q], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    q.grad = random(96, 128, seed=1) * 1e-3
    step(optimizer, [q.grad])
    theirs.step()
    ours, theirs = dict(optimizer.state())["w"], theirs.state[q]
    exact = {"m": 0.1 * q.grad.view(-1, 256), "v": 0.05 * q.grad.view(-1, 256) ** 2}
    for key, number in (("m", 1), ("v", 2)):
        got = optim.dequantize(ours[key].view(-1, 256), ours[f"{key}_scale"], signed=key == "m")
        want = theirs[f"qmap{number}"][theirs[f"state{number}"].int()].view(-1, 256) * theirs[f"absmax{number}"][:, None]
        assert torch.equal(optim.code_book(key == "m", p.device)[0], theirs[f"qmap{number}"])
        torch.testing.assert_close(ours[f"{key}_scale"], theirs[f"absmax{number}"], rtol=1e-5, atol=0)
        assert distance(got, want) < 0.02 * want.norm()  # their CPU code takes a neighbour of the nearest code at times
        assert distance(got, exact[key]) <= 1.001 * distance(want, exact[key])
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-8)


# -----------------------------------------------------------------------------
# rounding of bf16 weights

@pytest.mark.parametrize("shape", [(64, 128), (32, 64)])
def test_small_updates_count_with_stochastic_rounding_only(shape):
    means = {}
    for rounding in ("stochastic", "nearest"):
        p, optimizer = one(torch.full(shape, 0.02, dtype=torch.bfloat16), rounding=rounding)
        for _ in range(200):
            step(optimizer, [torch.ones_like(p)], lr=1e-5)
        means[rounding] = p.float().mean().item()
    assert means["stochastic"] == pytest.approx(0.01802, abs=2e-5 if p.numel() > 8000 else 4e-5)
    assert means["nearest"] == 0.02001953125


def test_stochastic_rounding_has_no_bias():
    start = torch.cat((random(256, 256, dtype=torch.bfloat16), -random(256, 256, dtype=torch.bfloat16)))
    p, optimizer = one(start, weight_decay=0.3)
    step(optimizer, [torch.zeros_like(start)], lr=1e-3)
    exact = start.float() * (1 - 3e-4)
    error, ulp = (p.float() - exact) / start.float().abs(), 2 ** -7
    assert (error.abs() <= ulp).all() and (p != start).any()
    for half in (error[:256], error[256:]):
        assert half.mean().abs() < 5 * 0.5 * ulp / 256  # five standard deviations at most


def rounded(name="w", steps=1, **settings):
    start = random(100, 91, dtype=torch.bfloat16)
    p, optimizer = one(start, name=name, **settings)
    optimizer.steps = steps - 1
    step(optimizer, [torch.zeros_like(start)], lr=1e-2)
    return p.detach()


def test_stochastic_rounding_depends_on_seed_step_and_name_only():
    first = rounded(seed=1, weight_decay=0.3)
    for page_elements in (256, 512, 1000, 4096):
        assert torch.equal(rounded(seed=1, weight_decay=0.3, page_elements=page_elements), first)
    for other in ({"seed": 2}, {"steps": 2}, {"name": "v"}):
        assert not torch.equal(rounded(**{"seed": 1, "weight_decay": 0.3, **other}), first)


def test_random_bits_are_even_and_known_by_place():
    whole = optim.random_bits(0, 100_000, (123, 456), "cpu")
    assert torch.equal(optim.random_bits(70_000, 1000, (123, 456), "cpu"), whole[70_000:71_000])
    assert whole.dtype == torch.int32 and whole.min() < -2 ** 31 * 0.99 and whole.max() > 2 ** 31 * 0.99
    for bit in range(32):
        assert (whole >> bit & 1).float().mean().item() == pytest.approx(0.5, abs=0.008)
    for shift in (1, 256):  # no correlation between neighbours, or between places in a block
        pair = torch.stack((whole[:-shift], whole[shift:])).double()
        assert torch.corrcoef(pair)[0, 1].abs() < 0.016


def test_rounding_to_nearest_is_torchs():
    start = random(64, 128, dtype=torch.bfloat16)
    p, optimizer = one(start, rounding="nearest", weight_decay=0.3)
    step(optimizer, [torch.zeros_like(start)], lr=1e-2)
    assert torch.equal(p, (start.float() * (1 - 1e-2 * 0.3)).bfloat16())


@pytest.mark.parametrize("rounding, ulps", [("stochastic", 1.0), ("nearest", 0.5)])
def test_a_residual_keeps_7_bits_below_each_weight(rounding, ulps):
    start = random(64, 128, dtype=torch.bfloat16)
    p, optimizer = one(start, rounding=rounding, residual=True, weight_decay=0.3)
    step(optimizer, [torch.zeros_like(start)], lr=1e-2)
    exact = start.float() * (1 - 1e-2 * 0.3)
    joined = optim.join_residual(p.view(-1), dict(optimizer.state())["w"]["residual"]).view(p.shape)
    ulp = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((joined - exact).abs() <= ulps * ulp / 128).all()
    assert ((p - exact).abs() <= (ulps + 1 / 128) * ulp).all()


def test_a_residual_follows_fp32_weights_closer_than_rounding_does():
    start = random(64, 128, dtype=torch.bfloat16) * 0.02
    runs = {"fp32": one(start.float()), "stochastic": one(start), "residual": one(start, residual=True)}
    for i in range(500):
        g = random(64, 128, seed=i % 50) * 1e-3 + random(64, 128, seed=999) * 2e-4
        for p, optimizer in runs.values():
            step(optimizer, [g.to(p.dtype)], lr=1e-5)
    joined = optim.join_residual(runs["residual"][0].view(-1), dict(runs["residual"][1].state())["w"]["residual"]).view(64, 128)
    twin, moved = runs["fp32"][0], distance(runs["fp32"][0], start)
    assert distance(joined, twin) < 0.02 * moved
    assert distance(joined, twin) < 0.1 * distance(runs["stochastic"][0], twin)
    assert distance(runs["residual"][0], twin) < 0.5 * distance(runs["stochastic"][0], twin)


# -----------------------------------------------------------------------------
# pages

@pytest.mark.parametrize("settings", [{}, {"residual": True}, {"grad_clip": 0.5}])
def test_how_pages_are_cut_changes_nothing(settings):
    results = []
    for page_elements in (2 ** 25, 8192, 1000, 256):
        params = parameters(torch.bfloat16)
        optimizer = optim.Adam8bit(params.items(), weight_decay=0.1, page_elements=page_elements, **settings)
        norms = {f"norm {i}": step(optimizer, random_grads(params.values(), i)) for i in range(3)}
        results.append({**params, **states(optimizer), **norms})
    assert all(equal(r, results[0]) for r in results[1:])


def test_gradients_may_arrive_in_any_order():
    results = []
    for order in (1, -1):
        params = parameters()
        optimizer = optim.Adam8bit(params.items(), page_elements=1024)
        for i in range(2):
            optimizer.begin(1e-3)
            for p, g in list(zip(params.values(), random_grads(params.values(), i)))[::order]:
                p.backward(g)
            optimizer.finish()
        results.append({**params, **states(optimizer)})
    assert equal(*results)


@pytest.mark.parametrize("settings", [{}, {"residual": True}, {"grad_clip": 0.5}])
def test_a_state_loads_into_pages_of_another_size(settings):
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = optim.Adam8bit(first.items(), page_elements=1024, **settings)
    other = optim.Adam8bit(second.items(), page_elements=2048 * 3, **settings)
    for i in range(3):
        step(optimizer, random_grads(first.values(), i))
    with torch.no_grad():
        for name in first:
            second[name].copy_(first[name])
    other.load_state(dict(optimizer.state()).__getitem__, optimizer.steps)
    assert other.steps == 3 and equal(states(other), states(optimizer))
    for o, params in ((optimizer, first), (other, second)):
        step(o, random_grads(params.values(), 4))
    assert equal({**second, **states(other)}, {**first, **states(optimizer)})


def test_a_state_that_does_not_fit_is_refused():
    optimizer, saved = optim.Adam8bit(parameters().items()), dict(optim.Adam8bit(parameters().items()).state())
    with pytest.raises(KeyError):
        optimizer.load_state({k: v for k, v in saved.items() if k != "odd"}.__getitem__, 1)
    saved["odd"] = {k: t[:-300] for k, t in saved["odd"].items()}
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.load_state(saved.__getitem__, 1)


def test_bitsandbytes_is_imported_quietly_and_asks_nothing_of_the_network(tmp_path):
    (tmp_path / "kernels.py").write_text("raise RuntimeError('asked')")
    code = "import torch, optim; optim.code_book(True, torch.device('cpu')); import kernels"  # only the last may get there
    done = subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(HERE), env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("RuntimeError: asked\n") and done.stdout == ""


# -----------------------------------------------------------------------------
# clipping

@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_torchs(limit):
    params, clipped = parameters(), parameters()
    optimizer = optim.Adam8bit(params.items(), grad_clip=limit, page_elements=1024)
    reference = optim.Adam8bit(clipped.items())
    for i in range(3):
        grads = random_grads(params.values(), i)
        norm = step(optimizer, grads)
        for p, g in zip(clipped.values(), grads):
            p.grad = g.clone()
        want = torch.nn.utils.clip_grad_norm_(clipped.values(), limit)
        grads = [p.grad for p in clipped.values()]
        for p in clipped.values():
            p.grad = None
        step(reference, grads)
        assert norm.item() == pytest.approx(want.item(), rel=1e-6)
    for name in params:
        torch.testing.assert_close(params[name], clipped[name], rtol=1e-5, atol=1e-7)


def test_with_clipping_a_bad_gradient_changes_nothing():
    params, untouched = parameters(), parameters()
    optimizer, reference = (optim.Adam8bit(p.items(), grad_clip=0.5, page_elements=1024) for p in (params, untouched))
    for o, p in ((optimizer, params), (reference, untouched)):
        step(o, random_grads(p.values(), 0))
    bad = random_grads(params.values(), 1)
    bad[0][0, 0] = math.nan
    with pytest.raises(optim.NonFiniteGradient, match="the gradient of wide is not finite"):
        step(optimizer, bad)
    assert optimizer.steps == 1 and equal({**params, **states(optimizer)}, {**untouched, **states(reference)})
    for o, p in ((optimizer, params), (reference, untouched)):
        step(o, random_grads(p.values(), 2))
    assert equal({**params, **states(optimizer)}, {**untouched, **states(reference)})


@pytest.mark.parametrize("limit, most", [(100_000, 0), (250_000, 204_800)])
def test_parked_gradients_leave_the_device_in_bounded_numbers(monkeypatch, limit, most):
    """On a GPU a gradient is held until its copy to the host is done: here with copies that only count themselves."""
    waited, sent = [], []
    monkeypatch.setattr(optim, "PARKING", limit)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"wait_event": waited.append}))
    params = {f"w{i}": nn.Parameter(random(100, 256, seed=i)) for i in range(5)}  # 102,400 bytes each
    optimizer = optim.Adam8bit(params.items(), grad_clip=1.0, page_elements=8192)

    def send(page, source, into):
        sent.append(len(sent) + 1)
        return sent[-1] if page != 5 else None  # a page that stays on the device is written at once

    monkeypatch.setattr(optimizer.pages, "send", send)
    optimizer.begin(1e-3)
    held = []
    for p in reversed(params.values()):
        torch.autograd.backward([p], [torch.ones_like(p)])
        held.append(sum(flat.nbytes for flat, _ in optimizer.sending))
    assert max(held) == most
    optimizer.finish()
    assert not optimizer.sending and len(waited) == 5 and waited == sorted(waited)


@pytest.mark.parametrize("tied", [False, True])
def test_updates_that_wait_for_the_next_forward_pass_are_those_made_at_once(tied):
    cfg = train.Config(dtype="bfloat16", grad_clip=0.5, master="residual", weight_decay=0.1)
    models, optimizers = [], []
    for _ in range(2):
        models.append(llama.Llama(llama.ModelConfig(n_layers=3, tie_word_embeddings=tied), torch.bfloat16))
        models[-1].init_weights()
        optimizers.append(train.make_optimizer(cfg, models[-1]))
    for i in range(3):
        batches = [random_batch(2, 32, 512, seed=10 * i + j) for j in range(2)]
        found = [train.train_step(m, o, batches, 1e-2, offload.run_layer, 64) for m, o in zip(models, optimizers)]
        assert found[0] == found[1]
        assert len(optimizers[0].pending) == len(list(models[0].parameters()))
        optimizers[1].catch_up()
    assert not equal(dict(models[0].named_parameters()), dict(models[1].named_parameters()))
    with pytest.raises(AssertionError, match="catch_up"):
        next(optimizers[0].state())
    optimizers[0].catch_up()
    assert equal({**dict(models[0].named_parameters()), **states(optimizers[0])}, {**dict(models[1].named_parameters()), **states(optimizers[1])})


# -----------------------------------------------------------------------------
# other people's optimizers

@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_adamw_is_torchs_bit_for_bit(limit, dtype):
    params, other = parameters(dtype), parameters(dtype)
    optimizer = optim.StockOptimizer("adamw", params.items(), 0.8, 0.9, 1e-7, 0.1, grad_clip=limit)
    reference = plain_adamw(other.values(), 1e-3, 0.1, betas=(0.8, 0.9), eps=1e-7)
    for i in range(3):
        grads = random_grads(params.values(), i)
        step(optimizer, grads)
        for p, g in zip(other.values(), grads):
            p.grad = g
        if limit:
            torch.nn.utils.clip_grad_norm_(other.values(), limit)
        reference.step()
    assert equal(params, other)


@paged_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_bitsandbytes_is_its_own_bit_for_bit(dtype):
    from bitsandbytes.optim import AdamW32bit, PagedAdamW8bit
    params, other = parameters(dtype), parameters(dtype)
    optimizer = optim.StockOptimizer("bnb_paged_adamw8bit", params.items(), 0.8, 0.9, 1e-7, 0.1)
    shared = dict(lr=1e-3, betas=(0.8, 0.9), eps=1e-7)
    references = [PagedAdamW8bit([p for p in other.values() if p.dim() == 2], weight_decay=0.1, min_8bit_size=8192, **shared),
                  AdamW32bit([p for p in other.values() if p.dim() == 1], weight_decay=0.0, **shared)]
    for i in range(3):
        grads = random_grads(params.values(), i)
        step(optimizer, grads)
        for p, g in zip(other.values(), grads):
            p.grad = g.clone()
        for reference in references:
            reference.step()
    assert equal(params, other)
    dtypes = {name: state["state1"].dtype for name, state in optimizer.state()}
    assert dtypes == {n: torch.uint8 if n in ("wide", "odd") else torch.float32 for n in params}


@paged_on_cpu
@pytest.mark.parametrize("kind", ["adamw", "bnb_paged_adamw8bit"])
def test_a_stock_state_loads_bit_for_bit(kind):
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = (optim.StockOptimizer(kind, p.items()) for p in (first, second))
    for i in range(3):
        step(optimizer, random_grads(first.values(), i))
    with torch.no_grad():
        for name in first:
            second[name].copy_(first[name])
    saved = {name: {k: t.clone() for k, t in state.items()} for name, state in optimizer.state()}
    other.load_state(saved.__getitem__, optimizer.steps)
    assert other.steps == 3 and equal(states(other), states(optimizer))
    assert all(t.dtype == states(optimizer)[k].dtype for k, t in states(other).items())
    for o, params in ((optimizer, first), (other, second)):
        step(o, random_grads(params.values(), 4))
    assert equal({**second, **states(other)}, {**first, **states(optimizer)})


# -----------------------------------------------------------------------------
# the Triton kernel, in Triton's interpreter

def compare_kernel():
    """The kernel against plain torch; run in a process that has TRITON_INTERPRET=1 from its start."""
    n, blocks = 256 * 7 + 77, 8
    for dtype, residual in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        for keys, rows in ((None, 1), ((123456789, 3987654321), 4)):
            p = (random(n) * 0.02).to(dtype)
            state = {k: torch.zeros(blocks * 256, dtype=torch.uint8) for k in "mv"} | {f"{k}_scale": torch.zeros(blocks) for k in "mv"}
            state["residual"] = torch.zeros(blocks * 256, dtype=torch.int8) if residual else None
            for i in range(1, 4):
                g = (random(n, seed=i) ** 5 * 1e-4).to(dtype)
                g[::7] = 0
                q, other = p.clone(), {k: None if t is None else t.clone() for k, t in state.items()}
                h, scale = optim.Hyper(1e-4, 0.9, 0.95, 1e-8, 0.1, i), torch.full((1,), 0.5)
                optim.adam8bit_torch(p, g, state, h, 512, keys, scale)
                optim.adam8bit_triton(q, g, other, h, 512, keys, scale, rows)
                for key in "mv":  # codes differ where a value lies between two by less than rounding
                    off = (state[key][:n].int() - other[key][:n].int()).abs()
                    assert off.max() <= 1 and (off > 0).float().mean() < 0.003, (key, off)
                    torch.testing.assert_close(state[f"{key}_scale"], other[f"{key}_scale"], rtol=1e-5, atol=0)
                if dtype == torch.bfloat16:
                    assert (p != q).float().mean() < 0.001
                torch.testing.assert_close(p.float(), q.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-8)
            before = [t.clone() for t in (q, *other.values()) if t is not None]
            optim.adam8bit_triton(q, g, other, h, 512, keys, scale * torch.nan, rows)  # a bad gradient: hands off
            assert all(torch.equal(a, b) for a, b in zip(before, [t for t in (q, *other.values()) if t is not None]))
    print("equal")


def test_the_triton_kernel_equals_plain_torch():
    pytest.importorskip("triton")
    process = subprocess.run([sys.executable, "-c", "import test_optim; test_optim.compare_kernel()"], cwd=HERE, text=True, capture_output=True,
                             env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.path.dirname(HERE)})
    assert process.stdout.endswith("equal\n"), process.stderr


def test_a_kernel_that_cannot_be_built_is_explained(monkeypatch):
    def broken(*a, **k):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(optim, "adam8bit_triton", broken)
    monkeypatch.setattr(optim, "triton", object())
    assert optim.kernel_problem.__wrapped__(torch.device("cpu")) == "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    monkeypatch.setattr(optim, "triton", None)
    assert "not installed" in optim.kernel_problem.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("damage", [lambda s: s | {"m": s["m"][:-1]}, lambda s: s | {"v": torch.cat([s["v"], s["v"]])},
                                    lambda s: s | {"m": s["m"].double()}, lambda s: {k: v for k, v in s.items() if k != "v"},
                                    lambda s: s | {"m_scale": s["m_scale"][:1]} if "m_scale" in s else s | {"m": s["m"][:1]}])
def test_states_of_another_size_or_kind_are_refused(damage):
    def fresh():
        return optim.Adam8bit([("wide", torch.nn.Parameter(torch.zeros(64, 256))), ("norm", torch.nn.Parameter(torch.ones(64)))])

    saved = {name: {k: t.clone() for k, t in s.items()} for name, s in fresh().state()}
    for name in saved:
        with pytest.raises((KeyError, ValueError)):
            fresh().load_state(lambda n: damage(saved[n]) if n == name else saved[n], 1)


def test_torch_adamw_leaves_everything_as_it_was_when_a_gradient_is_not_finite():
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = optim.StockOptimizer("adamw", [("p", p)])
    optimizer.begin(0.1)
    (p * torch.tensor(float("nan"))).sum().backward()
    with pytest.raises(optim.NonFiniteGradient, match="gradient of p is not finite"):
        optimizer.finish()
    assert (p == 1).all() and p.grad is None and optimizer.steps == 0 and not optimizer.optimizers[p].state
