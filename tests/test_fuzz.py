"""
python -m pytest tests/test_fuzz.py

Damaged files of every kind that a user can hand over: each reader takes them or says what is wrong in one line, with
the one kind of error that is meant for it; nothing hangs, nothing is executed, and nothing is read or written outside
the given folder.
"""

import base64
import json
import os
import pickle
import random
import signal
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import configurator
import data
import train
from test_checkpoint import TINY, exported, loaded, meta_folder, trained

CASES = 180  # of each kind below
WILD = [None, True, -1, 0, 10 ** 30, 1e308, float("nan"), float("inf"), "", "x", "../../x", "a\nb", "\ud800", "\x00", [], {}, [[]], {"a": {}},
        "9" * 5000]


def flip(blob, rng):
    blob = bytearray(blob)
    for _ in range(rng.choice([1, 1, 2, 8])):
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
    return bytes(blob)


def cut(blob, rng):
    return blob[:rng.randrange(len(blob))]


def splice(blob, rng):
    a = rng.randrange(len(blob))
    b = min(len(blob), a + rng.choice([0, 1, 8, 100]))
    return blob[:a] + rng.choice([b"", b"\x00", b"\xff\xfe", b"\n", b"[" * 5000, b"{\"a\":" * 5000, b"1e999", b"9" * 5000, b"\\ud800", rng.randbytes(8)]) + blob[b:]


def recode(blob, rng):
    text = blob.decode("utf-8", errors="replace")
    return rng.choice([text.encode("utf-16"), b"\xef\xbb\xbf" + blob, text.encode("latin-1", errors="replace"), blob.replace(b"\n", b"\r\n"),
                       b"\x00" + blob, b"[" * 100_000, b"{\"a\":" * 100_000, b"", b"\n\n", b"null", b"[]", b"{}", b"../elsewhere/step_000001\n", b"/etc/passwd\n"])


def retype(blob, rng):
    """A JSON value somewhere in the file becomes another one, or goes."""
    try:
        value = json.loads(blob)
    except RecursionError:
        return blob
    except ValueError:  # JSON lines: one of them
        lines = blob.split(b"\n")
        i = rng.randrange(len(lines))
        lines[i] = retype(lines[i], rng) if lines[i].startswith(b"{") else lines[i]
        return b"\n".join(lines)
    holder, key, at = None, None, value
    while isinstance(at, (dict, list)) and at and (holder is None or rng.random() < 0.7):
        holder, key = at, rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = holder[key]
    if holder is None or rng.random() < 0.05:
        value = rng.choice(WILD)
    elif rng.random() < 0.2:
        value_there = holder.pop(key)
        if isinstance(holder, dict) and rng.random() < 0.5:
            holder[rng.choice(["a\nb", "\ud800", "../../x", "x" * 5000])] = value_there
    else:
        holder[key] = rng.choice(WILD)
    return json.dumps(value).encode()


def damaged(blob, rng):
    for _ in range(rng.choice([1, 1, 1, 2])):
        blob = rng.choice([flip, cut, splice, recode, retype, retype])(blob or b"{}", rng)
    return blob


def tokenizer_json():
    byte = {c: b for b, c in data.byte_characters().items()}
    vocab = {c: i for i, c in enumerate(sorted(byte))} | {"he": 256, "hel": 257}
    return json.dumps({"added_tokens": [{"id": 258, "content": "<|im_start|>"}, {"id": 259, "content": "<|im_end|>"}, {"id": 260, "content": "<|endoftext|>"}],
                       "normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                           {"type": "Split", "pattern": {"Regex": data.LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
                           {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
                       "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "he l"]}}).encode()


ROWS = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "weight": 1}], "tools": []},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        {"instruction": "do", "input": "x", "output": "y"}, {"prompt": "p", "completion": "c"}, {"text": "plain text"}]


def prepare(path, cache=None):
    prepared = data.prepare(path, data.load_tokenizer("byte"), cache or os.path.join(os.path.dirname(path), "cache"), 64,
                            text_documents="block", log=lambda line: None)
    for batch in data.Loader(prepared.rows("train"), 2, shuffle=False):
        assert batch.tokens.shape[1] == 64 and len(batch.index) == len(batch.targets)
    data.report(prepared)


def use_tokenizer(path):
    tokenizer = data.load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("hello wörld"))


def read_prepared(path):
    cache = os.path.dirname(os.path.dirname(path))
    prepare(os.path.join(os.path.dirname(cache), "rows.jsonl"), cache)


def resume(path):
    folder = checkpoint.newest(os.path.dirname(os.path.dirname(path)))
    state = checkpoint.load_state(folder)
    loaded(folder, torch.bfloat16)
    checkpoint.load_optimizer(OPTIMIZER, folder, state)


def resume_at_latest(path):
    folder = os.path.dirname(path)
    assert os.path.dirname(checkpoint.newest(folder)) == folder
    resume(os.path.join(checkpoint.newest(folder), "state.json"))


def run_folder(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    checkpoint.save(str(tmp_path), *trained(1), {"step": 1, "consumed": 2, "tokens": 64, "fingerprint": "x", "settings": {}}, 2)
    return tmp_path / "step_000001"


def prepared_folder(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(json.dumps(r).encode() for r in ROWS))
    prepare(str(tmp_path / "rows.jsonl"))
    return next((tmp_path / "cache").iterdir())


def hf_folder(tmp_path, indexed=False):
    folder = exported(tmp_path, TINY)[1]
    if indexed:
        os.rename(f"{folder}/model.safetensors", f"{folder}/a.safetensors")
        names = load_file(f"{folder}/a.safetensors")
        json.dump({"weight_map": dict.fromkeys(names, "a.safetensors")}, open(f"{folder}/model.safetensors.index.json", "w"))
    return folder


# kind: what makes a good file in tmp_path and returns its path, the reader, the error that is meant for it
KINDS = {
    "tokenizer.model": (lambda t: put(t / "tokenizer.model", b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)) + b"aGU= 256\n"), use_tokenizer, data.DataError),
    "tokenizer.json": (lambda t: put(t / "tokenizer.json", tokenizer_json()), use_tokenizer, data.DataError),
    "rows.jsonl": (lambda t: put(t / "rows.jsonl", b"\n".join(json.dumps(r).encode() for r in ROWS)), prepare, data.DataError),
    "rows.json": (lambda t: put(t / "rows.json", json.dumps(ROWS).encode()), prepare, data.DataError),
    "text.txt": (lambda t: put(t / "text.txt", "Some text, größer.\n\nMore of it\n".encode() * 5), prepare, data.DataError),
    "train_00000.npy": (lambda t: str(prepared_folder(t) / "train_00000.npy"), read_prepared, data.DataError),
    "meta.json": (lambda t: str(prepared_folder(t) / "meta.json"), read_prepared, data.DataError),
    "config.py": (lambda t: put(t / "config.py", b"batch_size = 4\nlearning_rate = 1e-4\n_x = [i for i in range(3)]\ndata = 'x.jsonl'\n"),
                  lambda p: configurator.parse(train.Config, [p]), configurator.ConfigError),
    "latest": (lambda t: str(run_folder(t / "run").parent / "latest"), resume_at_latest, checkpoint.CheckpointError),
    "config.json": (lambda t: hf_folder(t) + "/config.json", lambda p: loaded(os.path.dirname(p)), checkpoint.CheckpointError),
    "model.safetensors": (lambda t: hf_folder(t) + "/model.safetensors", lambda p: loaded(os.path.dirname(p)), checkpoint.CheckpointError),
    "index.json": (lambda t: hf_folder(t, True) + "/model.safetensors.index.json", lambda p: loaded(os.path.dirname(p)), checkpoint.CheckpointError),
    "params.json": (lambda t: meta_folder(t) + "/params.json", lambda p: loaded(os.path.dirname(p)), checkpoint.CheckpointError),
    "consolidated.00.pth": (lambda t: meta_folder(t) + "/consolidated.00.pth", lambda p: loaded(os.path.dirname(p)), checkpoint.CheckpointError),
    "state.json": (lambda t: str(run_folder(t) / "state.json"), resume, checkpoint.CheckpointError),
    "optimizer.safetensors": (lambda t: str(run_folder(t) / "optimizer-00000.safetensors"), resume, checkpoint.CheckpointError),
}
OPTIMIZER = trained(0)[1]


def put(path, blob):
    with open(path, "wb") as f:
        f.write(blob)
    return str(path)


def others(folder, path):
    """What must stay as it is: every file but the damaged one and the prepared data."""
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and str(p) != path and "cache" not in p.parts}


EVENTS = []  # what is opened and unpickled while a reader reads
READING = []
sys.addaudithook(lambda event, args: EVENTS.append((event, args[0])) if READING and event in ("open", "pickle.find_class") else None)


def unexpected(folder):
    """Events of reading beyond what lies in folder and in Python's own installation."""
    allowed = tuple(map(os.path.realpath, (folder, sys.prefix, sys.base_prefix)))
    return [e for e in EVENTS if e[0] != "open" or isinstance(e[1], str) and not os.path.realpath(e[1]).startswith(allowed)]


def read_and_judge(read, path, error, case, blob):
    """True if the file was refused as it should be."""
    signal.alarm(20)  # a hang ends the test run
    READING.append(path)
    try:
        read(path)
    except error as found:
        text = str(found)
        assert text.strip() and "\n" not in text and len(text) < 1000, (case, text)
        return True
    except Exception as other:
        pytest.fail(f"case {case}: {type(other).__name__}: {str(other)[:300]}; file: {blob[:300]!r}", pytrace=False)
    finally:
        signal.alarm(0)
        READING.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_taken_or_explained(tmp_path, kind):
    make, read, error = KINDS[kind]
    (tmp_path / "a" / "b" / "work").mkdir(parents=True)  # deep enough for ../../x
    path = make(tmp_path / "a" / "b" / "work")
    good = open(path, "rb").read()
    read(path)
    EVENTS.clear()
    rng, refused, around = random.Random(kind), 0, others(tmp_path, path)
    for case in range(CASES):
        blob = damaged(good, rng)
        if kind in ("model.safetensors", "optimizer.safetensors") and rng.random() < 0.7:  # most of the file is numbers: aim at the header
            head = 8 + int.from_bytes(good[:8], "little")
            header = retype(good[8:head], rng) if rng.random() < 0.5 else damaged(good[8:head], rng)
            blob = (len(header).to_bytes(8, "little") if rng.random() < 0.8 else rng.randbytes(8)) + header + good[head:]
        put(path, blob)
        refused += bool(read_and_judge(read, path, error, case, blob))
    assert refused > CASES // 10 or kind in ("text.txt", "train_00000.npy", "latest"), refused
    assert others(tmp_path, path) == around and not unexpected(tmp_path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


@pytest.mark.parametrize("store", [lambda f: np.save(f, np.array([Bomb()])), lambda f: torch.save({"tok_embeddings.weight": Bomb()}, f),
                                   lambda f: torch.save(Bomb(), f, _use_new_zipfile_serialization=False), lambda f: pickle.dump(Bomb(), f)],
                         ids=["numpy", "torch", "old torch", "pickle"])
@pytest.mark.parametrize("kind", ["train_00000.npy", "consolidated.00.pth", "model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.model"])
def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch, kind, store):
    make, read, error = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path)
    with open(path, "wb") as f:
        store(f)
    with pytest.raises(error):
        read(path)
    assert not os.path.exists("bomb-went-off")


def test_prepared_data_cannot_name_files_elsewhere(tmp_path):
    folder = prepared_folder(tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    for shards in (["../../x.npy"], ["/etc/passwd"], 10 ** 30):
        (folder / "meta.json").write_text(json.dumps(meta | {"shards": {"train": shards, "val": 0}}))
        with pytest.raises(data.DataError, match="damaged"):
            read_prepared(str(folder / "meta.json"))


def test_flags_of_any_spelling_are_taken_or_explained():
    rng, names, refused = random.Random(0), list(vars(train.Config())), 0
    pieces = ["--", "-", "=", "1e4", "1e400", "9" * 5000, "None", "nan", "'", "[", "(" * 300, "\x00", "true", "é", " ", "0x10", "1_000", "lambda: 0", "\n", *names[:20]]
    for _ in range(3 * CASES):
        flag = rng.choice([lambda: f"--{rng.choice(names)}={rng.choice(pieces)}{rng.choice(['', *pieces])}", lambda: "".join(rng.choices(pieces, k=4))])()
        try:
            configurator.parse(train.Config, [flag])
        except configurator.ConfigError as error:
            refused += 1
            assert str(error) and "\n" not in str(error) and len(str(error)) < 1000
    assert refused > CASES
