"""
8-bit Adam, stepped inside backward, with its states paged through a few device buffers.

schedule          learning rate of a step, a pure function
Adam8bit          the default: bitsandbytes' 8-bit code books and 256-element blocks, states in pinned host memory,
                  bf16 weights rounded stochastically, weight decay inside that one rounding
StockOptimizer    bitsandbytes' own PagedAdamW8bit, or torch's AdamW: to compare with

A step is: begin(lr); loss.backward(), in which a hook per parameter takes each gradient as it is completed and frees
it; finish(), which says whether every parameter had one; with clipping, updates begin there.

References: Adam (arXiv:1412.6980), decoupled weight decay (arXiv:1711.05101), 8-bit blockwise states (arXiv:2110.02861),
stochastic rounding for bf16 weights (arXiv:2010.06192).
"""

import collections
import functools
import hashlib
import importlib
import logging
import math
import sys

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # Windows, CPU builds of torch: Adam8bit takes the slower path in plain torch
    triton = None

BLOCK = 256  # elements that share one scale
MIN_8BIT = 8192  # smaller tensors keep fp32 states, as do all vectors (norms)
PARKING = 2 ** 28  # bytes of gradients that may be on their way to the host at one time, with clipping


def schedule(step: int, max_steps: int, warmup_steps: int, lr: float, min_lr: float, kind: str) -> float:
    """
    Learning rate of step 0, 1, ... max_steps - 1 (nanoGPT's form: the first step is not wasted on lr 0).
    kind: 'cosine', 'linear' or 'constant' after the warmup. min_lr above lr counts as lr.
    """
    # 1) linear warmup
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    # 2) no decay
    if kind == "constant":
        return lr
    # 3) past the end
    floor = min(min_lr, lr)
    if step >= max_steps:
        return floor
    # 4) decay from lr to the floor; max_steps > step >= warmup_steps, so this divides by at least 1
    ratio = (step - warmup_steps) / (max_steps - warmup_steps)
    return floor + (lr - floor) * (1 - ratio if kind == "linear" else 0.5 * (1 + math.cos(math.pi * ratio)))


# -----------------------------------------------------------------------------
# the 8-bit update, in plain torch: the reference, and what runs on the CPU

def bitsandbytes(module: str):
    """
    A module of bitsandbytes, imported when first needed (it takes seconds) and quietly: where the CPU has AVX512-BF16 it
    would ask the network for a 4-bit product, by way of the package `kernels`, and then report that it has none.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    kernels = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # importing it fails
    try:
        return importlib.import_module(f"bitsandbytes.{module}")
    finally:
        del sys.modules["kernels"]
        if kernels:
            sys.modules["kernels"] = kernels


@functools.cache
def code_book(signed: bool, device: torch.device):
    """
    bitsandbytes' dynamic map, fp32 [256] ascending in [-1, 1] or [0, 1]; the 255 midpoints between its values, and
    infinity; and for the upper 16 bits of an fp32 number the code of the smallest number that has them, int32 [65536].
    """
    book = bitsandbytes("functional").create_dynamic_map(signed)
    middle = torch.cat([(book[1:] + book[:-1]) / 2, torch.tensor([torch.inf])])
    upper = torch.arange(-2 ** 15, 2 ** 15, dtype=torch.int32).roll(2 ** 15)
    smallest = (upper * 2 ** 16 + (upper < 0) * 0xFFFF).int().view(torch.float32)
    return book.to(device), middle.to(device), torch.bucketize(smallest, middle[:-1], out_int32=True).to(device)


def quantize(x: torch.Tensor, signed: bool):
    """
    x fp32 [blocks, 256] -> nearest codes uint8 [blocks, 256] and scales fp32 [blocks]. A signed zero keeps its exact code.
    An unsigned one gets the smallest positive value: v rounded to 0 while m is not would make the next step m / eps.
    """
    _, middle, table = code_book(signed, x.device)
    scale = x.abs().amax(1)
    unit = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).flatten()
    # numbers with the same upper 16 bits have the same code or, past the one midpoint that may lie between them, the next
    codes = table.index_select(0, (unit.view(torch.int32) >> 16) & 0xFFFF)
    codes += unit > middle.index_select(0, codes)
    return codes.clamp_(min=0 if signed else 1).to(torch.uint8).view(x.shape), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """codes uint8 [blocks, 256], scale fp32 [blocks] -> fp32 [blocks, 256]."""
    return code_book(signed, codes.device)[0][codes.int()] * scale[:, None]


def as_int32(bits: int) -> int:
    """The signed 32-bit number with these 32 bits."""
    return (bits ^ 0x80000000) - 0x80000000


def random_bits(offset: int, n: int, keys: tuple[int, int], device) -> torch.Tensor:
    """
    32 random bits for each of the elements offset ... offset + n, as int32 [n]: a hash of the element's place and the
    two keys (lowbias32, C. Wellons, github.com/skeeto/hash-prospector), so the bits depend on nothing else.
    """
    x = torch.arange(offset, offset + n, dtype=torch.int32, device=device).bitwise_xor_(as_int32(keys[0]))
    x.bitwise_xor_(x >> 16 & 0xFFFF).mul_(0x7FEB352D).add_(as_int32(keys[1]))  # shifts are arithmetic: the sign is masked off
    x.bitwise_xor_(x >> 15 & 0x1FFFF).mul_(as_int32(0x846CA68B))
    return x.bitwise_xor_(x >> 16 & 0xFFFF)


def adam8bit_torch(p, g, state, h, offset, keys, scale):
    """
    One Adam step on a flat slice, in place.
      p      weights [n], bf16 or fp32                 g      gradient [n]
      state  dict: m, v uint8 [blocks * 256], m_scale, v_scale fp32 [blocks], residual int8 [blocks * 256] or None
      h      Hyper                                     offset place of the slice in its parameter, for the random bits
      keys   two 32-bit ints, or None: round to nearest
      scale  fp32 [1], multiplies the gradient (clipping); NaN: nothing is updated
    update = lr * m^ / (sqrt(v^) + eps), decay folded in: p <- round(p * (1 - lr * wd) - update), rounded once.
    """
    if torch.isnan(scale):
        return
    n, blocks = p.numel(), state["m_scale"].numel()

    def pad(x):
        return torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - n)).view(blocks, BLOCK)

    g = pad(g) * scale
    m = torch.lerp(g, dequantize(state["m"].view(blocks, BLOCK), state["m_scale"], True), h.beta1)
    v = torch.lerp(g * g, dequantize(state["v"].view(blocks, BLOCK), state["v_scale"], False), h.beta2)
    update = (h.step_size * m / (v.sqrt() + h.eps)).view(-1)[:n]
    for key, x, signed in (("m", m, True), ("v", v, False)):
        codes, scales = quantize(x, signed)
        state[key].copy_(codes.view(-1))
        state[f"{key}_scale"].copy_(scales)
    residual = state.get("residual")
    weights = p.float() if residual is None else join_residual(p, residual[:n])
    weights = weights * h.decay - update
    if p.dtype == torch.float32:
        p.copy_(weights)
        return
    bits = weights.view(torch.int32)
    random = random_bits(offset, n, keys, p.device) if keys else torch.full_like(bits, 0x8000 if residual is None else 0x8100)
    if residual is None:
        if keys is None:
            random += (bits >> 16 & 1) - 1  # to nearest, ties to even
        p.copy_(from_high_bits(bits + (random & 0xFFFF) >> 16))
    else:
        bits = bits + (random & 0x1FF) >> 9  # 23 bits are kept; the weight is their upper 16, rounded with other random bits
        high = bits + (random >> 9 & 0x7F) >> 7  # (to nearest, the model would not see an update below half a step of bf16)
        residual[:n].copy_(bits - (high << 7))  # in [-127, 127]
        p.copy_(from_high_bits(high))


def from_high_bits(high: torch.Tensor) -> torch.Tensor:
    """bf16 numbers from their 16 bits, given as int32."""
    return high.to(torch.int16).view(torch.bfloat16)


def join_residual(p: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 weights [n] that bf16 p [n] and the residual, int8 [n] in 1/128 of p's last place, stand for."""
    return ((p.view(torch.int16).int() << 7) + residual << 9).view(torch.float32)


class Hyper:
    """What the update needs of the settings at one step: bias corrections are folded into step_size and eps."""

    def __init__(self, lr, beta1, beta2, eps, weight_decay, step):
        correction1, correction2 = 1 - beta1 ** step, math.sqrt(1 - beta2 ** step)
        self.beta1, self.beta2 = beta1, beta2
        self.step_size, self.eps, self.decay = lr * correction2 / correction1, eps * correction2, 1 - lr * weight_decay


def random_keys(seed: int, step: int, name: str) -> tuple[int, int]:
    """Two 32-bit keys for a parameter at a step."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


# -----------------------------------------------------------------------------
# the same update as one Triton kernel: p, g, m, v are read once, p, m, v written once

if triton:
    # Both code books are 7 decades; decade d holds n = first * 2^d evenly spaced values (first = 1 signed, 2 unsigned).
    # Counting k = n + place within the decade numbers the values 1, 2, 3 ... without a gap, so the exponent of k as a
    # float is the decade, and no table is needed. k = 128 * first stands for 1.0, k = first - 1 for 0. The kernel is
    # bound by arithmetic, not by memory: every instruction per element costs about 0.3 ms for 8 G elements on an H200.

    # Conversions between int and float share a slow unit with exp2, so small integers pass through the mantissa of
    # 2^23 + i instead (MAGIC); adding 1.5 * 2^23 rounds a float to the nearest integer.

    MAGIC: tl.constexpr = tl.constexpr(0x4B000000)   # the bits of 2^23
    ROUND: tl.constexpr = tl.constexpr(12582912.0)   # 1.5 * 2^23, bits 0x4B400000

    @triton.jit
    def _number_to_value(k, first: tl.constexpr):
        bits = ((k | MAGIC).to(tl.float32, bitcast=True) - 8388608.0).to(tl.int32, bitcast=True)
        exponent = bits >> 23                                                             # 127 + log2 n
        mantissa = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)             # 1 + place / n
        half = (253 - exponent << 23).to(tl.float32, bitcast=True)                        # 0.5 / n
        decade = (exponent | MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + 127 + 5 + first)
        value = tl.exp2(decade * 3.321928094887362) * (mantissa * 0.9 + (half * 0.9 - 0.8))
        value = tl.minimum(value, 1.0)                                                    # k = 128 * first
        return value if first == 1 else tl.where(k == 1, 0.0, value)                      # signed: 10^-133 is 0

    @triton.jit
    def _value_to_number(x, first: tl.constexpr):
        # log10 from the bits of the float, low by up to 0.026, and by 0.3 more on purpose: then the decade is the right
        # one or the one below, and one comparison with the midpoint between the two decades decides
        bits = x.to(tl.int32, bitcast=True)
        decade = (bits >> 9 | MAGIC).to(tl.float32, bitcast=True) * 1.83734e-5 + (6.7 - 127 * 0.30103 - 154.1274 - 0.5)
        decade = tl.minimum(tl.maximum(decade, 0.0), 6.0) + ROUND
        n = (decade.to(tl.int32, bitcast=True) - (0x4B400000 - 126 - first) << 23).to(tl.float32, bitcast=True)
        unit = x * tl.exp2((6 * 3.321928094887362) - (decade - ROUND) * 3.321928094887362)  # in [0.1, 2.2)
        above = unit * n - n > 0.9
        k = n * tl.where(above, unit * (2 / 9) + (16 / 9), unit * (10 / 9) + (8 / 9)) - 0.5
        k = tl.minimum(k, tl.where(above, 512.0, 2.0 * n - 1.0)) + ROUND
        k = k.to(tl.int32, bitcast=True) - 0x4B400000
        k = tl.where(x < 2.75e-7, 0, k) if first == 1 else tl.maximum(k, 2)                # unsigned: never 0, see quantize
        return tl.where(x > 1.0 - 0.225 / (64 * first), 128 * first, k)

    @triton.jit(do_not_specialize=["n", "offset", "key1", "key2"])
    def _adam8bit_kernel(p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, residual_ptr, scale_ptr,
                         n, offset, key1, key2, beta1, beta2, eps, step_size, decay,
                         STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr, FP32: tl.constexpr,
                         EVEN: tl.constexpr, ROWS: tl.constexpr):
        scale = tl.load(scale_ptr)
        if scale != scale:  # a gradient of this step was not finite
            return
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
        inside = at < n if not EVEN else None  # a mask would split the loads into single bytes
        row_inside = rows * 256 < n if not EVEN else None
        g = tl.load(g_ptr + at, inside).to(tl.float32) * scale
        p = tl.load(p_ptr + at, inside)
        m_number = tl.load(m_ptr + at, inside).to(tl.int32) - 127
        v_number = tl.load(v_ptr + at, inside).to(tl.int32) + 1
        m_scale = tl.load(m_scale_ptr + rows, row_inside)
        v_scale = tl.load(v_scale_ptr + rows, row_inside)
        if not EVEN:
            g = tl.where(inside, g, 0.0)  # what lies past the end must not raise the scales
            m_number, v_number = tl.where(inside, m_number, 0), tl.where(inside, v_number, 1)

        m = _number_to_value(tl.abs(m_number), 1) * m_scale[:, None]
        m = (m.to(tl.int32, bitcast=True) | m_number & -0x80000000).to(tl.float32, bitcast=True)  # with the sign
        v = _number_to_value(v_number, 2) * v_scale[:, None]
        m = g + beta1 * (m - g)
        v = g * g + beta2 * (v - g * g)
        update = step_size * m / (tl.sqrt(v) + eps)

        m_scale, v_scale = tl.max(tl.abs(m), 1), tl.max(v, 1)
        m_number = _value_to_number(tl.abs(m) * (1.0 / tl.maximum(m_scale, 1.1754943508222875e-38))[:, None], 1)
        v_number = _value_to_number(v * (1.0 / tl.maximum(v_scale, 1.1754943508222875e-38))[:, None], 2)
        m_code = tl.where(m < 0, 127 - tl.minimum(m_number, 127), 127 + m_number)
        tl.store(m_ptr + at, m_code.to(tl.uint8), inside)
        tl.store(v_ptr + at, (v_number - 1).to(tl.uint8), inside)
        tl.store(m_scale_ptr + rows, m_scale, row_inside)
        tl.store(v_scale_ptr + rows, v_scale, row_inside)

        if FP32:
            tl.store(p_ptr + at, p * decay - update, inside)
        else:
            bits = p.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            if RESIDUAL:
                bits = (bits.to(tl.int32) + (tl.load(residual_ptr + at, inside).to(tl.int32) << 9)).to(tl.uint32)
            bits = (bits.to(tl.float32, bitcast=True) * decay - update).to(tl.uint32, bitcast=True)
            if STOCHASTIC:
                x = (at + offset).to(tl.uint32) ^ key1.to(tl.uint32)
                x = (x ^ (x >> 16)) * 0x7FEB352D + key2.to(tl.uint32)
                x = (x ^ (x >> 15)) * 0x846CA68B
                random = x ^ (x >> 16)
            if RESIDUAL:
                if not STOCHASTIC:
                    random = tl.full(at.shape, 0x8100, tl.uint32)
                bits = bits + (random & 0x1FF) >> 9
                high = bits + (random >> 9 & 0x7F) >> 7
                tl.store(residual_ptr + at, (bits - (high << 7)).to(tl.int8), inside)
            else:
                if STOCHASTIC:
                    high = bits + (random & 0xFFFF) >> 16
                else:
                    high = bits + 0x7FFF + (bits >> 16 & 1) >> 16
            tl.store(p_ptr + at, high.to(tl.uint16).to(tl.bfloat16, bitcast=True), inside)


def adam8bit_triton(p, g, state, h, offset, keys, scale, rows: int = 1, warps: int = 1):
    """adam8bit_torch as one kernel."""
    n = p.numel()
    keys32 = map(as_int32, keys or (0, 0))  # or Triton compiles for each width
    _adam8bit_kernel[(triton.cdiv(n, rows * BLOCK),)](
        p, g, state["m"], state["v"], state["m_scale"], state["v_scale"], state.get("residual"), scale,
        n, offset, *keys32, h.beta1, h.beta2, h.eps, h.step_size, h.decay,
        STOCHASTIC=keys is not None, RESIDUAL=state.get("residual") is not None, FP32=p.dtype == torch.float32,
        EVEN=n % (rows * BLOCK) == 0, ROWS=rows, num_warps=warps)


@functools.cache
def kernel_problem(device: torch.device) -> str:
    """Why the kernel can't run on this GPU, in a few words, or '' if it was tried and can: it needs a C compiler, too."""
    if triton is None:
        return "triton is not installed"
    p = torch.zeros(BLOCK, dtype=torch.bfloat16, device=device)
    state = {k: torch.zeros(BLOCK, dtype=torch.uint8, device=device) for k in "mv"}
    state |= {f"{k}_scale": torch.zeros(1, device=device) for k in "mv"}
    try:
        adam8bit_triton(p, p, state, Hyper(0.0, 0.9, 0.95, 1e-8, 0.0, 1), 0, (0, 0), torch.ones(1, device=device))
    except Exception as error:  # a compiler can fail in any way
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    return ""


def adam8bit_step(p, g, state, h, offset, keys, scale):
    """The kernel where it runs, else plain torch, in parts so that its fp32 temporaries stay small."""
    if p.is_cuda and not kernel_problem(p.device):
        return adam8bit_triton(p, g, state, h, offset, keys, scale)
    part = 2 ** 24 if p.is_cuda else 2 ** 17  # on a CPU they should fit its cache
    for a in range(0, p.numel(), part):
        blocks = slice(a // BLOCK, (a + part) // BLOCK)
        piece = {k: x and None if x is None else x[blocks if k.endswith("scale") else slice(a, a + part)]
                 for k, x in state.items()}
        adam8bit_torch(p[a:a + part], g[a:a + part], piece, h, offset + a, keys, scale)


def adam32_step(p, g, m, v, h, keys, scale):
    """One Adam step with fp32 states m and v, in place; bf16 weights are rounded as in adam8bit_torch. scale NaN: no step."""
    g = g.float() * scale
    new_m, new_v = torch.lerp(m, g, 1 - h.beta1), torch.lerp(v, g * g, 1 - h.beta2)
    weights = p.float() * h.decay - h.step_size * new_m / (new_v.sqrt() + h.eps)
    if keys and p.dtype != torch.float32:
        random = random_bits(0, p.numel(), keys, p.device).view(p.shape)
        weights = from_high_bits(weights.view(torch.int32) + (random & 0xFFFF) >> 16)
    for old, new in ((m, new_m), (v, new_v), (p, weights)):  # decided on the device: the host does not wait for scale
        old.copy_(torch.where(scale.isnan(), old, new.to(old.dtype)))


# -----------------------------------------------------------------------------
# paging

class Pages:
    """
    Pages of optimizer state that live in host memory and are used in a fixed order, round and round.
    use(k) gives page k on the device, ready for the compute stream; done(k) sends it home and starts the copy of the
    page that needs the buffer next. A page's copies in and out and the compute between them are ordered by events
    only: nothing waits for the whole device. Without a GPU the page in host memory is itself what use() returns.
    """

    def __init__(self, sizes: list[int], home_sizes: list[int], device: torch.device, buffer_bytes: int, resident: list[int],
                 allocate, ahead: bool = True):
        """
        sizes: bytes per page, of which the first home_sizes are sent home. buffer_bytes: device memory to page through
        (at least 3 pages). resident: pages that stay on the device and never travel. allocate(nbytes) -> host memory,
        uint8, zeroed. ahead: fetch the next round's pages as buffers fall free, rather than wait for restart().
        """
        self.cuda, self.sizes, self.home_sizes, self.ahead = device.type == "cuda", sizes, home_sizes, ahead
        self.resident = {k: torch.zeros(sizes[k], dtype=torch.uint8, device=device) for k in resident if self.cuda}
        self.paged = [k for k in range(len(sizes)) if k not in self.resident]
        host = allocate(sum(sizes[k] for k in self.paged))
        self.host = dict(zip(self.paged, host.split([sizes[k] for k in self.paged]))) if self.paged else {}
        self.host_bytes = host.numel()
        if self.cuda and self.paged:
            largest = max(sizes[k] for k in self.paged)
            count = min(len(self.paged), max(3, buffer_bytes // largest))
            self.buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
            self.in_stream, self.out_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
            if ahead:
                self.restart()

    def restart(self):
        """Fill the buffers with the first pages, after all that was sent home or written to at_rest() pages."""
        if not self.cuda or not self.paged:
            return
        self.in_stream.wait_stream(torch.cuda.current_stream())
        self.in_stream.wait_stream(self.out_stream)
        self.ready, self.next = {}, 0
        for buffer in self.buffers:
            self.fetch(buffer)

    def fetch(self, buffer, free=None):
        if self.next >= len(self.paged) and not self.ahead:
            return
        k = self.paged[self.next % len(self.paged)]
        self.next += 1
        if free is not None:
            self.in_stream.wait_event(free)
        with torch.cuda.stream(self.in_stream):
            page = buffer[:self.sizes[k]].copy_(self.host[k], non_blocking=True)
        self.ready[k] = (buffer, page, self.in_stream.record_event())

    def use(self, k: int) -> torch.Tensor:
        if k in self.resident:
            return self.resident[k]
        if not self.cuda:
            return self.host[k]
        _, page, arrived = self.ready[k]
        torch.cuda.current_stream().wait_event(arrived)
        return page

    def done(self, k: int):
        if not self.cuda or k in self.resident:
            return
        buffer, page, _ = self.ready.pop(k)
        self.out_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out_stream):
            self.host[k][:self.home_sizes[k]].copy_(page[:self.home_sizes[k]], non_blocking=True)
        self.fetch(buffer, self.out_stream.record_event())

    def send(self, k: int, source: torch.Tensor, into) -> object:
        """Copy a device tensor to into(page k), wherever the page lives; returns the event to wait for before source is freed."""
        if k in self.resident or not self.cuda:
            into(self.resident.get(k, self.host.get(k))).copy_(source)
            return None
        self.out_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out_stream):
            into(self.host[k]).copy_(source, non_blocking=True)
        return self.out_stream.record_event()

    def at_rest(self) -> list[torch.Tensor]:
        """All pages as they stand between steps, to read or to set (then call restart)."""
        if self.cuda:
            torch.cuda.synchronize()
        return [self.resident[k] if k in self.resident else self.host[k] for k in range(len(self.sizes))]


# -----------------------------------------------------------------------------
# optimizers

class GradientError(RuntimeError):
    """A parameter got no gradient."""


class NonFiniteGradient(RuntimeError):
    """A gradient was NaN or infinite, found before anything was updated."""


class _InBackward:
    """What both optimizers share: a hook per parameter, gradient norms, and the check that no parameter was left out."""

    def __init__(self, named_params):
        self.names = {p: name for name, p in named_params}
        self.steps = 0
        self.metering = False  # Adam8bit: measure what the next step does to the weights, for meter()
        for p in self.names:
            p.register_post_accumulate_grad_hook(self.hook)

    def begin(self, lr: float):
        """Before backward: open step number self.steps, with this learning rate."""
        self.lr, self.norms = lr, {}
        self.steps += 1

    def hook(self, p):
        grad, p.grad = p.grad, None
        if grad is None:  # a function returned None for it; finish says so
            return
        self.norms[p] = torch.linalg.vector_norm(grad, dtype=torch.float32)
        self.take(p, grad)

    def finish(self, later: bool = False) -> torch.Tensor:
        """
        After backward: the global gradient norm, fp32 scalar on the device. GradientError names what got no gradient.
        later: what is left of the step may wait for catch_up().
        """
        missing = [name for p, name in self.names.items() if p not in self.norms]
        if missing:
            raise GradientError(f"no gradient reached {', '.join(missing[:5])}" + (" ..." if len(missing) > 5 else ""))
        return torch.linalg.vector_norm(torch.stack(list(self.norms.values())))

    def catch_up(self, params=None):
        """Finish what finish(later=True) left to do, as far as these parameters need it; None: all of it."""

    def worst(self) -> str:
        """Name of the first parameter whose gradient was not finite in the last step, or ''. Waits for the device."""
        return next((self.names[p] for p, norm in self.norms.items() if not torch.isfinite(norm)), "")


class Adam8bit(_InBackward):
    """
    Adam with decoupled weight decay. Matrices of at least MIN_8BIT elements: 8-bit states, paged. Vectors (norms) and
    small tensors: fp32 states, kept on the device; vectors get no decay. States are known by parameter name and
    independent of how pages are cut.

    With grad_clip the step can't begin before all gradients are known: the hooks park them in host memory, with the
    page they belong to, and finish() streams pages (gradients and states in, states out) through the same update; or
    catch_up() does so in the next forward pass, in its order, where compute hides the copies.
    """

    def __init__(self, named_params, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, rounding="stochastic", seed=0,
                 residual=False, grad_clip=0.0, allocate=functools.partial(torch.zeros, dtype=torch.uint8),
                 page_elements=2 ** 25, buffer_bytes=2 ** 30, resident_bytes=0):
        """
        named_params in the order of the forward pass. residual: keep 7 more bits of each bf16 weight, in one byte, with the states.
        grad_clip: limit of the global gradient norm, as torch.nn.utils.clip_grad_norm_ has it; 0: none.
        page_elements, buffer_bytes, resident_bytes, allocate: see Pages.
        """
        super().__init__(named_params)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.stochastic, self.seed, self.grad_clip = rounding == "stochastic", seed, grad_clip
        self.order = list(self.names) if grad_clip else list(self.names)[::-1]  # backward meets parameters in reverse
        self.pending = collections.deque()  # parameters that await the last step's update
        device = self.order[0].device
        self.scale, self.zero = torch.ones(1, device=device), torch.zeros(1, device=device)
        self.small = {p: (torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32))
                      for p in self.order if p.dim() < 2 or p.numel() < MIN_8BIT}
        self.residual = residual and any(p.dtype != torch.float32 for p in self.order if p not in self.small)
        # cut the matrices, in order, into pages: a page is a list of (parameter, start, end, place in the page)
        page_elements -= page_elements % BLOCK
        self.slices, fill = {p: [] for p in self.order if p not in self.small}, page_elements
        self.page_elements = []
        for p in self.slices:
            start = 0
            while start < p.numel():
                if fill >= page_elements:
                    self.page_elements.append(0)
                    fill = 0
                end = min(p.numel(), start + page_elements - fill)
                self.slices[p].append((len(self.page_elements) - 1, start, end, fill))
                fill += -(-(end - start) // BLOCK) * BLOCK
                self.page_elements[-1] = fill
                start = end
        per_block = BLOCK * (3 if self.residual else 2) + 8
        self.grad_dtype = next(iter(self.slices)).dtype if self.slices else torch.float32
        home_sizes = [n // BLOCK * per_block for n in self.page_elements]
        sizes = [size + (n * self.grad_dtype.itemsize if grad_clip else 0) for size, n in zip(home_sizes, self.page_elements)]
        # the largest parameters stay on the device first: head and embedding are updated in one go, with no other work
        # to hide their copies
        resident = []
        for p in sorted(self.slices, key=lambda p: -p.numel()):
            for page, *_ in self.slices[p]:
                if page not in resident and sum(sizes[k] for k in [*resident, page]) <= resident_bytes:
                    resident.append(page)
        self.pages = Pages(sizes, home_sizes, device, buffer_bytes, resident, allocate, ahead=not grad_clip)
        self.last_on_page = {s[-1][0]: p for p, s in self.slices.items()} | {
            page: p for p, s in self.slices.items() for page, *_ in s[:-1]}

    def begin(self, lr):
        self.catch_up()
        super().begin(lr)
        self.waiting, self.cursor, self.sending, self.sums = {}, 0, collections.deque(), {}
        self.scale.fill_(1.0)

    def take(self, p, grad):
        if self.grad_clip:
            return self.park(p, grad)
        self.scale.addcmul_(self.norms[p], self.zero)  # NaN as soon as a norm is not finite: from there on nothing is updated
        # pages come in a fixed order, so parameters step in that order, whatever the order of hooks within a block
        self.waiting[p] = grad
        while self.cursor < len(self.order) and self.order[self.cursor] in self.waiting:
            self.update(self.order[self.cursor], self.waiting.pop(self.order[self.cursor]))
            self.cursor += 1

    def park(self, p, grad):
        if p in self.small:
            self.waiting[p] = grad
            return
        flat, sent = grad.reshape(-1), None
        for page, start, end, place in self.slices[p]:
            sent = self.pages.send(page, flat[start:end], lambda page_bytes: self.views(page_bytes, page, place, end - start)["grad"]) or sent
        if sent is not None:
            self.sending.append((flat, sent))
        self.settle(PARKING)

    def settle(self, in_flight: int):
        """Let go of parked gradients' device copies, the oldest first, down to so many bytes; compute waits for their copying."""
        while sum(flat.nbytes for flat, _ in self.sending) > in_flight:
            torch.cuda.current_stream().wait_event(self.sending.popleft()[1])

    def finish(self, later=False):
        norm = super().finish()
        if self.grad_clip:
            self.settle(0)
            if not torch.isfinite(norm):
                self.steps -= 1
                raise NonFiniteGradient(f"the gradient of {self.worst()} is not finite; nothing was updated")
            self.scale.copy_((self.grad_clip / (norm + 1e-6)).clamp(max=1.0))
            self.pages.restart()
            self.pending.extend(self.order)
            if not later:
                self.catch_up()
        return norm

    def catch_up(self, params=None):
        needed = set(self.pending if params is None else params)
        for _ in range(max((i + 1 for i, p in enumerate(self.pending) if p in needed), default=0)):
            self.update(self.pending[0], self.waiting.pop(self.pending[0], None))
            self.pending.popleft()

    @torch.no_grad()
    def update(self, p, grad):
        """One parameter's step; its gradient is given, or lies with its pages."""
        decay = self.weight_decay if p.dim() >= 2 else 0.0
        h = Hyper(self.lr, self.beta1, self.beta2, self.eps, decay, self.steps)
        keys = random_keys(self.seed, self.steps, self.names[p]) if self.stochastic else None
        if p in self.small:
            return adam32_step(p, grad, *self.small[p], h, keys, self.scale)
        flat, grad = p.view(-1), None if grad is None else grad.reshape(-1)
        for page, start, end, place in self.slices[p]:
            state = self.views(self.pages.use(page), page, place, end - start)
            parked = state.pop("grad")
            before = [None if t is None else t.clone() for t in (flat[start:end], state["residual"])] if self.metering else None
            adam8bit_step(flat[start:end], parked if grad is None else grad[start:end], state, h, start, keys, self.scale)
            if self.metering:
                self.measure(self.names[p].split(".")[-2], before, (flat[start:end], state["residual"]), state, h)
            if self.last_on_page[page] is p:
                self.pages.done(page)

    def measure(self, kind, before, after, state, h, part=2 ** 22):
        """Adds up, for meter(), what one slice's step did; before and after are (weights, residual or None)."""
        sums = self.sums.setdefault(kind, torch.zeros(5, dtype=torch.float64, device=self.scale.device))
        for a in range(0, after[0].numel(), part):
            piece, blocks = slice(a, a + part), slice(a // BLOCK, (a + part) // BLOCK)
            old, new = (p[piece].float() if r is None else join_residual(p[piece], r[piece][:len(p[piece])]) for p, r in (before, after))
            m, v = (dequantize(state[k][piece].view(-1, BLOCK), state[f"{k}_scale"][blocks], k == "m").view(-1)[:len(old)] for k in "mv")
            wanted, moved = old * (h.decay - 1) - h.step_size * m / (v.sqrt() + h.eps), new - old
            sums += torch.stack([t.sum(dtype=torch.float64) for t in
                                 (wanted != 0, (wanted != 0) & (moved == 0), moved * wanted, wanted * wanted, old * old)])

    def meter(self) -> dict[str, dict[str, float]]:
        """
        What the last step, if it was metered, did to the matrices, by kind (wq, w1, ...): 'unchanged', the share of
        elements with an update that stayed as they were; 'kept', how much of the update arrived, as the projection of
        the change on it (1: all of it on average); 'ratio', the update's norm over the weights'.
        """
        self.catch_up()
        sums = {kind: t.tolist() for kind, t in self.sums.items()}
        return {kind: {"unchanged": still / max(1, n), "kept": along / wanted if wanted else 1.0,
                       "ratio": math.sqrt(wanted / weights) if weights else 0.0}
                for kind, (n, still, along, wanted, weights) in sums.items()}

    def views(self, page_bytes, page, place, n):
        """
        The tensors of one slice within a page. Layout: all m codes, all v codes, all residuals, the scales, and with
        grad_clip the parked gradients, which never travel home.
        """
        total, exact, n = self.page_elements[page], n, -(-n // BLOCK) * BLOCK
        codes = (3 if self.residual else 2) * total
        scales, grads = page_bytes[codes:codes + total // BLOCK * 8].view(torch.float32), page_bytes[codes + total // BLOCK * 8:]
        blocks = slice(place // BLOCK, (place + n) // BLOCK)
        return {"grad": grads.view(self.grad_dtype)[place:place + exact] if self.grad_clip else None,
                "m": page_bytes[place:place + n], "v": page_bytes[total + place:total + place + n],
                "residual": page_bytes[2 * total + place:2 * total + place + n].view(torch.int8) if self.residual else None,
                "m_scale": scales[:total // BLOCK][blocks], "v_scale": scales[total // BLOCK:][blocks]}

    def at_rest(self) -> list[torch.Tensor]:
        """All pages, between steps."""
        assert not self.pending, "catch_up() comes before a look at weights or states"
        return self.pages.at_rest()

    @torch.no_grad()
    def exact(self, name, p) -> torch.Tensor:
        """The fp32 weights that p and its residual stand for, on the host; p's own where it has none."""
        if not self.residual or p in self.small:
            return p.detach().float().cpu()
        pages, flat, parts = self.at_rest(), p.detach().flatten().cpu(), []
        for page, start, end, place in self.slices[p]:
            parts.append(join_residual(flat[start:end], self.views(pages[page], page, place, end - start)["residual"][:end - start].cpu()))
        return torch.cat(parts).view(p.shape)

    def state(self):
        """Yields (parameter name, {key: host tensor}) between steps, one parameter at a time."""
        pages = self.at_rest()
        for p, name in self.names.items():
            if p in self.small:
                yield name, {"m": self.small[p][0].cpu(), "v": self.small[p][1].cpu()}
                continue
            parts = [self.views(pages[page], page, place, end - start) for page, start, end, place in self.slices[p]]
            yield name, {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0] if key != "grad" and parts[0][key] is not None}

    @torch.no_grad()
    def load_state(self, get, steps: int):
        """get(parameter name) -> the dict that state() yielded. KeyError or ValueError where it does not fit."""
        pages = self.at_rest()
        for p, name in self.names.items():
            saved = get(name)
            if p in self.small:
                for into, key in zip(self.small[p], "mv"):
                    into.copy_(fitting(saved[key], into.numel(), into.dtype).view_as(into))
                continue
            padded = sum(-(-(end - start) // BLOCK) * BLOCK for _, start, end, _ in self.slices[p])
            for key, dtype in (("m", torch.uint8), ("v", torch.uint8), *((("residual", torch.int8),) if self.residual else ())):
                fitting(saved[key], padded, dtype)
            for key in ("m_scale", "v_scale"):
                fitting(saved[key], padded // BLOCK, torch.float32)
            position = 0
            for page, start, end, place in self.slices[p]:
                for key, into in self.views(pages[page], page, place, end - start).items():
                    if into is not None and key != "grad":
                        at = position // BLOCK if key.endswith("scale") else position
                        into.copy_(saved[key][at:at + into.numel()])
                position += -(-(end - start) // BLOCK) * BLOCK
        self.steps = steps
        if self.pages.ahead:
            self.pages.restart()

    def memory(self) -> dict[str, int]:
        """Bytes of state on the host and on the device."""
        device = sum(2 * m.nbytes for m, _ in self.small.values()) + sum(t.nbytes for t in self.pages.resident.values())
        return {"host": self.pages.host_bytes, "device": device + sum(b.nbytes for b in getattr(self.pages, "buffers", []))}


def fitting(tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, if it has this size and dtype; else ValueError."""
    if tensor.numel() != numel or tensor.dtype != dtype:
        raise ValueError(f"a state of {numel} x {dtype} was expected, got {tensor.numel()} x {tensor.dtype}")
    return tensor


class StockOptimizer(_InBackward):
    """
    Other people's optimizers behind the same interface. 'bnb_paged_adamw8bit': bitsandbytes, one instance per
    parameter, stepped in its hook. 'adamw': torch's, all gradients kept and stepped in finish(), so it can clip.
    """

    def __init__(self, kind, named_params, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip=0.0):
        super().__init__(named_params)
        self.kind, self.grad_clip = kind, grad_clip
        if kind == "adamw":
            matrix = vector = torch.optim.AdamW
        else:
            theirs = bitsandbytes("optim")
            matrix, vector = functools.partial(theirs.PagedAdamW8bit, min_8bit_size=MIN_8BIT), theirs.AdamW32bit
        self.optimizers = {p: (matrix if p.dim() >= 2 else vector)([p], lr=0.0, betas=(beta1, beta2), eps=eps,
                                                                   weight_decay=weight_decay if p.dim() >= 2 else 0.0)
                           for p in self.names}

    def begin(self, lr):
        super().begin(lr)
        self.bad = False  # a gradient of this step was not finite

    def take(self, p, grad):
        p.grad = grad
        if self.kind != "adamw":
            self.bad = self.bad or not torch.isfinite(self.norms[p])
            self.step_one(p)

    def step_one(self, p):
        self.optimizers[p].param_groups[0]["lr"] = self.lr
        if not self.bad:
            self.optimizers[p].step()
        p.grad = None

    def finish(self, later=False):
        norm = super().finish()
        if self.kind == "adamw":
            if not torch.isfinite(norm):
                for p in self.names:
                    p.grad = None
                self.steps -= 1
                raise NonFiniteGradient(f"the gradient of {self.worst()} is not finite; nothing was updated")
            if self.grad_clip:
                torch.nn.utils.clip_grad_norm_(list(self.names), self.grad_clip)
            for p in self.names:
                self.step_one(p)
        return norm

    def state(self):
        for p, name in self.names.items():
            yield name, {k: torch.as_tensor(v).detach().cpu() for k, v in self.optimizers[p].state[p].items()}

    @torch.no_grad()
    def load_state(self, get, steps):
        for p, name in self.names.items():
            saved, state = get(name), self.optimizers[p].state[p]
            if self.kind != "adamw":  # bitsandbytes pages its buffers only if it makes them itself
                self.optimizers[p].init_state(self.optimizers[p].param_groups[0], p, 0, 0)
            for key, value in saved.items():
                if torch.is_tensor(state.get(key)):
                    state[key].copy_(value)
                elif self.kind == "adamw":
                    state[key] = value.clone() if value.dim() == 0 else value.to(p.device)  # step counts stay on the host
                else:
                    state[key] = value.item()
        self.steps = steps

    def memory(self):
        states = [t for p in self.names for t in self.optimizers[p].state[p].values() if torch.is_tensor(t)]
        return {"host": 0, "device": sum(t.nbytes for t in states)}
