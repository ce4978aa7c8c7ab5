"""python -m pytest tests/test_offload.py"""

import gc

import pytest
import torch
from torch import nn

import model as llama
import offload
from helpers import random_batch

CPU = torch.device("cpu")  # an offloader for the CPU copies from host memory to host memory: all of its logic, no streams
SHAPE = llama.ModelConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80, vocab_size=101)
BATCHES = [random_batch(2, 16, 101, seed=s) for s in range(3)]
pytestmark = pytest.mark.usefixtures("one_thread")


def make(dtype=torch.float32):
    model = llama.Llama(SHAPE, dtype)
    model.init_weights()
    return model


def loss(model, batches=BATCHES, **how):
    run_layer = (lambda *a: offload.run_layer(*a, **how)) if how else None
    return model.loss(batches, sum(len(b.targets) for b in batches), run_layer)


def gradients(model, batches=BATCHES, **how):
    for p in model.parameters():
        p.grad = None
    loss(model, batches, **how).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def same(got, want):
    return all(torch.equal(got[name], want[name]) for name in want)


# -----------------------------------------------------------------------------
# recompute and offload change no gradient

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro", [1, 3])
def test_offloading_is_bitwise_neutral(dtype, micro):
    model = make(dtype)
    for recompute in (True, False):
        want = gradients(model, BATCHES[:micro], recompute=recompute)
        for ahead in (0, micro * 2 * 16 * 48 * 4, 10 ** 9):
            offloader = offload.ActivationOffload(model.parameters(), CPU, ahead)
            assert same(gradients(model, BATCHES[:micro], recompute=recompute, offload=offloader), want)
            assert offloader.packed > 0


def test_recomputing_changes_gradients_by_no_more_than_rounding():
    model = make()
    plain, kept, recomputed = gradients(model), gradients(model, recompute=False), gradients(model, recompute=True)
    for name in plain:
        for other in (kept, recomputed):
            torch.testing.assert_close(other[name], plain[name], rtol=1e-4, atol=1e-7)


def test_gradients_of_one_micro_batch_are_bitwise_those_of_autograd():
    model = make(torch.bfloat16)
    assert same(gradients(model, BATCHES[:1], recompute=True), gradients(model, BATCHES[:1]))


@pytest.mark.parametrize("micro", [1, 3])
def test_long_rows_go_through_the_feed_forward_in_pieces(micro, monkeypatch):
    model, lengths = make(), []
    want = gradients(model, BATCHES[:micro], recompute=True)
    monkeypatch.setattr(offload, "FFN_TOKENS", 13)
    for block in model.layers:
        block.hidden = lambda h, block=block: lengths.append(len(h)) or llama.Block.hidden(block, h)
    got = gradients(model, BATCHES[:micro], recompute=True)
    assert sorted(set(lengths)) == [10, 11, 32]  # 32 tokens: whole in forward, in three pieces in backward
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-7)


def test_what_is_kept_and_offloaded_is_nowhere_else():
    """With recompute off a block's graph holds what it saved, which the offloader took, and nothing more."""
    model = make()
    offloader = offload.ActivationOffload(model.parameters(), CPU)
    offloader.settle = lambda *a: offloader.copying.clear()
    block, x = model.layers[0], torch.randn(2, 16, 48, requires_grad=True)
    context = model.rope(BATCHES[0].positions), model.documents(BATCHES[0])
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    y, = offload.run_layer(block, [x], [context], recompute=False, offload=offloader)
    gc.collect()
    mine = {s.buffer.untyped_storage().data_ptr() for s in offloader.saved.values()} | offloader.param_storages | {y.untyped_storage().data_ptr()}
    left = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before and t.numel() >= 1024
            and t.untyped_storage().data_ptr() not in mine]
    assert offloader.packed >= 8 and not left, [t.shape for t in left]


def test_without_gradients_a_layer_just_runs():
    model, offloader = make(), offload.ActivationOffload([], CPU)
    with torch.no_grad():
        assert loss(model, recompute=True, offload=offloader).item() == loss(model).item()
    assert offloader.packed == 0


# -----------------------------------------------------------------------------
# what is offloaded

def test_a_block_offloads_its_input_once_per_micro_batch_and_nothing_in_recompute():
    model = make()
    offloader = offload.ActivationOffload(model.parameters(), CPU, ahead_bytes=3 * 2 * 16 * 48 * 4)
    total = loss(model, recompute=True, offload=offloader)
    assert offloader.packed == 2 * 3 and offloader.packed_bytes == 2 * 3 * (2 * 16 * 48 * 4)
    total.backward()
    assert offloader.packed == 2 * 3


@pytest.mark.parametrize("recompute", [True, False])
def test_what_was_offloaded_comes_back_once(recompute, monkeypatch):
    copies = []
    real = offload._Saved.fetch
    monkeypatch.setattr(offload._Saved, "fetch", lambda self: (copies.append(self.index) if self.device_copy is None else None, real(self)))
    model = make()
    gradients(model, recompute=recompute, offload=offload.ActivationOffload(model.parameters(), CPU, ahead_bytes=10 ** 9))
    assert len(copies) == len(set(copies)) > 0


def test_weights_are_not_offloaded_not_even_as_views():
    linear = nn.Linear(4, 4, bias=False)
    offloader = offload.ActivationOffload(linear.parameters(), CPU, min_elements=1)
    with offloader:
        y = linear(torch.randn(8, 4, requires_grad=True) * 2)  # saves its input, and its weight as a transposed view
    assert [s.host.shape for s in offloader.saved.values()] == [(8, 4)]
    y.sum().backward()


class Keep(torch.autograd.Function):
    """Saves tensors and hands back in backward what came of them."""

    @staticmethod
    def forward(ctx, x, back, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.back.extend(ctx.saved_tensors)
        return grad, *[None] * (1 + len(ctx.saved_tensors))


def there_and_back(offloader, *tensors):
    back = []
    with offloader:
        y = Keep.apply(torch.ones(1, requires_grad=True), back, *tensors)
    y.backward()
    for tensor, returned in zip(tensors, back, strict=True):
        assert returned.dtype == tensor.dtype and returned.device == tensor.device and not returned.requires_grad
        assert returned.stride() == tensor.stride() and torch.equal(returned, tensor)
    return back


def test_tensors_come_back_with_their_dtype_strides_and_bits():
    offloader, x = offload.ActivationOffload([], CPU), torch.randn(8, 16, 32)
    tensors = [x, x.transpose(0, 1), x.permute(2, 0, 1).bfloat16(), x.double()[None], x[2:6], x.half()[..., None]]
    back = there_and_back(offloader, *tensors)
    assert offloader.packed == len(tensors)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(tensors, back))


def test_small_integer_and_gappy_tensors_pass_through_untouched():
    offloader, x = offload.ActivationOffload([], CPU), torch.randn(64, 64)
    tensors = [torch.arange(5000), torch.tensor(2.5), torch.randn(1023), x > 0, x[:, ::2], x[:, :40], x[:1].expand(64, 64), torch.empty(0)]
    back = there_and_back(offloader, *tensors)
    assert offloader.packed == 0
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors, back))


def test_tensors_on_another_device_pass_through_untouched():
    offloader = offload.ActivationOffload([], torch.device("meta"))
    there_and_back(offloader, torch.randn(64, 64))
    assert offloader.packed == 0


def test_the_hooks_end_with_the_forward_pass():
    offloader = offload.ActivationOffload([], CPU)
    with offloader:
        pass
    torch.randn(64, 64, requires_grad=True).exp()
    assert offloader.packed == 0


def test_backward_can_run_twice():
    x, offloader = torch.randn(64, 64, requires_grad=True), offload.ActivationOffload([], CPU)
    with offloader:
        y = x.exp().sum()
    first, = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x)[0], first) and torch.equal(first, x.exp())


def test_the_tensor_needed_next_is_fetched_ahead():
    offloader, tensors = offload.ActivationOffload([], CPU, ahead_bytes=2 * 64 * 64 * 4), [torch.randn(64, 64) for _ in range(6)]
    saved = [offloader.pack(t) for t in tensors]
    for i, here in ((4, [0, 0, 1, 1, 0, 0]), (5, [0, 0, 1, 1, 0, 0]), (3, [0, 1, 1, 0, 0, 0]), (1, [1, 0, 1, 0, 0, 0])):
        assert torch.equal(offloader.unpack(saved[i]), tensors[i])
        assert [s.device_copy is not None for s in saved] == here  # what was used already is not fetched again


# -----------------------------------------------------------------------------
# host memory

def test_the_second_step_allocates_no_buffers(monkeypatch):
    model, allocated = make(), []
    real = offload.pinned_zeros
    monkeypatch.setattr(offload, "pinned_zeros", lambda nbytes, device: allocated.append(nbytes) or real(nbytes, device))
    offloader = offload.ActivationOffload(model.parameters(), CPU, ahead_bytes=3 * 2 * 16 * 48 * 4)
    first = gradients(model, recompute=True, offload=offloader)
    assert len(allocated) == 6 and offloader.host_bytes == sum(allocated) == offloader.packed_bytes
    for _ in range(3):
        assert same(gradients(model, recompute=True, offload=offloader), first)
    assert len(allocated) == 6 and not offloader.saved


@pytest.mark.parametrize("recompute", [True, False])
def test_passes_without_a_backward_leave_nothing_behind(recompute):
    model = make()
    want = gradients(model, recompute=recompute)
    offloader = offload.ActivationOffload(model.parameters(), CPU, ahead_bytes=3 * 2 * 16 * 48 * 4)
    taken = set()
    for _ in range(50):
        loss(model, recompute=recompute, offload=offloader)
        assert not offloader.saved
        taken.add(offloader.host_bytes)
    assert taken == {offloader.host_bytes} and offloader.host_bytes == sum(b.nbytes for pool in offloader.free.values() for b, _ in pool)
    assert same(gradients(model, recompute=recompute, offload=offloader), want) and not offloader.saved


class Cudart:
    """Stands for CUDA's runtime on a machine without one."""

    def __init__(self, answer):
        self.answer, self.locked = answer, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if self.answer == 0:
            self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address):
        del self.locked[address]


@pytest.fixture
def cudart(monkeypatch):
    monkeypatch.setattr(offload.pinned_zeros, "warned", False)

    def install(answer):
        fake = Cudart(answer)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        return fake
    return install


def test_memory_is_locked_at_its_exact_size_until_its_last_view_is_gone(cudart, capsys):
    fake = cudart(0)
    memory = offload.pinned_zeros(5000, torch.device("cuda"))
    assert memory.dtype == torch.uint8 and memory.count_nonzero() == 0
    assert fake.locked == {memory.data_ptr(): 5000}
    view = memory[:4000].view(torch.float32)
    del memory
    gc.collect()
    assert len(fake.locked) == 1 and view.sum() == 0
    del view
    gc.collect()
    assert not fake.locked and capsys.readouterr().err == ""


def test_refused_locking_is_said_once_and_the_memory_works(cudart, capsys):
    fake = cudart(2)
    first, second = (offload.pinned_zeros(n, torch.device("cuda")) for n in (10_000_000, 5000))
    assert first.nbytes == 10_000_000 and second.nbytes == 5000 and not fake.locked
    error = capsys.readouterr().err
    assert error.count("warning") == 1 and "10 MB" in error and "ulimit -l" in error


def test_host_memory_of_a_cpu_run_is_not_locked(cudart):
    fake = cudart(0)
    offload.pinned_zeros(5000, CPU)
    offload.pinned_zeros(0, torch.device("cuda"))
    assert not fake.locked
