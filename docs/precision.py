"""
What bf16 weights cost, and what stochastic rounding and the 8-bit residual give back: finetunes SmolLM2-135M-Instruct
on Alpaca with four kinds of weights and optimizer, several seeds, and compares held-out loss.

    python tests/smollm2.py && python docs/precision.py          writes docs/precision.json, .md and (with matplotlib) .png
"""

import json
import os
import statistics
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import train  # noqa: E402

VARIANTS = {
    "fp32, torch AdamW": ["--dtype=float32", "--optimizer=adamw"],
    "bf16, rounded to nearest": ["--dtype=bfloat16", "--rounding=nearest"],
    "bf16, rounded stochastically": ["--dtype=bfloat16"],
    "bf16, with 8-bit residual": ["--dtype=bfloat16", "--master=residual"],
}
SETTINGS = [  # name, flags
    ("lr 2e-5", ["--learning_rate=2e-5"]),
    ("lr 1e-5", ["--learning_rate=1e-5"]),
    ("lr 2e-5, 4 micro-batches, clipped at 1", ["--learning_rate=2e-5", "--batch_size=1", "--gradient_accumulation_steps=4", "--grad_clip=1"]),
]
SEEDS = [int(s) for s in os.environ.get("SEEDS", "1,2,3").split(",")]
STEPS = int(os.environ.get("STEPS", "60"))


def curve(flags) -> list[tuple[int, float]]:
    """(step, held-out loss) of one finetune."""
    with tempfile.TemporaryDirectory() as out:
        # the validation rows are the same for all; the seed decides the order of rows and the rounding
        code = train.main(["config/smollm2_135m.py", "--seq_len=512", "--batch_size=4", "--val_fraction=0.15", f"--max_steps={STEPS}",
                           "--warmup_steps=5", "--lr_schedule=constant", f"--eval_every={STEPS // 4}", "--log_every=0",
                           f"--out_dir={out}/run", *flags])
        if code:
            sys.exit(code)
        rows = [json.loads(line) for line in open(f"{out}/run/metrics.jsonl")]
    return [(r["step"], r["val_loss"]) for r in rows if "val_loss" in r]


def table(results) -> list[str]:
    lines = ["| setting | weights and optimizer | held-out loss, first → last (mean of seeds) | share of fp32's gain |", "|---|---|---|---|"]
    for name, _ in SETTINGS:
        gains = {}
        for variant in VARIANTS:
            runs = results.get(name, {}).get(variant)
            if not runs:
                continue
            first, last = (statistics.mean(run[i][1] for run in runs) for i in (0, -1))
            gains[variant] = first - last
            share = gains[variant] / gains["fp32, torch AdamW"]
            lines.append(f"| {name} | {variant} | {first:.4f} → {last:.4f} | {100 * share:.1f} % |")
    return lines


def plot(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), sharey=True, squeeze=False)
    for axis, (name, variants) in zip(axes[0], results.items()):
        for variant, runs in variants.items():
            steps = [s for s, _ in runs[0]]
            means = [statistics.mean(run[i][1] for run in runs) for i in range(len(steps))]
            axis.plot(steps, means, marker="o", label=variant)
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    os.chdir(ROOT)
    out = os.environ.get("OUT", "docs")
    results = {}
    for name, flags in SETTINGS:
        for variant, more in VARIANTS.items():
            results.setdefault(name, {})[variant] = [curve([*flags, *more, f"--seed={seed}"]) for seed in SEEDS]
            json.dump(results, open(os.path.join(out, "precision.json"), "w"), indent=1)
    text = "\n".join(table(results))
    open(os.path.join(out, "precision.md"), "w").write(text + "\n")
    print(text)
    try:
        plot(results, os.path.join(out, "precision.png"))
    except ImportError:
        print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
