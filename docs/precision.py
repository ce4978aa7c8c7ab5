"""
What bf16 weights cost, and what stochastic rounding and the 8-bit residual give back: finetunes SmolLM2-135M-Instruct
on Alpaca with four kinds of weights and optimizer, several seeds, and compares held-out loss.

    python tests/smollm2.py && python docs/precision.py          writes docs/precision.jsonl, .md and (with matplotlib) .png

Each run's result is written when it ends, and runs whose results are there are not repeated: delete the .jsonl to begin anew.
"""

import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OURS = ["--dtype=bfloat16", "--compile=true", "--state_resident_gb=0", "--state_buffer_gb=0.05", "--activation_offloading=true"]
FP32 = "fp32, torch AdamW"
VARIANTS = {
    FP32: ["--dtype=float32", "--optimizer=adamw"],
    "bf16, rounded to nearest": [*OURS, "--rounding=nearest"],
    "bf16, rounded stochastically": OURS,
    "bf16, with 8-bit residual": [*OURS, "--master=residual"],
}
SETTINGS = [  # name, steps, flags
    ("lr 2e-5", 60, ["--batch_size=4", "--learning_rate=2e-5"]),
    ("lr 1e-5", 60, ["--batch_size=4", "--learning_rate=1e-5"]),
    ("lr 2e-5, 8 micro-batches, clipped at 1", 30, ["--batch_size=1", "--gradient_accumulation_steps=8", "--grad_clip=1", "--learning_rate=2e-5"]),
]
SEEDS = [int(s) for s in os.environ.get("SEEDS", "1,2,3").split(",")]
JOBS = int(os.environ.get("JOBS", "1"))  # runs at a time: they are small for a large GPU


def finetune(steps, flags) -> dict:
    """One run: its 'curve', [(step, held-out loss)] as trained, and 'end', the loss of its fp32 export in fp32 arithmetic."""
    def train(*more):
        done = subprocess.run([sys.executable, "train.py", "config/smollm2_135m.py", "--seq_len=512", "--val_fraction=0.15", *more],
                              cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{more}\n{done.stderr}")
        return done.stdout

    with tempfile.TemporaryDirectory() as out:
        # the validation rows are the same for all; the seed decides the order of rows and the rounding
        train(f"--max_steps={steps}", "--warmup_steps=5", "--lr_schedule=constant", f"--eval_every={steps // 6}", "--log_every=0",
              f"--out_dir={out}/run", *flags, f"--export={out}/export", "--export_dtype=float32")
        with open(f"{out}/run/metrics.jsonl", encoding="utf-8") as f:
            rows = [json.loads(line) for line in f]
        said = train(f"--init_from={out}/export", "--eval_only", f"--out_dir={out}/eval", "--batch_size=4")
        return {"curve": [(r["step"], r["val_loss"]) for r in rows if "val_loss" in r], "end": float(said.split("val loss ")[1].split()[0])}


def table(results) -> list[str]:
    lines = ["| setting | weights and optimizer | held-out loss, first → last (mean of seeds) | share of fp32's gain |", "|---|---|---|---|"]
    for name, variants in results.items():
        first = variants[FP32][0]["curve"][0][1]  # of the same weights for all
        ends = {variant: statistics.mean(run["end"] for run in runs) for variant, runs in variants.items()}
        lines += [f"| {name} | {variant} | {first:.4f} → {end:.4f} | {100 * (first - end) / (first - ends[FP32]):.1f} % |"
                  for variant, end in ends.items()]
    return lines


def plot(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), sharey=True, squeeze=False)
    for axis, (name, variants) in zip(axes[0], results.items()):
        for variant, runs in variants.items():
            steps = [s for s, _ in runs[0]["curve"]]
            means = [statistics.mean(run["curve"][i][1] for run in runs) for i in range(len(steps))]
            axis.plot(steps, means, marker="o", label=variant)
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out loss")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    out = os.environ.get("OUT", os.path.join(ROOT, "docs"))
    runs, wanted = {}, {(name, variant, seed): (steps, [*flags, *more, f"--seed={seed}"])
                        for seed in SEEDS for name, steps, flags in SETTINGS for variant, more in VARIANTS.items()}
    with open(os.path.join(out, "precision.jsonl"), "a+", encoding="utf-8") as f, concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        f.seek(0)
        runs |= {tuple(row.pop("run")): row for row in map(json.loads, f)}
        print(f"{len(runs.keys() & wanted.keys())} of {len(wanted)} runs are there")
        started = {pool.submit(finetune, *how): run for run, how in wanted.items() if run not in runs}
        for done in concurrent.futures.as_completed(started):
            runs[started[done]] = done.result()
            print(json.dumps({"run": started[done], **done.result()}), file=f, flush=True)
    results = {name: {variant: [runs[name, variant, seed] for seed in SEEDS] for variant in VARIANTS} for name, *_ in SETTINGS}
    text = "\n".join(table(results))
    with open(os.path.join(out, "precision.md"), "w", encoding="utf-8") as f:
        f.write(text + "\n")
    print(text)
    try:
        plot(results, os.path.join(out, "precision.png"))
    except ImportError:
        print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
