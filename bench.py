"""
Speed and memory of the training step that train.py runs, on random weights and synthetic packed documents.

    python bench.py config/llama3_8b_24gb.py --model=llama3_8b --cap_gib=22.5
    python bench.py config/llama3_8b_24gb_long.py --model=llama3_8b --cap_gib=22.5 --steps=8

Takes all of train.py's settings and a few of its own (--help). Prints a row of a markdown table: the median of
--steps steps after --warmup. GPU memory is what the driver counts for the whole device.
"""

import dataclasses
import platform
import statistics
import sys
import time

import numpy as np

import train  # before torch: it sets the allocator's options
import configurator
import data
import monitor
import torch
from model import PRESETS


@dataclasses.dataclass
class Config(train.Config):
    # benchmark
    steps: int = 8                     # steps measured
    warmup: int = 3                    # steps before them
    cap_gib: float = 0.0               # limit of torch's allocator, to act as a smaller card; 0: none
    doc_min: int = 100                 # shortest synthetic document, tokens
    doc_max: int = 500                 # longest
    profile: str | None = None         # write a trace of one step here (chrome://tracing)


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
    cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    if cuda and cfg.cap_gib:
        torch.cuda.set_per_process_memory_fraction(cfg.cap_gib * 2 ** 30 / torch.cuda.get_device_properties(0).total_memory)
    started = time.perf_counter()
    config = PRESETS[cfg.model]
    model = train.make_model(cfg, config, device, None)
    optimizer = train.make_optimizer(cfg, model)
    if cfg.compile and cuda:
        model.compile_blocks()
    run_layer, offloader = train.make_run_layer(cfg, model)
    micro = cfg.gradient_accumulation_steps
    rows = synthetic_rows(cfg.batch_size * micro * (cfg.steps + cfg.warmup), cfg.seq_len, config.vocab_size, cfg.doc_min, cfg.doc_max)
    loader = data.Loader([rows], cfg.batch_size, cfg.seed)
    tokens = cfg.batch_size * cfg.seq_len * micro
    times, profiler = [], None
    for step in range(cfg.warmup + cfg.steps):
        if cfg.profile and step == cfg.warmup + cfg.steps - 1:
            profiler = torch.profiler.profile()
            profiler.__enter__()
        begin = time.perf_counter()
        batches = [loader.next().to(device) for _ in range(micro)]
        loss, norm = train.train_step(model, optimizer, batches, cfg.learning_rate, run_layer, cfg.loss_chunk)
        norm = norm.item()
        times.append(time.perf_counter() - begin)
        if step == 0:
            print(f"first step after {time.perf_counter() - started:.1f} s", flush=True)
        print(f"step {step} loss {loss:.4f} norm {norm:.3f} {1000 * times[-1]:.1f} ms", flush=True)
    if profiler:
        torch.cuda.synchronize()
        profiler.__exit__(None, None, None)
        print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))
        profiler.export_chrome_trace(cfg.profile)
    ms = 1000 * statistics.median(times[cfg.warmup:])
    rate = tokens / ms * 1000
    n_params = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    peak = monitor.peak_flops(name) if cuda else None
    mfu = f"{100 * rate * monitor.flops_per_token(n_params, config, cfg.seq_len) / peak:.1f} %" if peak else "-"
    GiB = 2 ** 30
    if cuda:  # freed segments go back to the driver, so the device's peak is the allocator's plus what is not torch's
        used = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / GiB
        allocated, reserved = torch.cuda.max_memory_allocated() / GiB, torch.cuda.max_memory_reserved() / GiB
        peak_gib = used + reserved
    else:
        allocated = reserved = peak_gib = 0.0
    print(f"\n{name}, torch {torch.__version__}, allocator cap {cfg.cap_gib or 'none'} GiB; python bench.py {' '.join(sys.argv[1:])}")
    print("| tokens a step | ms | tok/s | MFU (6N + 12LHDT) | GPU peak: device / reserved / allocated, GiB | host, GB | states + activations over PCIe, GB |")
    print("|---|---|---|---|---|---|---|")
    travelling = 2 * getattr(getattr(optimizer, "pages", None), "host_bytes", 0) + (2 * offloader.packed_bytes // len(times) if offloader else 0)
    print(f"| {tokens:,} | {ms:.0f} | {rate:,.0f} | {mfu} | {peak_gib:.2f} / {reserved:.2f} / {allocated:.2f} | "
          f"{monitor.host_gb():.1f} | {travelling / 1e9 if cuda else 0:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
