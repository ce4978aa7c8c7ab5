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

from torch.autograd.graph import get_gradient_edge as edge

from model import addmm_fp32_, mm_fp32

FFN_TOKENS = 16384  # whose feed-forward activations exist at one time, in backward


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
    xs and ys: lists of [B, T, C]. The block needs attended(), hidden() and feed_forward.w2 (model.Block).
    """
    if not torch.is_grad_enabled():
        return [block(x, *context) for x, context in zip(xs, contexts)]
    with offload or contextlib.nullcontext():
        return _Layer.apply(block, contexts, recompute, len(xs), *xs, *block.parameters())


class _Layer(torch.autograd.Function):
    """
    With recompute the inputs xs are what is saved (and offloaded, if hooks are active), and backward runs the block again,
    one micro-batch and FFN_TOKENS at a time; else all is saved that backward needs. Either way a block has graphs of its own,
    so that its gradients can be summed in fp32. The last product, y = h + a @ w2.T, is differentiated by hand and not run again.
    """

    @staticmethod
    def forward(ctx, block, contexts, recompute, n, *xs_and_params):
        xs, ys = xs_and_params[:n], []
        ctx.block, ctx.contexts, ctx.graphs = block, contexts, []
        if recompute:
            ctx.save_for_backward(*xs)
            return tuple(block(x, *context) for x, context in zip(xs, contexts))
        for x, context in zip(xs, contexts):  # the graphs must hold what backward needs, and no tensor beside it
            at_x, h = record(block.attended, x, *context)
            flat = h.detach().flatten(0, 1)
            at_h, a = record(lambda h: _Mark.apply(block.hidden(h), None, True), flat)
            ctx.graphs.append((at_x, edge(h), [(at_h, edge(a))]))
            ys.append(torch.addmm(flat, a.detach(), block.feed_forward.w2.weight.T).view(h.shape))
        return tuple(ys)

    @staticmethod
    def backward(ctx, *grad_ys):
        block, w2 = ctx.block, ctx.block.feed_forward.w2.weight
        params = [p for p in block.parameters() if p is not w2]
        xs, rows = ctx.saved_tensors, grad_ys[0].numel() // grad_ys[0].size(-1)
        cuts = 1 if ctx.graphs else -(-rows // FFN_TOKENS)
        alone = len(grad_ys) * cuts == 1  # then there is nothing to sum
        totals, grad_xs = {}, []

        def gradients(at_y, at_x, grad_y):
            grad_x, *grads = torch.autograd.grad(at_y, [at_x, *params], grad_y, allow_unused=True)
            for p, g in zip(params, grads):
                if g is not None and p in totals:
                    totals[p] += g
                elif g is not None:
                    totals[p] = g if alone else g.float()
            return grad_x

        for i, grad_y in enumerate(grad_ys):
            if ctx.graphs:
                at_x, at_h, parts = ctx.graphs[i]
            else:
                at_x, h = record(block.attended, xs[i], *ctx.contexts[i])
                at_h, parts = edge(h), (record(block.hidden, part) for part in h.detach().flatten(0, 1).tensor_split(cuts))
                del h
            grad_hs = []
            for grad, (at_part, a) in zip(grad_y.flatten(0, 1).contiguous().tensor_split(cuts), parts):
                last = a.node.saved_tensors[0] if ctx.graphs else a.detach()
                if alone:
                    totals[w2] = grad.T @ last
                elif w2 in totals:
                    addmm_fp32_(totals[w2], grad.T, last)
                else:
                    totals[w2] = mm_fp32(grad.T, last)
                del last
                grad_hs.append(gradients(a, at_part, grad @ w2).add_(grad))
                del a
            grad_h = grad_hs[0] if cuts == 1 else torch.cat(grad_hs)
            grad_xs.append(gradients(at_h, at_x, grad_h.view(grad_y.shape)))
        ctx.graphs = None
        return None, None, None, None, *grad_xs, *[round_grad(totals.get(p), p) for p in block.parameters()]


class _Mark(torch.autograd.Function):
    """Does nothing, but its node is a place in a graph to start from or to end at that holds no tensor, or with keep only x."""

    @staticmethod
    def forward(ctx, x, anchor, keep):
        if keep:
            ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def record(f, x, *args):
    """(where the gradient of x will arrive, f(x, *args) with the graph that leads there)"""
    with torch.enable_grad():
        x = _Mark.apply(x.detach(), torch.empty(0, requires_grad=True), False)
        return edge(x), f(x, *args)


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
