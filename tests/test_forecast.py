"""python -m pytest tests/test_forecast.py"""

import dataclasses
import os
import re

import pytest
import torch

import forecast
import model as llama
import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAPE = llama.PRESETS["llama3_8b"]
CFG = train.Config(dtype="bfloat16", seq_len=2048, batch_size=2, activation_offloading=True, state_resident_gb=0.0)
GiB = forecast.GiB


def total(cfg, place, config=SHAPE):
    return sum(forecast.needs(cfg, config)[place].values())


@pytest.mark.parametrize("name", llama.PRESETS)
def test_parameters_are_counted_as_the_model_has_them(name):
    with torch.device("meta"):
        model = llama.Llama(llama.PRESETS[name])
    assert forecast.n_params(llama.PRESETS[name]) == sum(p.numel() for p in model.parameters())


def test_sizes_of_llama3_8b():
    found = forecast.needs(CFG, SHAPE)
    assert found["gpu"]["weights"] == 16_060_522_496 and found["host"]["blocks' inputs"] == 4096 * 8192 * 32
    assert 16.2e9 < found["host"]["optimizer states"] < 16.4e9
    clipped = dataclasses.replace(CFG, grad_clip=1.0, master="residual")
    assert total(clipped, "host") - total(CFG, "host") == 3 * 8_030_261_248  # bf16 gradients and one byte a weight


# command, and what was measured on one H200 (2026-12-01): GPU at device level in GiB, host in GB, ms a step
@pytest.mark.parametrize("flags, gpu_gib, host_gb, ms", [
    (dict(state_resident_gb=2.2), 22.15, 17.9, 456), (dict(batch_size=8, state_resident_gb=1.0), 21.24, 21.7, 1616),
    (dict(seq_len=32768, batch_size=1), 22.13, 28.0, 3358),
    (dict(batch_size=8, gradient_accumulation_steps=4, state_buffer_gb=0.7), 23.10, 36.05, 6490)])
def test_forecasts_are_near_what_was_measured(flags, gpu_gib, host_gb, ms):
    cfg = dataclasses.replace(CFG, compile=True, **flags)
    assert total(cfg, "gpu") / GiB == pytest.approx(gpu_gib, rel=0.03) and total(cfg, "host") / 1e9 == pytest.approx(host_gb, rel=0.03)
    parts = forecast.step_seconds(cfg, SHAPE, forecast.card_named("NVIDIA H200"))
    assert 1000 * (sum(parts.values()) - parts["pcie"]) == pytest.approx(ms, rel=0.06)


def test_leftover_memory_goes_to_states():
    auto = dataclasses.replace(CFG, state_resident_gb=None)
    for gpu in (19 * GiB, 24 * GiB, 200 * GiB):
        resident = forecast.resident_gb(auto, SHAPE, gpu)
        with_it = dataclasses.replace(auto, state_resident_gb=resident)
        assert (total(with_it, "gpu") <= gpu) == (gpu > 19 * GiB) and resident <= 16.4
    assert forecast.resident_gb(auto, SHAPE, 19 * GiB) == 0 < forecast.resident_gb(auto, SHAPE, 24 * GiB)
    assert forecast.resident_gb(dataclasses.replace(auto, state_resident_gb=0.5), SHAPE, 200 * GiB) == 0.5


@pytest.mark.parametrize("flags, gpu, host", [
    (dict(batch_size=64), 24, 64), (dict(gradient_accumulation_steps=64), 24, 32), (dict(dtype="float32", optimizer="adamw"), 24, 64),
    (dict(batch_size=4, activation_offloading=False, activation_checkpointing=False), 24, 64), (dict(grad_clip=1.0), 24, 32)])
def test_what_is_proposed_fits_and_says_what_changed(flags, gpu, host):
    cfg = dataclasses.replace(CFG, **flags)
    assert forecast.lacking(cfg, SHAPE, gpu * GiB, host * GiB)
    line = forecast.verdict(cfg, SHAPE, gpu * GiB, host * GiB)
    changed = dict(re.findall(r"--(\w+)=(\S+)", line))
    assert changed and changed == {k: str(v) for k, v in forecast.nearest_fit(cfg, SHAPE, gpu * GiB, host * GiB).items()}
    fits = dataclasses.replace(cfg, **forecast.nearest_fit(cfg, SHAPE, gpu * GiB, host * GiB))
    assert not forecast.lacking(fits, SHAPE, gpu * GiB, host * GiB) and forecast.verdict(fits, SHAPE, gpu * GiB, host * GiB) == ""


def test_recomputed_blocks_are_spread_evenly():
    numbers = {share: forecast.recomputed(dataclasses.replace(CFG, recompute=share), SHAPE) for share in (0.0, 0.25, 0.3, 0.5, 1.0)}
    assert numbers[0.0] == [] and numbers[1.0] == list(range(32)) and numbers[0.5] == list(range(1, 32, 2)) and numbers[0.25] == list(range(3, 32, 4))
    assert len(numbers[0.3]) == 9 and forecast.recomputed(dataclasses.replace(CFG, activation_checkpointing=False), SHAPE) == []


def test_what_cannot_fit_is_said():
    assert "no settings were found" in forecast.verdict(CFG, SHAPE, 12 * GiB, 64 * GiB)


def test_dry_run_needs_no_gpu_and_no_weights(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert train.main(["config/llama3_8b_24gb.py", "--dry_run", "--gpu_gb=24", "--host_gb=32"]) == 0
    out = capsys.readouterr().out
    assert "weights 16.06" in out and "tok/s on an RTX 4090" in out and out.endswith("verdict  fits\n")
    assert train.main(["config/llama3_8b_24gb.py", "--dry_run", "--gpu_gb=24", "--host_gb=32", "--batch_size=64"]) == 2
    assert "does not fit: GPU memory" in capsys.readouterr().out


def test_a_run_that_cannot_fit_is_refused_in_the_same_words(capsys, tmp_path):
    flags = ["--host_gb=0.3", f"--out_dir={tmp_path}/out", f"--cache_dir={tmp_path}/cache", "--device=cpu"]
    assert train.main(["--dry_run", *flags]) == 2
    words = capsys.readouterr().out.split("does not fit: ")[1].strip()
    assert train.main(flags) == 2
    assert f"error: {words}\n" == capsys.readouterr().err
