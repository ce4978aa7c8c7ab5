"""python -m pytest tests/test_plot.py"""

import json
import struct

import pytest

import plot

pytest.importorskip("matplotlib")


def fake_run(folder, steps):
    folder.mkdir()
    rows = [{"step": s, "loss": 3 / s, "lr": 1e-3, "grad_norm": 1.0, "tok_s": 100.0, "gpu_gb": 2.0, "host_gb": 1.0} for s in range(1, steps)]
    rows.insert(5, {"step": 5, "val_loss": 2.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 99, "lo')
    (folder / "forecast.json").write_text(json.dumps({"gpu": {"weights": 10 ** 9}, "host": {"process": 10 ** 9}, "pcie": {}}))


def test_runs_are_drawn_into_one_picture(tmp_path, capsys):
    fake_run(tmp_path / "a", 100)
    fake_run(tmp_path / "b", 10)
    assert plot.main([str(tmp_path / "a"), str(tmp_path / "b"), f"--output={tmp_path}/x.png"]) == 0
    blob = (tmp_path / "x.png").read_bytes()
    assert blob.startswith(b"\x89PNG") and struct.unpack(">II", blob[16:24]) == (1650, 935) and len(blob) > 30_000


def test_series_and_smoothing():
    rows = [{"step": 1, "loss": 2.0}, {"step": 1, "val_loss": 3.0}, {"step": 2, "loss": 4.0}]
    assert plot.series(rows, "loss") == ([1, 2], [2.0, 4.0]) and plot.series(rows, "val_loss") == ([1], [3.0])
    assert plot.smooth([5.0] * 4) == pytest.approx([5.0] * 4)


@pytest.mark.parametrize("text", [None, "", "not json\n", "[1]\n", "\x00\xff"])
def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys, text):
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run" / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    assert plot.main([str(tmp_path / "run"), f"--output={tmp_path}/x.png"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "metrics.jsonl" in error and error.count("\n") == 1
