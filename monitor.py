"""
What a run shows and records: lines on the terminal, metrics.jsonl, TensorBoard and Weights & Biases if asked for.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import secrets
import shutil
import sys

import torch

import configurator
from model import ModelConfig

# bf16 tensor-core peaks with fp32 accumulation, dense, from the vendors' data sheets
PEAK_FLOPS = {"RTX 3090": 71e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s of a GPU by its name, None if unknown (then no MFU is shown rather than a wrong one)."""
    return next((v for k, v in PEAK_FLOPS.items() if k in device_name), None)


def flops_per_token(n_params: int, config: ModelConfig, seq_len: int) -> int:
    """6 N + 12 L H D T (PaLM appendix B, nanoGPT): forward and backward, attention not halved, recompute not counted."""
    return 6 * n_params + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len


def host_gb() -> float:
    """Peak host memory of this process, GB."""
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def gpu_gb(device: torch.device) -> float:
    """Memory in use on the GPU, by all that runs on it, as the driver counts, GB."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 1e9


def peak_gpu_gb(device: torch.device) -> float:
    """The most that was in use on the GPU, GB: the allocator's peak and what is not the allocator's."""
    if device.type != "cuda":
        return 0.0
    return gpu_gb(device) + (torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)) / 1e9


class Console:
    """Lines that stay, and on a terminal one below them that is written over."""

    def __init__(self):
        self.shown = False

    def say(self, line: str = ""):
        self.write("\r\033[K" * self.shown + line + "\n")
        self.shown = False

    def live(self, line: str):
        if sys.stdout.isatty():
            self.write("\r\033[K" + line[:shutil.get_terminal_size().columns - 1])
            self.shown = True

    def write(self, text: str):
        """
        Text as it is, at once. The run outlives its reader: Ctrl-C ends the `tee` behind it, too, a terminal is closed, the
        disk of a log is full, and the run must still save.
        """
        try:
            print(text, end="", flush=True)
        except OSError as error:
            configurator.silence_stdout()
            with contextlib.suppress(OSError):  # stderr may be the same
                print(f"warning: this output can't be written any more ({error.strerror}); metrics.jsonl has the rest", file=sys.stderr)


class Spike:
    """
    Says when a loss stands out: more than 6 mean absolute deviations, and at least 0.3, above the mean of the losses
    before it (both exponential with decay 0.97), once 30 losses are known.
    """

    def __init__(self):
        self.seen, self.mean, self.deviation = 0, 0.0, 0.0

    def __call__(self, loss: float) -> bool:
        limit = self.mean + max(6 * self.deviation, 0.3)
        spike = self.seen >= 30 and loss > limit
        self.seen += 1
        weight = max(0.03, 1 / self.seen)
        off = min(loss, limit) - self.mean if spike else loss - self.mean  # a spike does not hide the next one
        self.mean += weight * off
        self.deviation += weight * (abs(off) - self.deviation)
        return spike


LOGGERS = {"tensorboard": "tensorboard", "wandb_project": "wandb"}  # setting -> the package it needs


def missing_logger(cfg) -> str:
    """One line about a logger that was asked for but is not installed, or ''."""
    lost = [(s, p) for s, p in LOGGERS.items() if getattr(cfg, s) and importlib.util.find_spec(p) is None]
    return f"'{lost[0][0]}' needs a package that is not installed: pip install {lost[0][1]}" if lost else ""


class Metrics:
    """
    metrics.jsonl: one row per logged step or validation, the same to the loggers asked for. A resumed run goes on in
    the same file, where rows past its checkpoint are removed, and in the same TensorBoard and W&B run.
    """

    def __init__(self, cfg, step: int):
        path, kept = os.path.join(cfg.out_dir, "metrics.jsonl"), []
        if step and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                for line in f:
                    try:
                        if json.loads(line)["step"] <= step:
                            kept.append(line)
                    except (ValueError, KeyError, TypeError):
                        continue  # the last line of a killed run
        with open(f"{path}.tmp", "w", encoding="utf-8") as f:
            f.writelines(kept)
        os.replace(f"{path}.tmp", path)
        self.file = open(path, "a", encoding="utf-8")
        self.tensorboard = self.wandb = None
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(os.path.join(cfg.out_dir, "tensorboard"), purge_step=step + 1 if step else None)
        if cfg.wandb_project:
            import wandb
            id_path = os.path.join(cfg.out_dir, "wandb_id")
            if not step or not os.path.exists(id_path):
                with open(id_path, "w", encoding="utf-8") as f:
                    f.write(secrets.token_hex(4))
            with open(id_path, encoding="utf-8") as f:
                self.wandb = wandb.init(project=cfg.wandb_project, id=f.read().strip(), resume="allow", dir=cfg.out_dir,
                                        config=dataclasses.asdict(cfg))
            self.wandb.define_metric("*", step_metric="step")

    def write(self, **row):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        flat = {}
        for key, value in row.items():
            flat |= {f"{key}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        if self.tensorboard:
            for key, value in flat.items():
                if key != "step" and math.isfinite(value):
                    self.tensorboard.add_scalar(key, value, row["step"])
        if self.wandb:
            self.wandb.log(flat)

    def close(self):
        self.file.close()
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()
