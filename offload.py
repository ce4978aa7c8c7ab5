"""
Where activations go between forward and backward.

run_layer            one block over all micro-batches of a step: recomputes the block in backward instead of keeping
                     its activations, and sums the parameters' gradients over micro-batches in fp32
ActivationOffload    saved-tensor hooks: what autograd saves goes to pinned host memory and comes back one block ahead
pinned_zeros         page-locked host memory of exactly the size asked for

Reference: torch.autograd.graph.saved_tensors_hooks; checkpointing, arXiv:1604.06174.
"""

import collections
import contextlib
import sys
import weakref

import torch

from model import addmm_fp32_, mm_fp32


def pinned_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """
    Zeroed host memory, uint8 [nbytes], page-locked when device is a GPU. torch's own pinned allocator rounds every block up
    to a power of two, so the memory is registered with CUDA here. Where the system refuses to lock it (ulimit -l,
    WSL), copies still work but no longer overlap with compute: that is said once.
    """
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    if device.type == "cuda" and nbytes:
        cudart, address = torch.cuda.cudart(), memory.data_ptr()
        if int(cudart.cudaHostRegister(address, nbytes, 0)) == 0:
            weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
        elif not pinned_zeros.warned:
            pinned_zeros.warned = True
            print(f"warning: the system refused to page-lock {nbytes / 1e6:.0f} MB of host memory (see ulimit -l); "
                  "copies to and from the GPU will be slower and hold up compute", file=sys.stderr)
    return memory


pinned_zeros.warned = False


# -----------------------------------------------------------------------------
# recompute

def run_layer(block, xs, contexts, recompute: bool = True, offload: "ActivationOffload | None" = None):
    """
    ys = [block(x, *context) for each micro-batch], as one node of the autograd graph.
    xs and ys: lists of [B, T, C]. The block needs features() and feed_forward.w2 (model.Block).
    """
    if not torch.is_grad_enabled():
        return [block(x, *context) for x, context in zip(xs, contexts)]
    with offload or contextlib.nullcontext():
        return _Layer.apply(block, contexts, recompute, len(xs), *xs, *block.parameters())


class _Layer(torch.autograd.Function):
    """
    The inputs xs are what is saved (and offloaded, if hooks are active). Backward runs features() again per
    micro-batch, so at most one micro-batch's activations are alive; the last product, y = h + a @ w2.T, is
    differentiated by hand and not run again. With recompute off the graph of features() is kept from forward.
    """

    @staticmethod
    def forward(ctx, block, contexts, recompute, n, *xs_and_params):
        xs = xs_and_params[:n]
        ctx.block, ctx.contexts = block, contexts
        if recompute:
            ctx.graphs = None
            ctx.save_for_backward(*xs)
            return tuple(block(x, *context) for x, context in zip(xs, contexts))
        ctx.graphs = [features_graph(block, x, context) for x, context in zip(xs, contexts)]
        return tuple(torch.addmm(h.detach().flatten(0, 1), a.detach().flatten(0, 1), block.feed_forward.w2.weight.T).view(h.shape)
                     for _, h, a in ctx.graphs)

    @staticmethod
    def backward(ctx, *grad_ys):
        block, w2 = ctx.block, ctx.block.feed_forward.w2.weight
        others = [p for p in block.parameters() if p is not w2]
        totals, grad_xs = {}, []
        saved = ctx.graphs or ctx.saved_tensors
        for i, grad_y in enumerate(grad_ys):
            x, h, a = saved[i] if ctx.graphs else features_graph(block, saved[i], ctx.contexts[i])
            grad_y, last = grad_y.contiguous().flatten(0, 1), a.detach().flatten(0, 1)
            grad_x, *rest = torch.autograd.grad((h, a), [x, *others], (grad_y.view(h.shape), (grad_y @ w2).view(a.shape)),
                                                allow_unused=True)
            grads = {p: g for p, g in zip(others, rest) if g is not None}
            grad_xs.append(grad_x)
            if len(grad_ys) == 1:
                totals = grads | {w2: grad_y.T @ last}
            elif not totals:
                totals = {p: g.float() for p, g in grads.items()} | {w2: mm_fp32(grad_y.T, last)}
            else:
                for p, g in grads.items():
                    totals[p] += g
                addmm_fp32_(totals[w2], grad_y.T, last)
            del x, h, a, last, rest, grads
        ctx.graphs = None
        return None, None, None, None, *grad_xs, *[round_grad(totals.get(p), p) for p in block.parameters()]


def features_graph(block, x, context):
    """(x, h, a) with h and a differentiable with respect to x and the block's parameters."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return x, *block.features(x, *context)


def round_grad(total, p):
    """The complete fp32 sum, rounded once to the parameter's dtype; None where no gradient came (the optimizer names it)."""
    return total if total is None else total.to(p.dtype)


# -----------------------------------------------------------------------------
# offload

class ActivationOffload:
    """
    Moves what autograd saves to host memory. Active where a forward pass is wrapped; backward needs no wrapping:

        with offload:
            y = block(x)
        y.sum().backward()

    A tensor goes if it is floating point, on the device, at least min_elements large, dense, and no parameter or
    view of one. It comes back with the same dtype, shape and strides, bit for bit. Copies run on two streams of their
    own. Host buffers are reused from step to step; a tensor's buffer is free again when autograd drops it, so passes
    without a backward leave nothing behind.
    """

    IN_FLIGHT = 2  # device tensors, at least, that are kept until their copy is done

    def __init__(self, params, device: torch.device, ahead_bytes: int = 0, out_bytes: int = 0, min_elements: int = 1024):
        """
        ahead_bytes: how much to have on its way back before it is asked for; what one block saves is right. out_bytes: how
        much may be on its way out, beside IN_FLIGHT tensors. More hides slower copies, but costs device memory.
        """
        self.device, self.ahead_bytes, self.out_bytes, self.min_elements = device, ahead_bytes, out_bytes, min_elements
        self.param_storages = {p.untyped_storage().data_ptr() for p in params}
        self.free = collections.defaultdict(list)      # nbytes -> host buffers
        self.saved = weakref.WeakValueDictionary()     # running number -> _Saved, as long as autograd keeps it
        self.copying, self.copying_bytes = collections.deque(), 0  # device tensors on their way out
        self.host_bytes = 0                            # all host buffers, free or not
        self.packed = self.packed_bytes = 0            # tensors and bytes offloaded so far
        cuda = device.type == "cuda"
        self.out_stream, self.in_stream = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else (None, None)

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def settle(self, tensors: int, nbytes: int):
        """Let go of device tensors, all but the newest of this number or size, once the compute stream is behind their copies."""
        while len(self.copying) > tensors and self.copying_bytes > nbytes:
            tensor, copied = self.copying.popleft()
            self.copying_bytes -= tensor.nbytes
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)

    def pack(self, tensor):
        # a tensor without gaps can live in a flat buffer under its own strides
        dense = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 == tensor.numel()
        if (tensor.device.type != self.device.type or not tensor.is_floating_point() or tensor.numel() < self.min_elements
                or not dense or tensor.untyped_storage().data_ptr() in self.param_storages):
            return tensor.detach()  # with its grad_fn, the graph would hold itself
        saved = _Saved(self, tensor)
        with _on(self.out_stream) as copied:
            saved.host.copy_(tensor, non_blocking=True)
        saved.copied = copied()
        self.copying.append((tensor.detach(), saved.copied))
        self.copying_bytes += tensor.nbytes
        self.settle(self.IN_FLIGHT, self.out_bytes)
        self.saved[saved.index] = saved
        self.packed += 1
        self.packed_bytes += saved.host.nbytes
        return saved

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        self.settle(0, 0)
        saved.fetch()
        tensor, arrived = saved.device_copy
        saved.device_copy, saved.used = None, True
        before, early = saved.index - 1, 0  # backward goes from high numbers to low ones
        while before >= 0 and early < self.ahead_bytes:
            other = self.saved.get(before)
            if other is not None and not other.used:
                other.fetch()
                early += other.host.nbytes
            before -= 1
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
        return tensor


class _Saved:
    """One offloaded tensor. Its host buffer goes back to the pool when autograd drops it."""

    def __init__(self, owner: ActivationOffload, tensor: torch.Tensor):
        self.owner, self.index, self.device_copy, self.used = owner, owner.packed, None, False
        if owner.free[tensor.nbytes]:
            self.buffer, last_use = owner.free[tensor.nbytes].pop()
            if last_use is not None:
                owner.out_stream.wait_event(last_use)  # the copy back that last read this buffer
        else:
            self.buffer = pinned_zeros(tensor.nbytes, owner.device)
            owner.host_bytes += tensor.nbytes
        self.host = self.buffer.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self.last_use = None

    def fetch(self):
        if self.device_copy is not None:
            return
        tensor = torch.empty_strided(self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.owner.device)
        if self.copied is not None:
            self.owner.in_stream.wait_event(self.copied)
        with _on(self.owner.in_stream) as arrived:
            tensor.copy_(self.host, non_blocking=True)
        self.last_use = arrived()
        self.device_copy = (tensor, self.last_use)

    def __del__(self):
        if hasattr(self, "buffer"):
            self.owner.free[self.buffer.nbytes].append((self.buffer, self.last_use))


class _on:
    """Run copies on a stream, after what the current stream has been given so far. No stream (CPU): just run."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.event = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()
        return lambda: self.event

    def __exit__(self, *error):
        if self.stream is not None:
            self.event = self.stream.record_event()
            self.context.__exit__(*error)
