"""
Speed and memory of the training step that train.py runs, on random weights and synthetic packed documents.

    python bench.py config/llama3_8b_24gb.py --cap_gib=22.5
    python bench.py config/llama3_8b_24gb_long.py --cap_gib=22.5 --steps=8

Takes all of train.py's settings and a few of its own (--help). Prints markdown: the median of --steps steps after
--warmup, where the time of one more step went, and memory beside its forecast. GPU memory is the whole device's.
"""

import dataclasses
import platform
import statistics
import sys
import time
import warnings

import numpy as np

import train  # before torch: it sets the allocator's options
import configurator
import data
import forecast
import monitor
import torch
from model import PRESETS

PEERS = """To time torchtune beside it, on the same machine in the same minutes (its recipe reads real weights and text):

    pip install torchtune==0.6.1 torchao==0.14.1
    tune run full_finetune_single_device --config llama3/8B_full_single_device checkpointer.checkpoint_dir=WEIGHTS/original \\
        tokenizer.path=WEIGHTS/original/tokenizer.model tokenizer.max_seq_len=2048 dataset.packed=True compile=True \\
        enable_activation_offloading=True max_steps_per_epoch=20

The log's tokens_per_second_per_gpu counts a step's tokens as ours does. Leave out the first steps, which compile."""


@dataclasses.dataclass
class Config(train.Config):
    # benchmark
    steps: int = 8                     # steps measured
    warmup: int = 3                    # steps before them
    cap_gib: float = 0.0               # limit of torch's allocator, to act as a smaller card; 0: none
    doc_min: int = 100                 # shortest synthetic document, tokens
    doc_max: int = 500                 # longest
    trace: str | None = None           # write a trace of one step here (chrome://tracing)
    peers: bool = False                # only print how to time another tool


def synthetic_rows(n_rows: int, seq_len: int, vocab_size: int, doc_min: int, doc_max: int, seed: int = 0) -> np.ndarray:
    """Rows as data.py stores them, filled with random documents of doc_min to doc_max tokens, all of it learned."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, vocab_size, (n_rows, seq_len + 1), dtype=np.uint32) | np.uint32(data.LEARN)
    for row in rows:
        at = 0
        while at < seq_len:
            row[at] = row[at] & data.TOKEN | data.START
            at += int(rng.integers(doc_min, doc_max + 1))
        row[seq_len] &= data.TOKEN
    return rows


def machine_rates(device) -> dict[str, float]:
    """What the GPU and its link do alone: bf16 FLOP/s of a large product, bytes/s in, out, and of each with both under way."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    here, there = (torch.empty(2 ** 28, dtype=torch.uint8, device=device) for _ in range(2))
    on_host = torch.empty(2, 2 ** 28, dtype=torch.uint8).pin_memory()
    side = torch.cuda.Stream(device)

    def rate(work, amount, n=20):
        for _ in range(2):
            work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            work()
        torch.cuda.synchronize()
        return n * amount / (time.perf_counter() - start)

    def both():
        here.copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(side):
            on_host[1].copy_(there, non_blocking=True)

    rates = {"flops": rate(lambda: a @ a, 2 * 8192 ** 3, 100), "in": rate(lambda: here.copy_(on_host[0], non_blocking=True), 2 ** 28),
             "out": rate(lambda: on_host[1].copy_(there, non_blocking=True), 2 ** 28), "both": rate(both, 2 ** 28)}
    return rates


KINDS = [("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "sm80_", "sm90_", "cublas")), ("attention", ("flash", "fmha", "attention")),
         ("8-bit Adam", ("adam8bit",)), ("copies over PCIe, in", ("Memcpy HtoD",)), ("copies over PCIe, out", ("Memcpy DtoH",))]


def time_by_kind(profiler) -> dict[str, float]:
    """ms of one profiled step on the GPU, by kind of kernel."""
    kinds = dict.fromkeys([name for name, _ in KINDS] + ["the rest"], 0.0)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("ProfilerStep", "## ")):
            kind = next((name for name, parts in KINDS[::-1] if any(p.lower() in event.name.lower() for p in parts)), "the rest")
            kinds[kind] += event.time_range.elapsed_us() / 1000
    return kinds


def main() -> int:
    if any(a in ("-h", "--help") for a in sys.argv[1:]):
        print(__doc__.strip(), "\n", configurator.help_text(Config), configurator.help_text(train.Config), sep="\n")
        return 0
    try:
        cfg, _ = configurator.parse(Config, sys.argv[1:])
        train.check(cfg)
    except configurator.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if cfg.peers:
        print(PEERS)
        return 0
    GiB = forecast.GiB
    cuda = torch.cuda.is_available() and cfg.device != "cpu"
    device = torch.device("cuda" if cuda else "cpu")
    rates = machine_rates(device) if cuda else None
    if cuda:
        torch.cuda.empty_cache()
    limits = train.memory_limits(cfg, device)
    if cuda and cfg.cap_gib:
        torch.cuda.set_per_process_memory_fraction(cfg.cap_gib * GiB / torch.cuda.get_device_properties(0).total_memory)
        limits = min(limits[0], int(cfg.cap_gib * GiB) + forecast.CUDA_CONTEXT), limits[1]
    started = time.perf_counter()
    config = PRESETS[cfg.model]
    as_run = dataclasses.replace(cfg, state_resident_gb=forecast.resident_gb(cfg, config, limits[0]))
    model = train.make_model(cfg, config, device, None)
    optimizer = train.make_optimizer(cfg, model, limits[0])
    train.compile_blocks(cfg, model, device)
    run_layer, offloader = train.make_run_layer(cfg, model)
    micro = cfg.gradient_accumulation_steps
    rows = synthetic_rows(cfg.batch_size * micro * (cfg.steps + cfg.warmup + 1), cfg.seq_len, config.vocab_size, cfg.doc_min, cfg.doc_max)
    loader = data.Loader([rows], cfg.batch_size, cfg.seed)
    tokens = cfg.batch_size * cfg.seq_len * micro

    def step():
        begin = time.perf_counter()
        batches = [loader.next().to(device) for _ in range(micro)]
        loss, norm = train.train_step(model, optimizer, batches, cfg.learning_rate, run_layer, cfg.loss_chunk)
        launched = time.perf_counter()
        norm = norm.item()
        return 1000 * (time.perf_counter() - begin), 1000 * (time.perf_counter() - launched), loss, norm

    times, aheads = [], []
    for number in range(cfg.warmup + cfg.steps):
        ms, ahead, loss, norm = step()
        if number == 0:
            print(f"first step after {time.perf_counter() - started:.1f} s", flush=True)
        print(f"step {number} loss {loss:.4f} norm {norm:.3f} {ms:.1f} ms", flush=True)
        times.append(ms)
        aheads.append(ahead)
    peak_gpu, peak_host = monitor.peak_gpu_gb(device), monitor.host_gb()
    allocated = torch.cuda.max_memory_allocated() / GiB if cuda else 0.0

    ms = statistics.median(times[cfg.warmup:])
    rate = tokens / ms * 1000
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    flops = rate * monitor.flops_per_token(sum(p.numel() for p in model.parameters()), config, cfg.seq_len)
    peak = monitor.peak_flops(name) if cuda else None
    expected = forecast.needs(as_run, config, cuda)
    travels = (optimizer.memory()["host"] + (offloader.packed_bytes // len(times) if offloader else 0)) if cuda else 0
    print(f"\n{name}, torch {torch.__version__}, allocator cap {cfg.cap_gib or 'none'} GiB; python bench.py {' '.join(sys.argv[1:])}")
    spread = f"{ms:.0f} ({min(times[cfg.warmup:]):.0f} to {max(times[cfg.warmup:]):.0f})"
    cells = {"tokens a step": f"{tokens:,}", "ms (least to most)": spread, "tok/s": f"{rate:,.0f}",
             "MFU (6N + 12LHDT)": f"{100 * flops / peak:.1f} %" if peak else "-",
             "share of the matmul rate": f"{100 * flops / rates['flops']:.1f} %" if cuda else "-",
             "GPU peak, whole device (allocated), GiB": f"{peak_gpu * 1e9 / GiB:.2f} ({allocated:.2f})", "host, GB": f"{peak_host:.1f}",
             "PCIe, GB each way": f"{travels / 1e9:.1f}"}
    print(f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}\n| {' | '.join(cells.values())} |\n")
    for place, got in (("gpu", peak_gpu), ("host", peak_host)):
        if expected[place]:
            want = sum(expected[place].values()) / 1e9
            print(f"memory: {place} {got:.2f} GB, expected {want:.2f} ({100 * (want / got - 1):+.1f} %)")
    if cuda:
        warnings.filterwarnings("ignore", module="torch.profiler")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        kinds = time_by_kind(profiler)
        compute = sum(v for k, v in kinds.items() if "PCIe" not in k)
        link = 1000 * travels / rates["both"]
        print(f"machine: {rates['flops'] / 1e12:.0f} TFLOP/s; PCIe {rates['in'] / 1e9:.1f} GB/s in, {rates['out'] / 1e9:.1f} out, "
              f"{rates['both'] / 1e9:.1f} each way together")
        print("ms by kind: " + ", ".join(f"{k} {v:.0f}" for k, v in kinds.items()))
        print(f"overlap: {ms:.0f} ms a step is {ms / max(compute, link):.2f} times the larger of compute alone ({compute:.0f} ms) and "
              f"PCIe alone ({link:.0f} ms); Python is done {statistics.median(aheads):.0f} ms before the GPU")
        if cfg.trace:
            profiler.export_chrome_trace(cfg.trace)
    return 0


if __name__ == "__main__":
    configurator.command(main)
