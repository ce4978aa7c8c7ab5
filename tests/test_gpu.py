"""python -m pytest tests/test_gpu.py      on a machine with a GPU; skipped elsewhere"""

import dataclasses

import pytest
import torch

import bench
import data
import model as llama
import offload
import optim
import train
from helpers import naive_attention, random_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
SHAPE = llama.ModelConfig(dim=512, n_layers=6, n_heads=8, n_kv_heads=2, head_dim=64, ffn_dim=1408, vocab_size=2048)


def make(dtype=torch.bfloat16, seed=0, config=SHAPE):
    with CUDA:
        model = llama.Llama(config, dtype)
    model.to(CUDA)
    model.init_weights(seed)
    return model


def gradients(model, batches, run_layer=None):
    for p in model.parameters():
        p.grad = None
    loss = model.loss(batches, sum(len(b.targets) for b in batches), run_layer, 256)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


def test_varlen_attention_equals_naive():
    torch.manual_seed(0)
    batch = random_batch(2, 300, 100, seed=1).to(CUDA)
    q, k, v = (torch.randn(2, 300, h, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2))
    y = llama.attend(q, k, v, batch.borders)
    grad = torch.randn_like(y)
    got = [y, *torch.autograd.grad(y, (q, k, v), grad)]
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = naive_attention(*wide, batch.borders)
    for a, b in zip(got, [want, *torch.autograd.grad(want, wide, grad.double())]):
        assert (a.double() - b).norm() / b.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("keys", [None, (123456789, 3987654321)])
def test_kernel_equals_plain_torch(dtype, residual, keys):
    n, blocks = 256 * 1000 + 77, 1001
    generator = torch.Generator(CUDA).manual_seed(0)
    p = (torch.randn(n, device=CUDA, generator=generator) * 0.02).to(dtype)
    state = {k: torch.zeros(blocks * 256, dtype=torch.uint8, device=CUDA) for k in "mv"}
    state |= {f"{k}_scale": torch.zeros(blocks, device=CUDA) for k in "mv"}
    state["residual"] = torch.zeros(blocks * 256, dtype=torch.int8, device=CUDA) if residual and dtype != torch.float32 else None
    q, other = p.clone(), {k: None if t is None else t.clone() for k, t in state.items()}
    scale = torch.ones(1, device=CUDA)
    for step in range(1, 6):
        g = (torch.randn(n, device=CUDA, generator=generator) * torch.rand(n, device=CUDA, generator=generator) ** 4 * 1e-3).to(dtype)
        g[::7] = 0
        h = optim.Hyper(1e-4, 0.9, 0.95, 1e-8, 0.1, step)
        optim.adam8bit_torch(p, g, state, h, 512, keys, scale)
        optim.adam8bit_triton(q, g, other, h, 512, keys, scale)
        for key in "mv":  # codes differ where a value lies between two by less than rounding
            distance = (state[key][:n].int() - other[key][:n].int()).abs()
            assert distance.max() <= 1 and (distance > 0).float().mean() < 0.003, key
            torch.testing.assert_close(state[f"{key}_scale"], other[f"{key}_scale"], rtol=1e-5, atol=0)
        assert (p != q).float().mean() < (1e-3 if dtype == torch.bfloat16 else 1)
        torch.testing.assert_close(p.float(), q.float(), rtol=1e-2, atol=2e-6)
        q.copy_(p)
        other.update((k, None if t is None else t.clone()) for k, t in state.items())


def test_offload_and_recompute_are_bitwise_neutral():
    model = make()
    batches = [random_batch(2, 256, SHAPE.vocab_size, seed=s).to(CUDA) for s in range(4)]
    keep = lambda *a: offload.run_layer(*a, recompute=False)
    loss, want = gradients(model, batches, lambda *a: offload.run_layer(*a))
    offloader = offload.ActivationOffload(model.parameters(), CUDA, ahead_bytes=4 * 2 * 256 * 512 * 2)

    def slowed(*a):
        for stream in (offloader.out_stream, offloader.in_stream):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # copies arrive late: a missing wait shows as garbage
        return offload.run_layer(*a, offload=offloader)

    for _ in range(20):
        again, got = gradients(model, batches, slowed)
        assert again == loss and all(torch.equal(got[n], want[n]) for n in want)
    assert offloader.packed == 20 * 4 * SHAPE.n_layers and offloader.packed_bytes == offloader.packed * 2 * 256 * 512 * 2
    again, got = gradients(model, batches, keep)
    for n in want:
        assert (got[n].float() - want[n].float()).norm() <= 1e-2 * want[n].float().norm(), n


def test_what_is_kept_and_offloaded_leaves_the_device():
    model = make()
    batch = random_batch(2, 256, SHAPE.vocab_size).to(CUDA)
    offloader = offload.ActivationOffload(model.parameters(), CUDA)
    x, context = torch.randn(2, 256, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True), (model.rope(batch.positions), batch.borders)

    def kept():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y, = offload.run_layer(model.layers[0], [x], [context], recompute=False, offload=offloader)
        offloader.settle(0, 0)
        torch.cuda.synchronize()
        return y, torch.cuda.memory_allocated() - before

    kept()
    y, after = kept()
    assert offloader.packed_bytes > 20 * y.nbytes and after <= 1.5 * y.nbytes


def run_steps(cfg, steps=4, compile=False, at_once=False):
    model = train.make_model(cfg, SHAPE, CUDA, None)
    if compile:
        model.compile_blocks()
    optimizer = train.make_optimizer(cfg, model)
    run_layer, _ = train.make_run_layer(cfg, model)
    rows = bench.synthetic_rows(64, 256, SHAPE.vocab_size, 20, 100)
    loader = data.Loader([rows], 2)
    losses = []
    for _ in range(steps):
        batches = [loader.next().to(CUDA) for _ in range(cfg.gradient_accumulation_steps)]
        loss, norm = train.train_step(model, optimizer, batches, 1e-3, run_layer, 256)
        losses.append(loss)
        if at_once:  # else clipped updates come in the next forward pass
            optimizer.catch_up()
    optimizer.catch_up()
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}, optimizer


BASE = train.Config(dtype="bfloat16", seq_len=256, batch_size=2, gradient_accumulation_steps=4, activation_offloading=True)


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_paging_is_bitwise_neutral_and_repeatable(monkeypatch, limit):
    results = []
    for elements, buffers, resident in ((2 ** 25, 1.0, 0.0), (2 ** 16, 0.0, 0.0), (2 ** 16, 0.0, 0.02), (2 ** 17, 1e-3, 1.0)):
        monkeypatch.setattr(optim.Adam8bit.__init__, "__defaults__",
                            tuple(elements if d == 2 ** 25 else d for d in optim.Adam8bit.__init__.__defaults__))
        last = resident == 1.0
        cfg = dataclasses.replace(BASE, state_buffer_gb=buffers, state_resident_gb=resident,
                                  grad_clip=0.0 if last and limit > 1e3 else limit)  # a limit that is never met changes nothing
        losses, weights, optimizer = run_steps(cfg, at_once=last)
        state = {(n, k): t for n, s in optimizer.state() for k, t in s.items()}
        results.append((losses, weights, state))
        monkeypatch.undo()
    for losses, weights, state in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(w, results[0][1][n]) for n, w in weights.items())
        assert all(torch.equal(t, results[0][2][k]) for k, t in state.items())


def test_compiled_agrees_and_compiles_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, _, _ = run_steps(BASE, steps=12)
    compiled, _, _ = run_steps(BASE, steps=12, compile=True)
    assert max(abs(a - b) for a, b in zip(eager, compiled)) < 2e-2
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert frames <= 7, frames  # the block's halves with and without gradient, the loss, and two more with dynamic borders


def test_bitsandbytes_runs_beside():
    ours, _, _ = run_steps(dataclasses.replace(BASE, rounding="nearest"), steps=8)
    theirs, _, _ = run_steps(dataclasses.replace(BASE, optimizer="bnb_paged_adamw8bit"), steps=8)
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < 3e-2
