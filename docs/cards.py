"""
README's table of what fits where, from forecast.py:  python docs/cards.py

A cell: rows of 2,048 tokens that go through a block together, and the most tokens a step that the host's memory allows.
"""

import dataclasses
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import forecast
import train
from model import PRESETS

BASE = train.Config(dtype="bfloat16", seq_len=2048, batch_size=1, activation_offloading=True, state_resident_gb=0.0)
TAKEN = 10 ** 9  # by the desktop, on the GPU; four times as much on the host


def cell(config, gpu_gib: int, host_gib: int) -> str:
    gpu, host = gpu_gib * forecast.GiB - TAKEN, host_gib * forecast.GiB - 4 * TAKEN
    for buffer_gb in (1.0, 0.5, 0.3):
        best = None
        for rows in (1, 2, 4, 8, 16, 32):
            for micro in (1, 2, 4, 8, 16, 32, 64):
                cfg = dataclasses.replace(BASE, batch_size=rows, gradient_accumulation_steps=micro, state_buffer_gb=buffer_gb)
                if not forecast.lacking(cfg, config, gpu, host) and rows * micro <= 64:
                    best = max(best or (0, 0), (rows * micro, rows))
        if best:
            tokens, rows = best
            return f"{rows} × 2,048, up to {tokens * 2048:,}"
    return "–"


def main():
    print("| model | host | " + " | ".join(f"{gpu} GB GPU" for gpu in (12, 16, 24, 48)) + " |\n|---|---|---|---|---|---|")
    for name in ("llama3.2_1b", "llama3.2_3b", "llama3_8b"):
        for host in (32, 64, 128):
            print(f"| {name} | {host} GB | " + " | ".join(cell(PRESETS[name], gpu, host) for gpu in (12, 16, 24, 48)) + " |")


if __name__ == "__main__":
    main()
