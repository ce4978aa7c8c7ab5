"""python -m pytest tests/test_model.py"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import data
import model as llama
import offload
from helpers import naive_attention, random_batch

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SHAPE = llama.ModelConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=80, vocab_size=101)  # 4 x 16 is not 48
pytestmark = pytest.mark.usefixtures("one_thread")


def make(config=SHAPE, dtype=torch.float32, seed=0):
    """A model whose weights are large enough for every part to matter."""
    model = llama.Llama(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1, generator=generator)
    return model


def document(*tokens, learned=True):
    """One document as data.py stores it; the first token is never learned."""
    entries = np.array(tokens, np.uint32) | np.uint32(data.LEARN if learned else 0)
    entries[0] = tokens[0] | data.START
    return entries


def pack(*documents):
    return data.Batch.from_rows(np.append(np.concatenate(documents), np.uint32(0))[None])


def packed_logits(model, batch):
    """Logits [B, T, V] of a packed batch, block after block."""
    x = model.tok_embeddings(batch.tokens)
    for block in model.layers:
        x = block(x, model.rope(batch.positions), model.documents(batch))
    return model.output(model.norm(x))


def plain_loss(model, batches):
    """The loss of a step, without chunks."""
    logits = torch.cat([packed_logits(model, b).flatten(0, 1)[b.index] for b in batches]).float()
    return F.cross_entropy(logits, torch.cat([b.targets for b in batches]))


def gradients(model, loss):
    for p in model.parameters():
        p.grad = None
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def step_gradients(model, batches, count=None, run_layer=None, chunk_size=1024):
    loss = model.loss(batches, count or sum(len(b.targets) for b in batches), run_layer, chunk_size)
    return loss.item(), gradients(model, loss)


def assert_close(got, want, rtol):
    """Each tensor's distance, relative to its own norm."""
    for name in want:
        assert (got[name].float() - want[name].float()).norm() <= rtol * want[name].float().norm(), name


# -----------------------------------------------------------------------------
# the same function as transformers

def transformers_twin(model):
    """transformers' LlamaForCausalLM with the same weights."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    twin = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, vocab_size=c.vocab_size, max_position_embeddings=c.max_seq_len,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling, tie_word_embeddings=c.tie_word_embeddings))
    names = {"tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm.": "model.norm.", "layers.": "model.layers.",
             "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
             "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
             "feed_forward.w2": "mlp.down_proj"}

    def rename(name):
        for ours, theirs in names.items():
            if name.startswith(ours) or not ours.endswith(".") and "." + ours + "." in name:
                name = name.replace(ours, theirs, 1)
        return name

    twin.load_state_dict({rename(name): p.detach() for name, p in model.state_dict().items()})
    return twin


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, {**LLAMA3, "original_max_position_embeddings": 64}])
def test_logits_equal_those_of_transformers(tied, scaling):
    model = make(llama.ModelConfig(**{**vars(SHAPE), "tie_word_embeddings": tied, "rope_scaling": scaling}))
    tokens = torch.randint(0, 101, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = transformers_twin(model)(tokens).logits
    assert want.abs().max() > 1
    assert (model.logits(tokens) - want).abs().max() <= 1e-5


@pytest.mark.parametrize("other", [{"norm_eps": 1e-2}, {"rope_theta": 1e4}, {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}])
def test_settings_that_change_the_function_come_from_the_config(other):
    model = make(llama.ModelConfig(**{**vars(SHAPE), **other}))
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        assert (model.logits(tokens) - transformers_twin(model)(tokens).logits).abs().max() <= 1e-5
    assert (model.logits(tokens) - make().logits(tokens)).abs().max() > 1e-3


def test_the_norm_adds_eps_to_the_mean_square():
    norm = llama.RMSNorm(64, 1e-5)
    norm.weight.data.fill_(1)
    assert torch.allclose(norm(torch.full((1, 64), 1e-3)), torch.tensor(1e-3 / math.sqrt(1.1e-5)), rtol=1e-6)


def test_the_norm_of_bf16_is_computed_in_fp32_and_rounded_once():
    x, weight = torch.randn(8, 64).bfloat16(), torch.randn(64)
    assert torch.equal(llama.rms_norm(x, weight, 1e-5), llama.rms_norm(x.float(), weight, 1e-5).bfloat16())


# -----------------------------------------------------------------------------
# rotary frequencies

def frequencies(head_dim, **scaling):
    return llama.rope_frequencies(llama.ModelConfig(head_dim=head_dim, rope_theta=500000.0, rope_scaling=scaling or None))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("head_dim, factor, kept, blended", [
    (128, 8.0, 29, {29: 2.166570764e-3, 31: 8.567514129e-4, 32: 5.248461610e-4, 34: 1.785078128e-4}),
    (64, 32.0, 15, {15: 1.290547928e-3, 16: 4.295567966e-4, 17: 9.708287803e-5})])
def test_llama3_scaling_keeps_blends_and_stretches(key, head_dim, factor, kept, blended):
    scaling = {key if k == "rope_type" else k: v for k, v in LLAMA3.items()} | {"factor": factor}
    plain, scaled = frequencies(head_dim), frequencies(head_dim, **scaling)
    assert torch.allclose(plain.double(), 500000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim), rtol=1e-6)
    assert torch.equal(scaled[:kept], plain[:kept])
    assert scaled[list(blended)].tolist() == pytest.approx(list(blended.values()), rel=1e-6)
    first = max(blended) + 1
    assert torch.allclose(scaled[first:], plain[first:] / factor, rtol=1e-6)


def test_known_frequencies_of_llama_3_1():
    freqs = frequencies(128, **LLAMA3)
    assert freqs[[28, 35, 63]].tolist() == pytest.approx([3.211445995e-3, 9.556212354e-5, 3.068925989e-7], rel=1e-6)


def test_an_unknown_scaling_is_an_error_and_none_is_plain():
    with pytest.raises(ValueError, match="yarn"):
        frequencies(128, rope_type="yarn", factor=8.0)
    assert torch.equal(frequencies(128, rope_type="default"), frequencies(128))


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.to("meta").to_empty(device="cpu").half()])
def test_casting_the_model_leaves_the_rotary_table_in_fp32(cast):
    model = cast(make(llama.ModelConfig(**{**vars(SHAPE), "head_dim": 128})))
    places = torch.tensor([[257, 4095, 8191]])
    cos, sin = model.rope(places)
    angles = places[..., None, None].double() * 500000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1, 3, 1, 64)
    assert (cos - angles.cos()).abs().max() < 1e-3 and (sin - angles.sin()).abs().max() < 1e-3


def test_rotation_of_bf16_is_done_in_fp32_and_rounded_once():
    x = torch.randn(1, 3, 4, 16).bfloat16()
    rope = make().rope(torch.tensor([[257, 4095, 8191]]))
    assert torch.equal(llama.apply_rope(x, *rope), llama.apply_rope(x.float(), *rope).bfloat16())


# -----------------------------------------------------------------------------
# documents stay apart

def test_attention_equals_naive_attention_within_documents():
    batch = random_batch(2, 60, 101, seed=3)
    q, k, v = (torch.randn(2, 60, h, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    got, want = llama.attend(q, k, v, make().documents(batch)), naive_attention(q, k, v, batch.borders)
    assert torch.allclose(got, want, atol=1e-12)
    grad = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad)):
        assert torch.allclose(a, b, atol=1e-12)


def test_a_document_in_a_pack_is_as_if_alone():
    model, second = make(), document(9, 8, 7, 6, 5, 4)
    alone = model.logits(torch.tensor([[9, 8, 7, 6, 5, 4]]))
    packs = [packed_logits(model, pack(document(*first), second))[:, 7:] for first in ([1, 2, 3, 4, 5, 6, 7], [70, 60, 50, 40, 30, 20, 10])]
    assert torch.equal(*packs)
    assert (packs[0] - alone).abs().max() < 1e-5
    assert pack(document(1, 2, 3), second).positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]


def test_the_loss_of_a_pack_is_the_sum_of_its_documents_losses():
    model, documents = make(), [(1, 2, 3, 4, 5), (6, 7), tuple(range(20, 60))]
    twin, want = transformers_twin(model), 0.0
    for tokens in documents:
        logits = twin(torch.tensor([tokens])).logits[0, :-1]
        want += F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
    assert model.loss([pack(*(document(*d) for d in documents))], 1).item() == pytest.approx(want, rel=1e-6)


def test_padding_changes_nothing_and_makes_no_nan():
    model, real = make(), document(1, 2, 3)
    want, want_grads = step_gradients(model, [pack(real)])
    loss, grads = step_gradients(model, [pack(real, document(0, 0, 0, 0, 0, learned=False))])
    assert loss == pytest.approx(want, rel=1e-6)
    assert_close(grads, want_grads, 1e-5)
    assert all(torch.isfinite(g).all() for g in grads.values())


# -----------------------------------------------------------------------------
# the loss, its chunks and its micro-batches

def chats():
    """Eight rows with 1, 6, 11 ... 36 learned tokens."""
    rng, rows = np.random.default_rng(0), []
    for learned in range(1, 41, 5):
        row = rng.integers(0, 101, 49, dtype=np.uint32)
        row[1:learned + 1] |= np.uint32(data.LEARN)
        row[0] |= np.uint32(data.START)
        rows.append(row)
    return np.stack(rows)


def test_the_cut_into_micro_batches_does_not_change_loss_or_gradients():
    model, rows = make(), chats()
    want = plain_loss(model, [data.Batch.from_rows(rows)])
    want_loss, want = want.item(), gradients(model, want)
    for size in (8, 2, 1):
        batches = [data.Batch.from_rows(rows[i:i + size]) for i in range(0, 8, size)]
        loss, grads = step_gradients(model, batches, run_layer=offload.run_layer)
        assert loss == pytest.approx(want_loss, rel=1e-6)
        for name in want:
            assert (grads[name] - want[name]).abs().max() <= 1e-6 * max(1, want[name].abs().max()), name


def test_a_micro_batch_without_anything_to_learn_adds_nothing():
    model, good, empty = make(), random_batch(2, 24, 101), random_batch(2, 24, 101, seed=1, ignored=1.0)
    assert len(empty.targets) == 0
    want, want_grads = step_gradients(model, [good], run_layer=offload.run_layer)
    for batches in ([good, empty], [empty, good], [empty, good, empty]):
        loss, grads = step_gradients(model, batches, run_layer=offload.run_layer)
        assert loss == want
        assert_close(grads, want_grads, 1e-6)
    loss, grads = step_gradients(model, [empty], count=1, run_layer=offload.run_layer)
    assert loss == 0 and all((g == 0).all() for g in grads.values())
    with torch.no_grad():
        assert model.loss([empty], 1).item() == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 32, 37, 370])
def test_the_chunk_size_changes_neither_loss_nor_gradients(chunk, tied):
    model = make(llama.ModelConfig(**{**vars(SHAPE), "tie_word_embeddings": tied}))
    row = np.arange(38, dtype=np.uint32)
    row[16:] |= np.uint32(data.LEARN)
    batch = data.Batch.from_rows(np.where(np.arange(38) == 0, row | data.START, row).astype(np.uint32)[None])
    want = plain_loss(model, [batch])
    loss, grads = step_gradients(model, [batch], chunk_size=chunk)
    assert loss == pytest.approx(want.item(), rel=1e-6)
    assert_close(grads, gradients(model, want), 1e-6)
    with torch.no_grad():
        assert model.loss([batch], 22, chunk_size=chunk).item() == pytest.approx(want.item(), rel=1e-6)


def test_a_factor_on_the_loss_scales_the_gradients():
    model, batch = make(), random_batch(2, 24, 101)
    _, want = step_gradients(model, [batch])
    want = {name: 3 * g for name, g in want.items()}
    assert_close(gradients(model, 3 * model.loss([batch], len(batch.targets))), want, 1e-6)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if torch.is_tensor(t) and not t.is_sparse:
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("train", [True, False])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(train):
    vocab, chunk = 20000, 32
    model = make(llama.ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=32, vocab_size=vocab))
    batch = random_batch(64, 64, vocab, ignored=0)
    with Largest() as largest, torch.set_grad_enabled(train):
        loss = model.loss([batch], len(batch.targets), offload.run_layer, chunk)
        if train:
            loss.backward()
    assert largest.numel == chunk * vocab


# -----------------------------------------------------------------------------
# bf16: sums are fp32

def test_gradients_of_a_thousand_micro_batches_do_not_saturate():
    config = llama.ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=64, vocab_size=64)
    model, batch = make(config, torch.bfloat16), random_batch(1, 8, 64, seed=5)
    _, few = step_gradients(model, [batch] * 4, count=1, run_layer=offload.run_layer)
    _, many = step_gradients(model, [batch] * 1000, count=1, run_layer=offload.run_layer)
    assert_close(many, {name: 250 * g.float() for name, g in few.items()}, 0.005)


def test_gradients_of_a_thousand_chunks_do_not_saturate():
    model, batch = make(dtype=torch.bfloat16), pack(document(*[7] * 1001))
    _, want = step_gradients(model, [batch], chunk_size=1000)
    loss, got = step_gradients(model, [batch], chunk_size=1)
    assert_close({"output": got["output.weight"]}, {"output": want["output.weight"]}, 0.01)
    assert loss == pytest.approx(plain_loss(make(dtype=torch.bfloat16).float(), [batch]).item(), rel=0.01)


def test_gradients_over_micro_batches_are_summed_in_fp32_and_rounded_once():
    model, batches = make(dtype=torch.bfloat16), [random_batch(2, 16, 101, seed=s) for s in range(5)]
    _, got = step_gradients(model, batches, count=100, run_layer=offload.run_layer)
    parts = [step_gradients(model, [b], count=100, run_layer=offload.run_layer)[1] for b in batches]
    for name in got:
        if name.startswith("layers."):
            assert torch.equal(got[name], sum(p[name].float() for p in parts).to(got[name].dtype)), name


# -----------------------------------------------------------------------------
# inference, initial weights

def test_logits_with_a_cache_equal_those_of_the_whole():
    model, tokens = make(), torch.randint(0, 101, (2, 20))
    want = model.logits(tokens)
    caches = [llama.KVCache(model.config, 20, model.norm.weight, batch_size=2) for _ in model.layers]
    got = [model.logits(tokens[:, a:b], caches) for a, b in ((0, 7), (7, 8), (8, 12), *((i, i + 1) for i in range(12, 20)))]
    assert [c.length for c in caches] == [20, 20]
    assert torch.allclose(torch.cat(got, 1), want[:, [6, 7, 11, *range(12, 20)]], atol=1e-5)


def test_initial_weights_are_given_by_the_seed():
    def weights(seed):
        model = llama.Llama(llama.ModelConfig())
        model.init_weights(seed)
        return dict(model.named_parameters())

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    for name, p in first.items():
        if p.dim() == 1:
            assert (p == 1).all()
        else:
            last = name.endswith(("wo.weight", "w2.weight"))
            assert not torch.equal(p, other[name])
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(8) if last else 0.02, rel=0.05), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_built_on_the_meta_device_becomes_the_same_model(dtype):
    config = llama.ModelConfig(**{**vars(SHAPE), "rope_scaling": LLAMA3, "tie_word_embeddings": dtype == torch.bfloat16})
    with torch.device("meta"):
        model = llama.Llama(config, dtype)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu").init_weights(3)
    assert (model.output.weight is model.tok_embeddings.weight) == config.tie_word_embeddings
    direct = llama.Llama(config, dtype)
    direct.init_weights(3)
    assert torch.equal(model.logits(torch.arange(50)[None]), direct.logits(torch.arange(50)[None]))
    assert {p.dtype for p in model.parameters() if p.dim() == 1} == {torch.float32}
    assert {p.dtype for p in model.parameters() if p.dim() == 2} == {dtype}


def test_a_tied_head_is_one_parameter():
    model = llama.Llama(llama.ModelConfig(**{**vars(SHAPE), "tie_word_embeddings": True}))
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())
