"""python -m pytest tests/test_configurator.py"""

import ast
import dataclasses
import glob
import inspect
import io
import os
import signal
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from typing import Literal

import pytest

import data
import train
from configurator import ConfigError, parse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Settings:
    steps: int = 10
    limit: int | None = 5
    rate: float = 0.1
    fast: bool = False
    note: str = ""
    folder: str | None = None
    mode: Literal["train", "test"] = "train"


def by_flag(name, literal, folder):
    return getattr(parse(Settings, [f"--{name}={literal}"])[0], name)


def by_file(name, literal, folder):
    (folder / "config.py").write_text(f"{name} = {literal}\n")
    return getattr(parse(Settings, [str(folder / "config.py")])[0], name)


either_way = pytest.mark.parametrize("way", [by_flag, by_file])


@either_way
@pytest.mark.parametrize("literal", ["1", "1.", ".5", "1e-4", "-1e-5", "1e4", "8", "1_000", "0", "-0.0", "+2", "0x10", "1e308"])
def test_a_float_takes_every_spelling_of_a_number(way, literal, tmp_path):
    value = way("rate", literal, tmp_path)
    assert type(value) is float and value == eval(literal)


@either_way
@pytest.mark.parametrize("literal", ["8", "1_000", "-3", "0", "0x10", "1e4", "2.0", "-1e2", "9007199254740993", "1e15"])
def test_an_int_takes_what_is_integral(way, literal, tmp_path):
    value = way("steps", literal, tmp_path)
    assert type(value) is int and value == eval(literal)


@either_way
@pytest.mark.parametrize("name, literals", {
    "rate": ["abc", "", "'1e-4'", "True", "false", "nan", "inf", "-inf", "1e400", "1" * 400, "1,2", "[1]", "{[]: 1}", "1+2j", "None", "(" * 999],
    "steps": ["1.5", "1e-4", "8 steps", "", "'8'", "True", "False", "nan", "inf", "1e400", "[8]", "{}", "None", "8j"],
    "limit": ["1.5", "True", "nan", "'None'"],
    "fast": ["2", "1", "0", "1.0", "yes", "no", "off", "None", "", "'true'", "[True]"],
    "mode": ["'tain'", "1", "None", "[]"],
}.items())
def test_a_value_of_another_type_is_refused(way, name, literals, tmp_path):
    for literal in literals:
        with pytest.raises(ConfigError) as error:
            way(name, literal, tmp_path)
        assert "\n" not in str(error.value), literal


@pytest.mark.parametrize("text, value", [("True", True), ("true", True), ("TRUE", True), ("False", False), ("false", False)])
def test_a_bool_is_what_it_says(text, value):
    assert parse(Settings, ["--fast=true", f"--fast={text}"])[0].fast is value


def test_a_bool_flag_alone_means_true_and_another_flag_alone_is_refused():
    assert parse(Settings, ["--fast"])[0].fast is True
    with pytest.raises(ConfigError, match="--steps=VALUE"):
        parse(Settings, ["--steps"])


@pytest.mark.parametrize("text", ["a=b", "two words ", "-x", "[0.9, 0.95]", "1e4", "None", "", "é 👋", "--steps=1", "'quoted'"])
def test_text_is_taken_as_it_stands(text):
    assert parse(Settings, [f"--note={text}"])[0].note == text


@pytest.mark.parametrize("name", ["limit", "folder"])
def test_an_optional_setting_takes_none(name, tmp_path):
    assert by_flag(name, "None", tmp_path) is by_flag(name, "null", tmp_path) is by_file(name, "None", tmp_path) is None


@pytest.mark.parametrize("source", ["steps = 10 ** 5000", "steps = 2 ** 63", "rate = 10 ** 5000", "mode = 10 ** 5000", "note = 10 ** 5000",
                                    "steps = []\nfor _ in range(100_000):\n    steps = [steps]", "class _Odd:\n    __repr__ = __eq__ = None\nmode = _Odd()"])
def test_values_that_only_a_program_can_make_are_refused(source, tmp_path):
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(ConfigError, match="odd.py': '(steps|rate|mode|note)' (expects|must be)"):
        parse(Settings, [str(tmp_path / "odd.py")])


@pytest.mark.parametrize("flag", ["--steps=1\n2", "--no\nsuch=1", "--steps=" + "x" * 5000, "two\nlines.py", "--steps=" + "9" * 400])
def test_a_message_is_one_line_of_bounded_length(flag):
    with pytest.raises(ConfigError) as error:
        parse(Settings, [flag])
    assert "\n" not in str(error.value) and len(str(error.value)) < 800


def test_an_error_says_where_what_and_which_type():
    with pytest.raises(ConfigError, match="^flag '--rate=fast': 'rate' expects float, got 'fast'$"):
        parse(Settings, ["--rate=fast"])
    with pytest.raises(ConfigError, match="^flag '--limit=x': 'limit' expects int or None, got 'x'$"):
        parse(Settings, ["--limit=x"])
    with pytest.raises(ConfigError, match="'mode' must be one of 'train', 'test', got 'tain'; did you mean 'train'"):
        parse(Settings, ["--mode=tain"])


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path):
    (tmp_path / "typo.py").write_text("learning_rat = 1e-4")
    for arg in ("--learning_rat=1", str(tmp_path / "typo.py")):
        with pytest.raises(ConfigError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
            parse(train.Config, [arg])


def test_the_last_one_wins_and_origin_tells(tmp_path):
    (tmp_path / "a.py").write_text("steps = 1\nrate = 0.5")
    file = str(tmp_path / "a.py")
    settings, origin = parse(Settings, ["--steps=3", file, "--steps=2"])
    assert (settings.steps, settings.rate, settings.note) == (2, 0.5, "")
    assert origin == {"steps": f"flag '--steps=2' (over file '{file}')", "rate": f"file '{file}'"}
    assert parse(Settings, ["--steps=2", file])[0].steps == 1


def test_helpers_in_a_file_are_no_settings(tmp_path):
    (tmp_path / "helpers.py").write_text("import math\n_n = 3\nsteps = int(math.pow(_n, 2)) + sum(_n for _ in range(2))")
    assert parse(Settings, [str(tmp_path / "helpers.py")]) == (Settings(steps=15), {"steps": f"file '{tmp_path}/helpers.py'"})


@pytest.mark.parametrize("source", ["steps = ", "1 / 0", "raise SystemExit(3)", "raise ValueError('two\\nlines')", "open('missing.txt')",
                                    "import no_such_module", "def helper(): pass", "\0", "def f(): f()\nf()"])
def test_a_file_that_fails_gives_one_line_with_its_name(source, tmp_path):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ConfigError, match="bad.py'") as error:
        parse(Settings, [str(tmp_path / "bad.py")])
    assert "\n" not in str(error.value) and "does not exist" not in str(error.value)


@pytest.mark.parametrize("file", [os.path.relpath(f, ROOT) for f in sorted(glob.glob(os.path.join(ROOT, "config", "*.py")))])
def test_every_config_file_is_valid_and_survives_being_written_as_flags(file):
    cfg, _ = parse(train.Config, [os.path.join(ROOT, file)])
    train.check(cfg)
    assert parse(train.Config, [f"--{k}={v}" for k, v in dataclasses.asdict(cfg).items()])[0] == cfg


def test_help_lists_every_setting_with_its_comment(capsys):
    assert train.main(["--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    source = inspect.getsource(train.Config)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
    places = {node.target.id: node.lineno for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)}
    assert list(places) == [f.name for f in dataclasses.fields(train.Config)]
    for field in dataclasses.fields(train.Config):
        line, = (line for line in shown if line.strip().startswith(f"--{field.name}={field.default} "))
        assert comments[places[field.name]] in line


MISTAKES = ["--learning_rat=1", "--batch_size=two", "--batch_size=1.5", "--compile=2", "--dtype=float16", "missing.py", "missing", "--data",
            "--data=missing.jsonl", "--tokenizer=missing.model", "--init_from=missing", "--seq_len=0", "--val_fraction=1", "--cache_dir=a_file"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_exit_code_2_and_one_line(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert train.main([mistake]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("argv", [["missing.jsonl"], ["pydoc", "--seq_le=5"], ["pydoc", "--seq_len=0"], ["pydoc", "--text_documents=line"]])
def test_a_mistake_in_preparing_data_too(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert data.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_the_exit_code_reaches_the_shell(tmp_path):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), "--learning_rat=1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: flag '--learning_rat=1': unknown setting 'learning_rat'; did you mean 'learning_rate'?\n"


@pytest.mark.parametrize("argv", [["train.py", "--help"], ["train.py", "--dry_run"], ["data.py", "--help"], ["sample.py", "--help"],
                                  ["checkpoint.py", "--help"], ["bench.py", "--help"]])
def test_a_reader_that_leaves_early_ends_a_script_quietly(argv):
    """As in `python train.py --dry_run | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""
