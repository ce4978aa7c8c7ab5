"""python -m pytest tests/test_train.py"""

import collections
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import data
import model as llama
import monitor
import sample
import soak
import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run('--key=value', ...) -> (exit code, what it printed); small, and everything in tmp_path."""
    monkeypatch.setitem(llama.PRESETS, "debug", llama.ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 40 + "and so on"}) + "\n" for i in range(60)))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def go(*flags):
        base = [f"--data={tmp_path}/text.jsonl", f"--cache_dir={tmp_path}/cache", f"--out_dir={tmp_path}/out", "--max_steps=8", "--seq_len=64",
                "--batch_size=4", "--warmup_steps=2", "--log_every=1", "--eval_every=4", "--sample_tokens=0", "--device=cpu", "--learning_rate=1e-2"]
        code = train.main([*base, *flags])
        return code, "".join(capsys.readouterr())

    yield go
    for number, handler in before.items():
        signal.signal(number, handler)


def metrics(folder):
    return [json.loads(line) for line in open(folder / "metrics.jsonl")]


def losses(folder):
    return {row["step"]: row["loss"] for row in metrics(folder) if "loss" in row}


def weights(folder):
    return load_file(folder / open(folder / "latest").read().strip() / "model.safetensors")


def test_a_run_learns_and_leaves_what_it_promises(run, tmp_path):
    code, out = run("--activation_offloading=true", "--gradient_accumulation_steps=2")
    assert code == 0
    rows = metrics(tmp_path / "out")
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9)) and steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert {"step", "loss", "lr", "grad_norm", "ms", "tok_s", "gpu_gb", "host_gb", "tokens", "supervised_tokens"} <= set(steps[0])
    assert [r["step"] for r in rows if "val_loss" in r] == [0, 4, 8]
    assert steps[0]["offloaded_bytes"] == 2 * 2 * 4 * 64 * 32 * 4  # 2 blocks x 2 micro-batches x rows x tokens x dim x fp32
    assert open(tmp_path / "out" / "latest").read() == "step_000008\n"
    assert json.load(open(tmp_path / "out" / "config.json"))["gradient_accumulation_steps"] == 2
    assert "4 rows x 64 tokens x 2 micro-batches = 512 tokens" in out


@pytest.mark.parametrize("flags", [["--optimizer=adam8bit"], ["--optimizer=adamw"], ["--optimizer=bnb_paged_adamw8bit"],
                                   ["--grad_clip=0.1", "--master=residual", "--meter_every=2"]])
def test_interrupted_and_resumed_equals_uninterrupted(run, tmp_path, monkeypatch, flags):
    flags = ["--dtype=bfloat16", *flags]
    assert run(f"--out_dir={tmp_path}/whole", *flags)[0] == 0
    real, calls = train.train_step, []

    def interrupt(*a):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*a)

    monkeypatch.setattr(train, "train_step", interrupt)
    code, out = run(*flags)
    assert code == 130 and "go on with --resume" in out and (tmp_path / "out" / "step_000003").is_dir()
    code, out = run(*flags, "--resume")
    assert code == 0 and "resuming" in out
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_new_settings_on_resume_are_used_and_said(run, tmp_path):
    run("--max_steps=4", "--lr_schedule=constant")
    code, out = run("--lr_schedule=constant", "--resume", "--learning_rate=1e-4")
    assert code == 0 and "learning_rate: 0.01 -> 0.0001" in out
    assert [r["lr"] for r in metrics(tmp_path / "out") if "loss" in r][4:] == [1e-4] * 4


def test_other_data_on_resume_starts_at_its_first_row(run, tmp_path):
    run("--max_steps=4")
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"other {i} " * 30}) + "\n" for i in range(20)))
    code, out = run("--resume", f"--data={tmp_path}/other.jsonl")
    assert code == 0 and "the data differs" in out


def test_an_earlier_run_is_not_overwritten(run, tmp_path):
    run("--max_steps=2")
    before = weights(tmp_path / "out")
    code, out = run()
    assert code == 2 and "--resume" in out
    assert all(torch.equal(v, before[k]) for k, v in weights(tmp_path / "out").items())


def test_the_cut_into_micro_batches_does_not_matter(run, tmp_path):
    for batch, micro in ((8, 1), (2, 4), (1, 8)):
        run(f"--out_dir={tmp_path}/{batch}", f"--batch_size={batch}", f"--gradient_accumulation_steps={micro}", "--optimizer=adamw")
    want = losses(tmp_path / "8")
    for batch in (2, 1):
        assert losses(tmp_path / str(batch)) == pytest.approx(want, rel=1e-4)
    lrs = [[r["lr"] for r in metrics(tmp_path / str(b)) if "loss" in r] for b in (8, 2, 1)]
    assert lrs[0] == lrs[1] == lrs[2]


def test_how_many_blocks_are_recomputed_or_offloaded_does_not_matter(run, tmp_path):
    for name, flags in (("all", ["--recompute=1"]), ("half", ["--recompute=0.5", "--activation_offloading=true"]), ("none", ["--recompute=0"])):
        assert run(f"--out_dir={tmp_path}/{name}", "--gradient_accumulation_steps=2", *flags)[0] == 0
    for name in ("half", "none"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "all"), rel=1e-4)
    offloaded = [r["offloaded_bytes"] for r in metrics(tmp_path / "half") if "loss" in r]
    assert len(set(offloaded)) == 1 and offloaded[0] > 2 * 2 * 4 * 64 * 32 * 4  # more than the inputs of both blocks


def test_validation_is_the_same_for_any_batch_size_and_disturbs_nothing(run, tmp_path):
    for batch, every in ((1, 0), (2, 1), (8, 3)):
        run(f"--out_dir={tmp_path}/{batch}", f"--batch_size={batch}", f"--gradient_accumulation_steps={8 // batch}",
            f"--eval_every={every}", "--learning_rate=0", "--min_lr=0")
    values = [r["val_loss"] for b in (1, 2, 8) for r in metrics(tmp_path / str(b)) if "val_loss" in r]
    assert len(values) == 1 + 9 + 4 and max(values) - min(values) < 1e-5
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "8"), rel=1e-5)


def test_learning_rate_zero_moves_nothing(run, tmp_path):
    code, _ = run("--learning_rate=0", "--min_lr=0", "--save_every=4")
    assert code == 0
    first, last = (load_file(tmp_path / "out" / f"step_00000{s}" / "model.safetensors") for s in (4, 8))
    assert all(torch.equal(first[k], last[k]) for k in first)


def test_a_loss_that_is_not_finite_stops_before_the_update(run, tmp_path, monkeypatch):
    real, calls = llama.Llama.loss, []

    def poisoned(self, batches, count, *a, **k):
        loss = real(self, batches, count, *a, **k)
        calls.append(torch.is_grad_enabled())
        return loss * math.nan if sum(calls) == 3 and calls[-1] else loss

    monkeypatch.setattr(llama.Llama, "loss", poisoned)
    code, out = run("--eval_every=0")
    assert code == 1 and "step 3: the loss is nan" in out and "Traceback" not in out
    assert open(tmp_path / "out" / "latest").read() == "step_000002\n"
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "out").values())
    calls.clear()
    code, out = run("--eval_every=0", "--skip_nonfinite=1", f"--out_dir={tmp_path}/other")
    assert code == 0 and "tried again" in out and sorted(losses(tmp_path / "other")) == list(range(1, 9))


@pytest.mark.parametrize("flags, said", [(["--grad_clip=1.0"], "; nothing was updated"), ([], "from there on nothing was updated"),
                                         (["--optimizer=adamw"], "; nothing was updated")])
def test_a_bad_gradient_leaves_a_good_checkpoint(run, tmp_path, monkeypatch, flags, said):
    real, calls = train.train_step, []

    def poisoned(model, *a):
        calls.append(1)
        if len(calls) == 3:
            handle = model.layers[1].attention_norm.weight.register_hook(lambda g: g * math.inf)
        try:
            return real(model, *a)
        finally:
            if len(calls) == 3:
                handle.remove()

    monkeypatch.setattr(train, "train_step", poisoned)
    code, out = run("--eval_every=0", *flags)
    assert code == 1 and "step 3: the gradient of layers.1.attention_norm.weight is not finite" in out and said in out
    assert open(tmp_path / "out" / "latest").read() == "step_000002\n"
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "out").values())
    calls.append(1)
    code, out = run("--eval_every=0", *flags, "--resume")
    assert code == 0 and all(torch.isfinite(w).all() for w in weights(tmp_path / "out").values())


@pytest.mark.parametrize("flags, message", [
    (["--grad_clip=1.0", "--optimizer=bnb_paged_adamw8bit"], "grad_clip"), (["--data=nowhere"], "nowhere"), (["--init_from=nowhere"], "nowhere"), (["--batch_size=0"], "batch_size"),
    (["--tokenizer=nowhere.model"], "nowhere.model"), (["--learning_rat=1"], "did you mean 'learning_rate'"), (["--beta1=1.0"], "beta1"),
    (["nowhere.py"], "nowhere.py"), (["--optimizer=adam"], "adam8bit")])
def test_mistakes_are_one_line_and_exit_code_2(run, flags, message):
    code, out = run(*flags)
    assert code == 2 and message in out and "Traceback" not in out and len([x for x in out.splitlines() if x.startswith("error:")]) == 1


def test_export_and_sample(run, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    assert run(f"--export={tmp_path}/hf")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = llama.Llama(checkpoint.read_config(str(tmp_path / "hf")))
    checkpoint.load_weights(ours, str(tmp_path / "hf"))
    tokens = torch.randint(0, 512, (1, 40))
    assert (theirs(tokens).logits - ours.logits(tokens)).abs().max() < 1e-5
    texts = []
    for seed in (0, 0, 1):
        assert sample.main([str(tmp_path / "out"), "--prompt=1 2", "--max_tokens=20", f"--seed={seed}", "--device=cpu", "--dtype=float32"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_an_export_in_float32_holds_what_the_residual_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train.optim, "MIN_8BIT", 256)
    flags = ["--dtype=bfloat16", "--master=residual", "--max_steps=4", f"--export={tmp_path}/hf", "--export_dtype=float32"]
    assert run(*flags)[0] == 0
    assert checkpoint.main([str(tmp_path / "out"), str(tmp_path / "again"), "--dtype=float32"]) == 0
    exact, again = (load_file(tmp_path / n / "model.safetensors") for n in ("hf", "again"))
    rounded = weights(tmp_path / "out")
    assert all(t.dtype == torch.float32 for t in exact.values()) and json.load(open(tmp_path / "hf" / "config.json"))["torch_dtype"] == "float32"
    for name, w in exact.items():
        assert torch.equal(w, again[name])
        error = (w - rounded[name].float()).abs()
        assert (error <= rounded[name].float().abs() * 2 ** -7 + 1e-30).all()
        if w.dim() == 2:
            assert (error > 0).float().mean() > 0.9, name  # more than bf16 can hold


def test_a_second_run_in_the_same_folder_is_refused_and_a_stale_lock_is_not_in_the_way(run, tmp_path):
    (tmp_path / "out").mkdir()
    with checkpoint.lock(str(tmp_path / "out")):
        code, out = run()
    assert code == 2 and f"in use by process {os.getpid()}" in out and not (tmp_path / "out" / "config.json").exists()
    (tmp_path / "out" / "lock").write_text("999999\n")
    assert run("--max_steps=1")[0] == 0


def test_a_time_limit_saves_and_ends_well(run, tmp_path):
    code, out = run("--max_steps=100000", "--max_hours=0.0003", "--eval_every=0")
    assert code == 0 and "stopped after 0.0003 hours" in out
    step = int(open(tmp_path / "out" / "latest").read().strip().removeprefix("step_"))
    assert 0 < step < 100000 and checkpoint.load_state(checkpoint.newest(str(tmp_path / "out")))["step"] == step


def test_the_best_checkpoint_is_kept(run, tmp_path, monkeypatch):
    values = iter([5.0, 3.0, 4.0, 4.5, 4.6])
    monkeypatch.setattr(train, "evaluate", lambda *a: next(values))
    run("--keep_best=true", "--keep_checkpoints=1", "--save_every=2", "--eval_every=2")
    assert open(tmp_path / "out" / "best").read() == "step_000002\n" and open(tmp_path / "out" / "latest").read() == "step_000008\n"
    assert sorted(checkpoint.checkpoints(str(tmp_path / "out"))) == [2, 8]


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_validation_sees_the_weights_of_its_step(run, tmp_path, clip):
    run("--save_every=4", "--keep_checkpoints=3", f"--grad_clip={clip}")
    for row in metrics(tmp_path / "out"):
        if "val_loss" in row and row["step"]:
            code, out = run("--eval_only", f"--init_from={tmp_path}/out/step_{row['step']:06d}", "--tokenizer=byte", f"--out_dir={tmp_path}/eval")
            assert code == 0 and f"val loss {row['val_loss']:.4f}" in out


def test_evaluation_alone_gives_the_same_loss_and_writes_nothing(run, tmp_path):
    run()
    want = [r["val_loss"] for r in metrics(tmp_path / "out") if "val_loss" in r][-1]
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*") if p.name != "lock")
    code, out = run("--eval_only=true", "--resume=true")
    assert code == 0 and f"val loss {want:.4f}" in out
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*") if p.name != "lock")


@pytest.mark.parametrize("free, words", [(0.9, "room for 1 checkpoint needs"), (1.2, "the export with the checkpoints needs")])
def test_room_on_the_disk_is_asked_for_before_the_first_step(run, tmp_path, monkeypatch, free, words):
    params = 2 * (3 * 32 * 32 + 3 * 32 * 64 + 64) + 2 * 512 * 32 + 32  # 4 bytes of each and 2 of states, and 2 in the export
    monkeypatch.setattr(shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(int(free * 6 * params)))
    code, out = run(f"--export={tmp_path}/deep/hf")
    assert code == 2 and words in out and not (tmp_path / "out" / "metrics.jsonl").exists()


def test_deterministic_is_set_before_anything_is_computed(run, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: seen.append((mode, os.environ["CUBLAS_WORKSPACE_CONFIG"])))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(train, "make_model", lambda *a: (_ for _ in ()).throw(train.RunError(f"{seen}")))
    assert run("--deterministic")[1].endswith("error: [(True, ':4096:8')]\n")


@pytest.mark.parametrize("owner, name", [(llama.Llama, "loss"), (train.optim.Adam8bit, "update")])
def test_out_of_memory_leaves_a_checkpoint_and_names_smaller_settings(run, tmp_path, monkeypatch, owner, name):
    real, calls = getattr(owner, name), []

    def full(self, *a, **k):
        calls.append(1)
        if len(calls) == (4 if name == "loss" else 3 * 21 + 5):  # in the forward, or in the middle of the updates of step 4
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, *a, **k)

    flags = ["--dtype=bfloat16", "--activation_offloading=true", "--val_fraction=0"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        code, out = run(*flags)
    assert code == 1 and "--batch_size=2 --gradient_accumulation_steps=2 --resume" in out and "optimizer states" in out
    assert open(tmp_path / "out" / "latest").read() == "step_000003\n"
    assert run(*flags, "--resume")[0] == 0 and sorted(losses(tmp_path / "out")) == list(range(1, 9))


def test_loggers_receive_every_row_once_across_a_resume(run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = ["--tensorboard=true", "--wandb_project=test", "--log_every=1"]
    assert run(*flags, "--max_steps=4", "--lr_schedule=constant")[0] == 0
    first = (tmp_path / "out" / "wandb_id").read_text()
    assert run(*flags, "--resume", "--lr_schedule=constant")[0] == 0
    assert (tmp_path / "out" / "wandb_id").read_text() == first
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert {e.step: pytest.approx(e.value, rel=1e-6) for e in events.Scalars("loss")} == losses(tmp_path / "out")
    assert len(events.Scalars("loss")) == 8 and [e.step for e in events.Scalars("val_loss")] == [0, 4, 8]
    assert len(list((tmp_path / "out" / "wandb").glob(f"offline-run-*-{first}/*.wandb"))) == 2


def test_a_logger_that_is_not_installed_is_named(run, monkeypatch):
    monkeypatch.setattr(train.monitor.importlib.util, "find_spec", lambda name: None)
    code, out = run("--wandb_project=x")
    assert code == 2 and "pip install wandb" in out


def test_the_meter_shows_what_rounding_takes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train.optim, "MIN_8BIT", 256)
    for rounding in ("nearest", "stochastic"):
        code, out = run(f"--out_dir={tmp_path}/{rounding}", f"--rounding={rounding}", "--dtype=bfloat16", "--meter_every=8", "--learning_rate=1e-5",
                        "--min_lr=1e-5", "--warmup_steps=0")
        assert code == 0 and "of weights unchanged" in out
    nearest, stochastic = ([r for r in metrics(tmp_path / n) if "w1" in r][-1] for n in ("nearest", "stochastic"))
    assert nearest["step"] == 8 and set(nearest) == {"step", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "tok_embeddings", "output"}
    assert nearest["output"]["kept"] < 0.3 and 0.8 < stochastic["output"]["kept"] < 1.2  # 16,384 weights: noise of a few %
    assert nearest["output"]["unchanged"] > 0.8 and 1e-4 < stochastic["output"]["ratio"] < 1e-3


def test_model_flops_and_peaks():
    n = 8_030_261_248
    assert monitor.flops_per_token(n, llama.PRESETS["llama3_8b"], 2048) == 51_402_792_960
    assert monitor.peak_flops("NVIDIA GeForce RTX 4090") == 165.2e12 and monitor.peak_flops("some new card") is None


def test_a_run_outlives_a_full_disk_under_its_log(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "train.py", f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/cache", "--max_steps=2",
                               "--batch_size=1", "--eval_every=0", "--val_fraction=0", "--device=cpu"],
                              cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "latest").exists()
    assert done.stderr == "warning: this output can't be written any more (No space left on device); metrics.jsonl has the rest\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_process_after_a_checkpoint(tmp_path, number):
    process = endless(tmp_path, stderr=subprocess.STDOUT)
    process.send_signal(number)
    process.send_signal(signal.SIGHUP)  # a shell may send its own
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and out.count(": stopping after this step") == 1 and "interrupted after step" in out, out
    assert (tmp_path / "out" / "latest").exists()


def test_under_nohup_the_terminal_may_be_closed(tmp_path):
    process = endless(tmp_path, stderr=subprocess.STDOUT, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert any(line.startswith("step      9/") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: stopping" in process.communicate(timeout=60)[0]


def endless(tmp_path, **how):
    """A run in a process of its own that does not end by itself, once it has done 3 steps."""
    flags = [f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/cache", "--max_steps=100000", "--log_every=1", "--batch_size=1",
             "--eval_every=0", "--val_fraction=0", "--device=cpu"]
    process = subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True, **how)
    assert any(line.startswith("step      3/") for line in process.stdout)
    return process


@pytest.mark.parametrize("errors_too", [False, True])
def test_a_run_outlives_the_reader_of_its_output(tmp_path, errors_too):
    """As in `python train.py 2>&1 | tee log` and Ctrl-C, which ends tee first: the run must still save."""
    process = endless(tmp_path, stderr=subprocess.STDOUT if errors_too else subprocess.PIPE)
    process.stdout.close()
    while len(losses(tmp_path / "out")) < 9 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1] if not errors_too else process.wait(60)
    assert process.returncode == 130 and (tmp_path / "out" / "latest").exists()
    assert errors_too or errors.splitlines() == ["warning: this output can't be written any more (Broken pipe); metrics.jsonl has the rest", "",
                                                 "SIGINT: stopping after this step (again: at once)"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("place", [(train, "evaluate"), (checkpoint, "write_shards"), (checkpoint, "replace_folder"), (llama.Llama, "loss"), (data.Loader, "next")])
def test_a_signal_anywhere_in_the_loop_leaves_a_whole_checkpoint_to_go_on_from(run, tmp_path, monkeypatch, place, number, code):
    owner, name = place
    real, sent = getattr(owner, name), []

    def with_signal(*a, **k):
        if not sent and (name != "loss" or torch.is_grad_enabled()):
            sent.append(os.kill(os.getpid(), number))
        return real(*a, **k)

    flags = ["--save_every=2", "--eval_every=3"]
    assert run(f"--out_dir={tmp_path}/whole", *flags)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, with_signal)
        assert run(*flags)[0] == code
    step = int((tmp_path / "out" / "latest").read_text().strip().removeprefix("step_"))
    assert step < 8 and checkpoint.load_state(str(tmp_path / "out" / f"step_{step:06d}"))["step"] == step
    assert not [n for n in os.listdir(tmp_path / "out") if n.endswith((".tmp", ".old"))]
    assert run(*flags, "--resume")[0] == 0 and losses(tmp_path / "out") == losses(tmp_path / "whole")


def test_a_signal_while_data_is_prepared_ends_the_run_and_leaves_nothing_half_done(run, tmp_path, monkeypatch):
    real = data.encode_batch

    def with_signal(*a):
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(data, "encode_batch", real)
        monkeypatch.setattr(data.time, "time", lambda later=data.time.time() + 10: later)  # a progress line is due
        return real(*a)

    monkeypatch.setattr(data, "encode_batch", with_signal)
    code, out = run()
    assert code == 130 and "interrupted before the first step" in out and os.listdir(tmp_path / "cache") == []


def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one():
    whole, torn = soak.soak(kills=5, steps=12, log=lambda *a, **k: None)
    assert whole == torn


def test_settings_are_all_documented():
    text = train.configurator.help_text(train.Config)
    for field in dataclasses.fields(train.Config):
        line = next(x for x in text.splitlines() if x.strip().startswith(f"--{field.name}="))
        assert len(line.split("=", 1)[1].split("[")[0].strip().split("  ")[-1]) > 5, line
