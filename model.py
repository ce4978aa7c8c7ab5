"""
Llama 3, written out: grouped-query attention, RMSNorm, rotary embedding, SwiGLU.

Shapes: B rows, T tokens a row, C = dim, H query heads, K key/value heads, D = head_dim, F = ffn_dim, V = vocab_size.

Training runs layer-major: all micro-batches of a step go through block 0, then all through block 1, and so on,
so in backward a block's parameters receive their complete gradient before the block below is touched.

References: Llama 3 (arXiv:2407.21783), RoPE (arXiv:2104.09864), RMSNorm (arXiv:1910.07467), GQA (arXiv:2305.13245).
"""

import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

if torch.cuda.is_available():  # slow to import, and of no use on a CPU
    from torch.nn.attention.varlen import varlen_attn
    # torch 2.11 takes grouped heads as they come, later versions want to be told
    VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass
class ModelConfig:
    dim: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32                 # its own number: some models have head_dim != dim / n_heads
    ffn_dim: int = 384
    vocab_size: int = 512
    max_seq_len: int = 8192            # the longest context the model was made for
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: dict | None = None   # Hugging Face's dict, type 'llama3'
    tie_word_embeddings: bool = False  # the output head is the embedding table


_LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
_LLAMA32 = {**_LLAMA31, "factor": 32.0}
PRESETS = {
    "debug": ModelConfig(),
    "llama3_8b": ModelConfig(4096, 32, 32, 8, 128, 14336, 128256, 8192),
    "llama3.1_8b": ModelConfig(4096, 32, 32, 8, 128, 14336, 128256, 131072, rope_scaling=_LLAMA31),
    "llama3.2_1b": ModelConfig(2048, 16, 32, 8, 64, 8192, 128256, 131072, rope_scaling=_LLAMA32, tie_word_embeddings=True),
    "llama3.2_3b": ModelConfig(3072, 28, 24, 8, 128, 8192, 128256, 131072, rope_scaling=_LLAMA32, tie_word_embeddings=True),
}


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """
    Angle per position of each pair of channels, fp32 [D/2].
    rope_scaling of type 'llama3' (Llama 3.1 model card): wavelengths longer than original/low are stretched by
    'factor', shorter than original/high are kept, those between are blended. Any other type raises ValueError.
    """
    freqs = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim)
    scaling = config.rope_scaling
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return freqs
    if kind != "llama3":
        raise ValueError(f"rope_scaling type '{kind}' is not supported, only 'llama3' is")
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)                           # 0: stretched, 1: kept
    return (1 - blend) * freqs / factor + blend * freqs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., C] in any dtype, weight [C] fp32 -> like x; the arithmetic is fp32."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (h * weight).to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Rotates channel pairs (i, i + D/2), Hugging Face's order. x [B, T, H, D] in any dtype,
    cos and sin [B, T, 1, D/2] fp32 -> like x; the arithmetic is fp32.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    """
    Causal attention that stays within documents. q [B, T, H, D], k and v [B, S, K, D] -> [B, T, H, D].
    docs is either the documents' borders in the flattened row, int32 [documents + 1] (CUDA, 16-bit),
    or a mask, bool [B, 1, T, S], True where a query may look.
    """
    if docs.dim() == 1:
        y = varlen_attn(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), docs, docs, q.size(1), q.size(1),
                        window_size=(-1, 0), **VARLEN_GQA)
        return y.view(q.shape)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=docs, enable_gqa=True).transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))  # fp32 in every model: 0.003 % of the memory

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, dtype):
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=False, dtype=dtype)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False, dtype=dtype)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False, dtype=dtype)
        self.wo = nn.Linear(q_dim, config.dim, bias=False, dtype=dtype)

    def forward(self, x, rope, docs, cache=None):
        B, T, _ = x.shape
        q = apply_rope(self.wq(x).view(B, T, -1, self.head_dim), *rope)
        k = apply_rope(self.wk(x).view(B, T, -1, self.head_dim), *rope)
        v = self.wv(x).view(B, T, -1, self.head_dim)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.wo(attend(q, k, v, docs).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, dtype):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False, dtype=dtype)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False, dtype=dtype)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False, dtype=dtype)

    def hidden(self, x):
        return F.silu(self.w1(x)) * self.w3(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, dtype):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, dtype)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config, dtype)

    def attended(self, x, rope, docs, cache=None):
        """The attention half: x [B, T, C] -> h [B, T, C]."""
        return x + self.attention(self.attention_norm(x), rope, docs, cache)

    def hidden(self, h):
        """The other half but for its last product, which backward never needs again: h [n, C] -> a [n, F]."""
        return self.feed_forward.hidden(self.ffn_norm(h))

    def forward(self, x, rope, docs, cache=None):
        h = self.attended(x, rope, docs, cache).flatten(0, 1)
        return torch.addmm(h, self.hidden(h), self.feed_forward.w2.weight.T).view(x.shape)


class Llama(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32):
        """Matrices are kept in dtype, norm weights in fp32. Values are unset until init_weights or a checkpoint fills them."""
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rope_freqs", rope_frequencies(config), persistent=False)
        self.cross_entropy = cross_entropy_grad  # compile_blocks puts the compiled one here

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # .to(bfloat16) or .to_empty() must not touch the fp32 table: make it anew
        if not self.rope_freqs.is_meta:
            self.rope_freqs = rope_frequencies(self.config).to(self.rope_freqs.device)
        if self.config.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight  # to_empty() makes two of them
        return self

    @torch.no_grad()
    def init_weights(self, seed: int = 0):
        """
        Random start. Embedding, head and all projections: normal, std 0.02; wo and w2, which write to the residual
        stream: std 0.02 / sqrt(2 n_layers) (GPT-2); norms: 1. Draws on the parameters' device.
        """
        generator = torch.Generator(self.rope_freqs.device).manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0)
            else:
                last = name.endswith(("wo.weight", "w2.weight"))
                p.normal_(0.0, 0.02 / math.sqrt(2 * self.config.n_layers) if last else 0.02, generator=generator)

    def compile_blocks(self):
        """torch.compile what repeats: the halves of a block, and the loss of one chunk."""
        for block in self.layers:
            block.attended, block.hidden = torch.compile(block.attended), torch.compile(block.hidden)
        self.cross_entropy = torch.compile(cross_entropy_grad, dynamic=True)

    def rope(self, positions: torch.Tensor):
        """positions [B, T] -> cos, sin, each [B, T, 1, D/2] fp32."""
        angles = positions[..., None, None].float() * self.rope_freqs
        return angles.cos(), angles.sin()

    def documents(self, batch) -> torch.Tensor:
        """What attend() needs to keep a batch's documents apart: borders where the fast kernel runs, else a mask."""
        weight = self.tok_embeddings.weight
        if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
            return batch.borders
        B, T = batch.tokens.shape
        document = torch.bucketize(torch.arange(B * T, device=weight.device), batch.borders, right=True).view(B, T)
        return (document[:, None, :, None] == document[:, None, None, :]).tril()  # [B, 1, T, T]

    def loss(self, batches, count: int, run_layer=None, chunk_size: int = 1024) -> torch.Tensor:
        """
        Cross-entropy of a whole step, fp32 scalar: the sum over all supervised tokens of all micro-batches
        divided by count. Every batch has tokens and positions [B, T], borders (see attend), and, for its n
        supervised tokens, index [n] into the flattened row and targets [n].
        run_layer(block, xs, contexts) -> ys runs one block over all micro-batches; offload.py has one that recomputes.
        """
        contexts = [(self.rope(b.positions), self.documents(b)) for b in batches]
        xs = _Embedding.apply(self.tok_embeddings.weight, *[b.tokens for b in batches])
        for block in self.layers:
            xs = run_layer(block, xs, contexts) if run_layer else [block(x, *c) for x, c in zip(xs, contexts)]
        return _HeadLoss.apply(self, batches, count, chunk_size, torch.is_grad_enabled(),
                               self.norm.weight, self.output.weight, *xs)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, caches=None) -> torch.Tensor:
        """
        fp32 logits [B, T, V] of tokens [B, T], for inference. With caches (a KVCache per layer) the tokens continue
        what the caches hold, and only the last position's logits [B, 1, V] are made.
        """
        B, T = tokens.shape
        start = caches[0].length if caches else 0
        positions = torch.arange(start, start + T, device=tokens.device)
        docs = (positions[:, None] >= torch.arange(start + T, device=tokens.device)).expand(B, 1, T, start + T)
        rope = self.rope(positions[None])
        x = self.tok_embeddings(tokens)
        for i, block in enumerate(self.layers):
            x = block(x, rope, docs, caches[i] if caches else None)
        return mm_fp32(self.norm(x[:, -1:] if caches else x), self.output.weight.T)


class KVCache:
    """Keys and values of the tokens seen so far, [B, max_len, K, D] each."""

    def __init__(self, config: ModelConfig, max_len: int, like: torch.Tensor, batch_size: int = 1):
        shape = (batch_size, max_len, config.n_kv_heads, config.head_dim)
        self.k, self.v, self.length = like.new_empty(shape), like.new_empty(shape), 0

    def append(self, k, v):
        end = self.length + k.size(1)
        self.k[:, self.length:end], self.v[:, self.length:end], self.length = k, v, end
        return self.k[:, :end], self.v[:, :end]


def mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., n, k] @ b [k, m] with an fp32 result: not rounded to 16 bits on the way where the device allows."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a.flatten(0, -2), b, out_dtype=torch.float32).view(*a.shape[:-1], -1)
    return (a @ b).float()


def addmm_fp32_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    """total += a @ b, total in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def round_in_place(total: torch.Tensor, dtype: torch.dtype, part: int = 2 ** 24) -> torch.Tensor:
    """fp32 -> the same numbers rounded to dtype, of 16 bits, in the memory they lay in: `part` at a time over those already read."""
    if total.dtype == dtype:
        return total
    wide, narrow = total.view(-1), total.view(-1).view(dtype)[:total.numel()]
    for a in range(0, total.numel(), part):
        narrow[a:a + part] = wide[a:a + part].to(dtype)
    return narrow.view(total.shape)


def cross_entropy_grad(logits: torch.Tensor, targets: torch.Tensor, scale: float, dtype: torch.dtype):
    """
    logits [n, V] fp32 (overwritten), targets [n] -> summed loss (fp32 scalar), and the gradient of scale x loss
    with respect to the logits, [n, V] in dtype: scale * (softmax - one_hot).
    """
    rows = targets[:, None]
    logits -= logits.amax(-1, keepdim=True)
    right = logits.gather(1, rows)
    probs = logits.exp_()
    total = probs.sum(-1, keepdim=True)
    loss = (total.log() - right).sum()
    grad = probs * (scale / total)
    column = torch.arange(logits.size(1), device=logits.device)
    return loss, torch.where(column == rows, grad - scale, grad).to(dtype)


class _Embedding(torch.autograd.Function):
    """Table look-up for all micro-batches; the table's gradient is summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx, weight, *tokens):
        ctx.tokens, ctx.like = tokens, weight
        return tuple(F.embedding(t, weight) for t in tokens)

    @staticmethod
    def backward(ctx, *grads):
        grad, tokens = torch.cat(grads), torch.cat(ctx.tokens)
        if not (grad.is_cuda and tokens.numel() > 3072):
            grad = grad.float()  # CUDA's kernel for many tokens sums in fp32 anyway, the others in the gradient's dtype
        total = torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.like.size(0), -1, False)
        return round_in_place(total, ctx.like.dtype), *[None] * len(ctx.tokens)


class _HeadLoss(torch.autograd.Function):
    """
    Final norm, output product and cross-entropy of all micro-batches, chunk by chunk of supervised tokens: no tensor
    is larger than chunk_size x V (but the head's own gradient), ignored tokens never reach the product, and as every
    chunk's gradient is made while its logits are at hand, nothing is kept or recomputed. Sums are fp32.
    """

    @staticmethod
    def forward(ctx, model, batches, count, chunk_size, train, norm_weight, weight, *xs):
        loss = torch.zeros((), dtype=torch.float32, device=weight.device)
        grad_norm, grad_xs = torch.zeros_like(norm_weight), []
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train else None
        norm_weight = norm_weight.detach().requires_grad_(train)
        for x, batch in zip(xs, batches):
            grad_x = torch.zeros_like(x) if train else None
            for index, targets in zip(batch.index.split(chunk_size), batch.targets.split(chunk_size)):
                x_part = x.detach().flatten(0, 1).index_select(0, index).requires_grad_(train)  # [n, C]
                with torch.set_grad_enabled(train):
                    normed = rms_norm(x_part, norm_weight, model.norm.eps)
                h = normed.detach()
                logits = mm_fp32(h, weight.T)
                if not train:
                    loss += F.cross_entropy(logits, targets, reduction="sum")
                    continue
                loss_part, grad = model.cross_entropy(logits, targets, 1.0 / count, weight.dtype)
                del logits
                loss += loss_part
                addmm_fp32_(grad_weight, grad.T, h)
                grad_part, grad_norm_part = torch.autograd.grad(normed, (x_part, norm_weight), grad @ weight)
                grad_x.flatten(0, 1).index_copy_(0, index, grad_part)
                grad_norm += grad_norm_part
            grad_xs.append(grad_x)
        ctx.dtype, ctx.grads = weight.dtype, (grad_norm, grad_weight, *grad_xs)
        return loss / count

    @staticmethod
    def backward(ctx, grad):
        grad_norm, grad_weight, *grad_xs = (g.mul_(grad) for g in ctx.grads)
        del ctx.grads
        return None, None, None, None, None, grad_norm, round_in_place(grad_weight, ctx.dtype), *grad_xs
