"""
Kill a training run at random moments, resume it, and see that it ends where an undisturbed one does.

    python tests/soak.py --kills=50

Both runs train the same small model on the CPU. The kills are SIGKILL, after a random time: while Python starts, data
is prepared, a step runs, a checkpoint is written. What must agree: every loss, and every byte of the last checkpoint.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def command(folder: str, steps: int) -> list[str]:
    return [sys.executable, os.path.join(ROOT, "train.py"), f"--out_dir={folder}", f"--cache_dir={folder}_cache", f"--max_steps={steps}",
            "--save_every=3", "--eval_every=10", "--eval_batches=2", "--log_every=1", "--batch_size=2", "--seq_len=128", "--device=cpu",
            "--dtype=bfloat16", "--master=residual", "--grad_clip=0.5", "--gradient_accumulation_steps=2", "--activation_offloading=true",
            "--sample_tokens=0", "--resume"]


def digest(folder: str) -> str:
    """Hash of the losses, and of weights, optimizer states and position in the newest checkpoint."""
    found = hashlib.sha256()
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), f"steps are missing or doubled: {steps}"
    found.update(json.dumps([(r["step"], r.get("loss"), r.get("val_loss"), r.get("grad_norm")) for r in rows]).encode())
    with open(os.path.join(folder, "latest"), encoding="utf-8") as f:
        last = os.path.join(folder, f.read().strip())
    for name in sorted(os.listdir(last)):
        with open(os.path.join(last, name), "rb") as f:
            blob = f.read()
        if name == "state.json":
            state = json.loads(blob)
            del state["settings"]
            blob = json.dumps(state).encode()
        found.update(name.encode() + blob)
    return found.hexdigest()


def soak(kills: int, steps: int, seed: int = 0, log=print) -> tuple[str, str]:
    """(digest of the undisturbed run, digest of the one that was killed so many times while it ran)."""
    rng, work = random.Random(seed), tempfile.mkdtemp()
    try:
        whole, torn = os.path.join(work, "whole"), os.path.join(work, "torn")
        start = time.time()
        subprocess.run(command(whole, steps), check=True, stdout=subprocess.DEVNULL)
        took = time.time() - start
        hit = n = 0
        while hit < kills:
            n += 1
            process = subprocess.Popen(command(torn, steps), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                _, errors = process.communicate(timeout=rng.uniform(0.5, max(1.0, took * 0.8)))
                if process.returncode:
                    raise SystemExit(f"a resumed run failed: {errors.decode()}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                hit += 1
            reached = open(os.path.join(torn, "latest")).read().strip() if os.path.exists(os.path.join(torn, "latest")) else "nothing"
            log(f"start {n}, {hit} killed: {reached} saved", flush=True)
            if reached == f"step_{steps:06d}" and hit < kills:  # done before all kills: the others hit a new run
                assert digest(torn) == digest(whole)
                shutil.rmtree(torn)
        subprocess.run(command(torn, steps), check=True, stdout=subprocess.DEVNULL)
        return digest(whole), digest(torn)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    whole, torn = soak(options.kills, options.steps, options.seed)
    print(f"undisturbed {whole}\nkilled      {torn}")
    sys.exit(whole != torn)


if __name__ == "__main__":
    main()
