"""python -m pytest tests/test_monitor.py"""

import json
import random
import types

import pytest

import monitor

CFG = types.SimpleNamespace(tensorboard=False, wandb_project=None)


def test_a_loss_that_stands_out_is_told_from_noise_and_from_a_steady_fall():
    rng = random.Random(0)
    spike = monitor.Spike()
    falling = [2 + 3 * 0.99 ** i + rng.gauss(0, 0.05) for i in range(600)]
    assert not any([spike(x) for x in falling])
    assert spike(4.0) and spike(4.0) and not spike(2.0)  # the first one does not hide the second
    early = monitor.Spike()
    assert not any([early(x) for x in (11.8, 9.0, 14.0, 7.0)])


def test_metrics_keep_each_step_once_when_a_run_goes_on(tmp_path):
    CFG.out_dir = str(tmp_path)
    first = monitor.Metrics(CFG, 0)
    for step in range(1, 9):
        first.write(step=step, loss=1.0 / step)
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 9, "lo')  # killed while writing
    second = monitor.Metrics(CFG, 5)
    second.write(step=6, loss=0.0)
    second.close()
    assert [json.loads(x)["step"] for x in open(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tty, want", [(True, "a\n\r\x1b[Kbusy\r\x1b[Kb\n"), (False, "a\nb\n")])
def test_the_live_line_is_for_terminals_only(capsys, monkeypatch, tty, want):
    console = monitor.Console()
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    console.say("a")
    console.live("busy")
    console.say("b")
    assert capsys.readouterr().out == want
