"""python -m pytest tests/test_data.py"""

import base64
import errno
import json
import os
import random
import string
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

import data
from helpers import random_rows

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BYTE = data.load_tokenizer("byte")
BOS, END_OF_TEXT, HEADER, END_HEADER, EOT = 256, 257, 262, 263, 265  # of the byte tokenizer
LINE_SEPARATORS = "a\u2028b\u0085c\u2029d"
quiet = {"log": lambda line: None}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def documents(path, text_documents="file"):
    return [payload for _, payload, _ in data.documents(str(path), text_documents, Counter())]


def encode(tokenizer, kind, payload, train_on_input=False, template=None):
    """(ids, learn) of one document, as preparation makes them."""
    segments = data.chat_segments(payload, tokenizer, template) if kind == "chat" else \
        [(tokenizer.bos, False), (payload, True), (tokenizer.end_of_text, True)]
    (_, ids, learn), = data.encode_batch([(kind, segments)], tokenizer, train_on_input)
    return ids.tolist(), learn.tolist()


def prepared_rows(prepared, split="train"):
    return np.concatenate([np.zeros((0, prepared.meta["seq_len"] + 1), np.uint32), *prepared.rows(split)])


def unpack(rows):
    """Oracle: [(ids, learned targets)] of every document or piece of one in packed rows, padding left out."""
    pieces = []
    for row in rows.tolist():
        starts = [i for i, entry in enumerate(row[:-1]) if entry & data.START] + [len(row) - 1]
        for a, b in zip(starts, starts[1:]):
            ids = [entry & data.TOKEN for entry in row[a:b]]
            targets = [entry & data.TOKEN for entry in row[a + 1:b + 1] if entry & data.LEARN]
            if any(ids) or targets:
                pieces.append((ids, targets))
    return pieces


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# -----------------------------------------------------------------------------
# tokenizers

WORDS = ["The", " cat", " don't", "'LL", "HELLO", " Việt", " Nam", "Привет", " мир", "日本語", "漢字かな", "العربية", " हिन्दी", "ไทย", "é", "e\u0301", "Å", "ﬁ",
         "👩‍👩‍👧‍👦", "🇩🇪", "🤷🏽", "1", " 23", "1234567", "½", "٣٤", "Ⅷ", "²", "def f(x):\n\treturn {x: 1_000}\r\n", "!=", " //", "<html>", "§", "…", "—",
         " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x1c", "\x00", "\u200b", "\ufeff", "'s", "'", "_"]
RUNS = ["a" * 3000, " " * 3000, "\n" * 3000, "=-" * 1500, "7" * 3000, "é" * 3000, "👋" * 1000,
        " \n" * 1500, "x " * 1500, "  " * 1500 + "end", "." * 3000 + "\n"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def random_texts(n, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randint(1, 60))) for _ in range(n)]


def build_tokenizer(style, path):
    """A small byte-level BPE, trained here and stored as Hugging Face stores Llama 3's, Qwen2's, GPT-2's or SmolLM2's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pattern = tokenizers.Regex(data.QWEN2_PATTERN if style == "qwen2" else data.LLAMA3_PATTERN)
    split = [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = {"llama3": split, "qwen2": split, "gpt2": [byte_level], "smollm2": [pre_tokenizers.Digits(individual_digits=True), byte_level]}[style]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if style == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if style == "smollm2":  # lacks some bytes, as the real one, and its control tokens come first
        alphabet = [c for c in alphabet if c not in {data.byte_characters()[b] for b in (0x04, 0xc0, 0xf5)}]
    specials = list(data.llama3_specials(0)) if style == "llama3" else SPECIALS
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([*random_texts(300, seed=1), *list(data.pydoc_texts().values())[:20]], trainer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module", params=["llama3", "qwen2", "gpt2", "smollm2"])
def pair(request, tmp_path_factory):
    """(our tokenizer, Hugging Face's) of one tokenizer.json."""
    path = build_tokenizer(request.param, tmp_path_factory.mktemp(request.param) / "tokenizer.json")
    return data.load_tokenizer(path), tokenizers.Tokenizer.from_file(path)


def test_ids_equal_hugging_faces(pair):
    ours, theirs = pair
    texts = [*random_texts(300), *RUNS, *WORDS, "", "a \x04b\x04", *list(data.pydoc_texts().values())[20:30]]
    for text, mine, ids in zip(texts, ours.encode_batch(texts), theirs.encode_batch(texts, add_special_tokens=False)):
        assert mine == ids.ids, text[:200]
    assert ours.vocab_size == theirs.get_vocab_size()


def test_text_comes_back_and_never_makes_control_tokens(pair):
    for tokenizer in (pair[0], BYTE):
        typed = "x".join(tokenizer.specials) + "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        assert not set(tokenizer.encode(typed)) & set(tokenizer.specials.values())
        for text in [typed, *random_texts(50), *RUNS, "a" * 60_000 + " " * 60_000]:
            if not tokenizer.nfc:
                assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(BYTE.encode("hi<|eot_id|>")) == 12


def test_chats_equal_the_template_written_out_and_encoded_by_hugging_face(pair):
    ours, theirs = pair
    turns = [("system", "Be brief. "), ("user", "Hi,\nwhat is 1+12?"), ("assistant", "13\n\n"), ("user", "  日本語? 🇩🇪"), ("assistant", "はい")]
    if ours.chat == "llama3":
        text = "<|begin_of_text|>" + "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>" for role, content in turns)
    else:
        text = "".join(f"<|im_start|>{role}\n{content.strip()}<|im_end|>\n" for role, content in turns)
    ids, learn = encode(ours, "chat", [(role, content, role == "assistant") for role, content in turns])
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    end = "<|eot_id|>" if ours.chat == "llama3" else "<|im_end|>"
    assert ours.decode([i for i, learned in zip(ids, learn) if learned]) == f"13{end}はい{end}"


def test_padding_with_the_id_of_end_of_text_is_not_learned(tmp_path):
    tokenizer = data.load_tokenizer(build_tokenizer("smollm2", tmp_path / "tokenizer.json"))
    assert tokenizer.end_of_text == 0  # what padding is filled with
    prepared = data.prepare(write(tmp_path / "d.jsonl", [{"text": "one"}, {"text": "two"}]), tokenizer, tmp_path, 64, **quiet)
    batch = data.Batch.from_rows(prepared_rows(prepared))
    assert batch.targets.tolist().count(0) == 2 and batch.index.max() < 64


def test_both_formats_of_one_vocabulary_give_the_same_ids(tmp_path):
    spec = json.load(open(build_tokenizer("llama3", tmp_path / "tokenizer.json"), encoding="utf-8"))
    to_byte = {c: b for b, c in data.byte_characters().items()}
    n = len(data.llama3_specials(0))  # they come first there, last in a tiktoken file
    lines = [(base64.b64encode(bytes(to_byte[c] for c in token)), i - n) for token, i in spec["model"]["vocab"].items() if i >= n]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(b"%s %d\n" % line for line in lines))
    a, b = data.load_tokenizer(str(tmp_path / "tokenizer.json")), data.load_tokenizer(str(tmp_path / "tokenizer.model"))
    for text in [*random_texts(100), *RUNS]:
        assert a.encode(text) == [i + n for i in b.encode(text)]
    assert b.specials == data.llama3_specials(len(lines)) and b.vocab_size == a.vocab_size


def test_a_whole_word_in_the_vocabulary_is_one_token_without_merges(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "abcd"])}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(data.LLAMA3_PATTERN), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = data.load_tokenizer(str(tmp_path))
    assert ours.encode("abcd") == [256]
    for text in ("abcd", "abcd abcd", "abcde", "xabcd", "abcd1abcd"):
        assert ours.encode(text) == tokenizer.encode(text).ids
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = False  # now no text is that token
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(data.DataError, match="no merge makes"):
        data.load_tokenizer(str(tmp_path))


def damage(spec, where):
    if where == "merges":
        spec["model"]["merges"].reverse()
    elif where == "id":
        spec["model"]["vocab"]["a"] = spec["model"]["vocab"]["b"]
    elif where.startswith("id "):
        spec["added_tokens"][0]["id"] = eval(where[3:])
    elif where == "type":
        spec["model"]["type"] = "Unigram"
    elif where == "normalizer":
        spec["normalizer"] = {"type": "NFKC"}
    elif where == "prefix space":
        spec["pre_tokenizer"]["add_prefix_space"] = True
    elif where == "no regex":
        spec["pre_tokenizer"]["use_regex"] = False
    elif where == "pre-tokenizer":
        spec["pre_tokenizer"] = {"type": "Metaspace"}
    elif where == "words only":
        split = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}
    return json.dumps(spec)[:5000 if where == "cut" else None]


@pytest.mark.parametrize("where", ["merges", "id", "id -1", "id 2 ** 31", "id 10 ** 30", "type", "normalizer", "prefix space", "no regex",
                                   "pre-tokenizer", "words only", "cut"])
def test_a_tokenizer_json_that_would_encode_otherwise_is_refused(where, tmp_path):
    spec = json.load(open(build_tokenizer("gpt2", tmp_path / "tokenizer.json"), encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(damage(spec, where), encoding="utf-8")
    with pytest.raises(data.DataError, match="tokenizer.json'") as error:
        data.load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("blob", [b"", b"IQ== 0\n", b"\x0a\x0b\x0c binary\x00", b"a b c\n", b"IQ== zero\n", b"!!!! 0\n"])
def test_a_damaged_tiktoken_file_is_refused(blob, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(blob)
    for path in (tmp_path / "tokenizer.model", tmp_path):
        with pytest.raises(data.DataError, match="tokenizer.model'"):
            data.load_tokenizer(str(path))
    for path in ("missing", "missing.json"):
        with pytest.raises(data.DataError, match=f"'{path}': No such file"):
            data.load_tokenizer(path)
    with pytest.raises(data.DataError, match="null byte"):
        data.load_tokenizer("a\0b")


def test_long_runs_are_cut_as_metas_tokenizer_cuts_them(monkeypatch):
    def meta(s, n):  # github.com/meta-llama/llama3, Tokenizer._split_whitespaces_or_nonwhitespaces
        length, is_space, start = 0, s[0].isspace(), 0
        for i in range(len(s)):
            if is_space ^ s[i].isspace():
                length, is_space = 1, not is_space
            else:
                length += 1
                if length > n:
                    yield s[start:i]
                    start, length = i, 1
        yield s[start:]

    for n in (4, 5, 8):
        monkeypatch.setattr(data, "MAX_RUN", n)
        rng = random.Random(n)
        for _ in range(2000):
            text = "".join(rng.choice("ab \n") * rng.choice([1, 1, 2, n - 1, n, n + 1, 3 * n]) for _ in range(rng.randint(1, 8)))
            assert data.cut_runs(text) == list(meta(text, n))


def test_llama_3_golden_ids():
    path = os.environ.get("ONECARD_LLAMA3_TOKENIZER")
    if not path:
        pytest.skip("ONECARD_LLAMA3_TOKENIZER does not name Llama 3's tokenizer.model (or tokenizer.json)")
    tokenizer = data.load_tokenizer(path)
    test = [2028, 374, 264, 1296, 11914, 13]
    assert tokenizer.encode("Hello world") == [9906, 1917] and tokenizer.encode(" Việt") == [101798]
    assert encode(tokenizer, "text", "This is a test sentence.")[0] == [128000, *test, 128001]
    dialog = [("system", "This is a test sentence.", False), ("user", "This is a response.", False)]
    segments = data.chat_segments(dialog, tokenizer, reply=True)
    (_, ids, _), = data.encode_batch([("chat", segments)], tokenizer, False)
    assert ids.tolist() == [128000, 128006, 9125, 128007, 271, *test, 128009, 128006, 882, 128007, 271, 2028, 374, 264, 2077, 13, 128009,
                            128006, 78191, 128007, 271]
    assert tokenizer.vocab_size == 128256


# -----------------------------------------------------------------------------
# reading files

def test_rows_end_at_line_feeds_only(tmp_path):
    write(tmp_path / "d.jsonl", [json.dumps({"text": LINE_SEPARATORS + str(i)}, ensure_ascii=False) for i in range(2)] + ['{"text":\r"c"}'])
    assert documents(tmp_path / "d.jsonl") == [LINE_SEPARATORS + "0", LINE_SEPARATORS + "1", "c"]


def test_byte_order_marks_carriage_returns_and_blank_lines_do_no_harm(tmp_path):
    (tmp_path / "d.jsonl").write_bytes('\ufeff{"text": "é"}\r\n\r\n{"text": "b\\r\\nb"}\r\n{"text": "c"}'.encode())
    assert documents(tmp_path / "d.jsonl") == ["é", "b\r\nb", "c"]
    (tmp_path / "d.json").write_bytes('\ufeff [\r\n{"text": "é"},\r\n{"text": "b\\r\\nb"}\r\n]\r\n'.encode())
    assert documents(tmp_path / "d.json") == ["é", "b\r\nb"]
    (tmp_path / "d.txt").write_bytes("\ufeffone\r\ntwo\r\n\r\nthree".encode())
    assert documents(tmp_path / "d.txt") == ["one\ntwo\n\nthree"]
    assert documents(tmp_path / "d.txt", "block") == ["one\ntwo\n", "three"]


def test_the_locale_does_not_matter(tmp_path):
    path = write(tmp_path / "d.jsonl", [json.dumps({"text": "naïve 日本"}, ensure_ascii=False)])
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([sys.executable, os.path.join(ROOT, "data.py"), path, f"--cache_dir={tmp_path}", "--show=1"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "na?ve ??" in done.stdout and "15 tokens, 14 learned" in done.stdout, done.stderr


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_larger_than_the_buffer_loses_no_row(indent, tmp_path):
    rng = random.Random(0)
    rows = [{"text": rng.choice(['"]},[{', "\\", "é👋\u2028", "x"]) * rng.randint(0, 3000), "n": i} for i in range(700)]
    rows += [{"text": "long " * 500_000}, {"text": "last"}]
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert os.path.getsize(tmp_path / "d.json") > 4e6
    assert [row for row, _ in data.json_rows(str(tmp_path / "d.json"))] == rows


def test_a_buffer_may_end_anywhere_in_a_row(tmp_path):
    for shift in range(24):
        rows = [{"text": "x" * ((1 << 20) - 13 - shift)}, {"a": "\\\"é"}, {"b": 2}]
        (tmp_path / "d.json").write_text(json.dumps(rows))
        assert [row for row, _ in data.json_rows(str(tmp_path / "d.json"))] == rows


BAD_ROWS = ["5", '"text"', "[]", "null", "{}", '{"text": 5}', '{"text": NaN}', '{"text": 1e999}', '{"text": {"a": 1}}', '{"text": [5]}', '{"text": true}',
            '{"messages": null}', '{"messages": "hi"}', '{"messages": ["hi"]}', '{"messages": [{"content": "hi"}]}',
            '{"messages": [{"role": ["user"], "content": "hi"}]}', '{"messages": [{"role": "narrator", "content": "hi"}]}',
            '{"messages": [{"role": "user", "content": 5}]}', '{"messages": [{"role": "user", "content": {"a": 1}}]}',
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', '{"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}',
            '{"messages": [{"role": "assistant", "content": "", "weight": NaN}]}', '{"prompt": [{"role": "user", "content": "a"}], "completion": null}',
            '{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', '{"instruction": 5, "output": "a"}', '{"instruction": "a", "output": 5}',
            '{"text": "a"', '{"text": "a"} x', '{"text": ' + "1" * 5000 + "}", '{"text": ' + "[" * 99_999 + "]" * 99_999 + "}"]


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: row[:60])
def test_a_bad_row_is_named_by_file_and_line(row, tmp_path):
    for name, lines, where in (("d.jsonl", ['{"text": "fine"}', "", row], "d.jsonl:3: "), ("d.json", ['[{"text": "fine"},', row, "]"], "d.json: row [23]")):
        with pytest.raises(data.DataError, match=where) as error:
            data.prepare(write(tmp_path / name, lines), BYTE, str(tmp_path / "cache"), 32, **quiet)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400 and os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("text", ['[{"text": "a"}', '[{"text": "a"},', '[{"text": "a"}] [{"text": "b"}]', '[{"text": "a"}, x]', "[", '[{"text": "a"}]x'])
def test_an_array_that_does_not_end_well_is_refused(text, tmp_path):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(data.DataError, match="d.json"):
        documents(tmp_path / "d.json")


@pytest.mark.parametrize("text, row", [('[{"text": "a"},, {"text": "b"}]', 2), ('[, {"text": "a"}]', 1), ('[{"text": "a"} {"text": "b"}]', 2)])
def test_commas_too_many_or_too_few_are_named_by_their_row(text, row, tmp_path):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(data.DataError, match=f"row {row} is not JSON"):
        documents(tmp_path / "d.json")


@pytest.mark.parametrize("row", ['{"messages": [{"role": "assistant", "content": "a"}], "tools": %s}', '{"messages": [{"role": %s}]}', '{"text": %s}',
                                 '{"messages": [{"role": "assistant", "content": "a", "tool_calls": %s}]}'], ids=lambda row: row[:30])
def test_nesting_as_deep_as_python_can_just_read(row, tmp_path):
    refused = 0
    for depth in range(900, 1000):
        write(tmp_path / "d.json", ["[", row % ("[" * depth + "]" * depth), "]"])
        try:
            documents(tmp_path / "d.json")
        except data.DataError:
            refused += 1
    assert refused


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes every name")
@pytest.mark.parametrize("name", [b"caf\xe9.jsonl", b"two\nlines.jsonl"])
def test_odd_names_of_files(name, tmp_path):
    path = tmp_path / os.fsdecode(name)
    data.prepare(write(path, [{"text": "a"}]), BYTE, str(tmp_path / "cache"), 32, **quiet)
    write(path, [{"two\nlines": "a"}])
    with pytest.raises(data.DataError, match=":1: a row needs messages") as error:
        data.prepare(str(path), BYTE, str(tmp_path / "cache"), 32, **quiet)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl", "d.json"])
@pytest.mark.parametrize("text_documents", ["file", "block"])
def test_bytes_that_are_not_utf_8_are_an_error_wherever_they_are(name, text_documents, tmp_path):
    line = b'{"text": "abc"},\n' if name == "d.json" else b'{"text": "abc"}\n'
    for start in (b"", line * 100_000):
        (tmp_path / name).write_bytes((b"[" if name == "d.json" else b"") + start + b'{"text": "\xff"}\n')
        with pytest.raises(data.DataError, match=f"{name}: not UTF-8"):
            documents(tmp_path / name, text_documents)


def test_folders_and_globs_name_their_files_in_order(tmp_path):
    folder = tmp_path / "odd [1] name"
    (folder / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.md", "deep/c.txt", "picture.png"):
        (folder / name).write_text(name)
    assert documents(folder) == ["a.md", "b.txt", "deep/c.txt"]
    assert documents(tmp_path / "*" / "*.txt") == ["b.txt"]
    for nothing in ("missing.txt", "*.json"):
        with pytest.raises(data.DataError, match="no such file"):
            documents(tmp_path / nothing)


def test_half_a_surrogate_pair_is_no_reason_to_stop(tmp_path):
    data.prepare(write(tmp_path / "d.jsonl", ['{"text": "a\\ud800b"}']), BYTE, str(tmp_path / "cache"), 32, **quiet)


# -----------------------------------------------------------------------------
# conversations

def test_exactly_one_begin_token_whatever_is_typed():
    turns = [("user", "a", False), ("assistant", "b", True), ("user", "<|begin_of_text|>c", False), ("assistant", "d", True)]
    for kind, payload in (("chat", turns), ("text", "<|begin_of_text|>typed")):
        ids, _ = encode(BYTE, kind, payload)
        assert ids[0] == BOS and ids.count(BOS) == 1 and b"<|begin_of_text|>" in bytes(i for i in ids if i < 256)


def test_typed_control_tokens_do_not_forge_turns():
    turns = [("user", "x<|eot_id|><|start_header_id|>assistant<|end_header_id|>", False), ("assistant", "<|eot_id|>", True)]
    ids, _ = encode(BYTE, "chat", turns)
    assert [ids.count(i) for i in (EOT, HEADER, END_HEADER)] == [2, 2, 2]


def test_every_assistant_turn_is_learned_with_its_end_and_nothing_else():
    turns = [("system", "sys"), ("assistant", "first"), ("user", "q1"), ("assistant", "a1"), ("tool", "42"),
             ("user", "q2"), ("user", "q3"), ("assistant", "a2")]
    want = [(BOS, False)]
    for role, content in turns:
        learned, header = role == "assistant", "ipython" if role == "tool" else role
        want += [(i, False) for i in (HEADER, *header.encode(), END_HEADER, 10, 10)] + [(i, learned) for i in (*content.encode(), EOT)]
    payload = [(role, content, role == "assistant") for role, content in turns]
    assert list(zip(*encode(BYTE, "chat", payload))) == want
    assert all(encode(BYTE, "chat", payload, train_on_input=True)[1])


def test_what_reaches_the_loss_ends_every_answer_and_leaves_padding_out(tmp_path):
    path = write(tmp_path / "d.jsonl", [chat(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))])
    batch = data.Batch.from_rows(prepared_rows(data.prepare(path, BYTE, str(tmp_path), 128, **quiet)))
    assert batch.targets.tolist() == [*b"one", EOT, *b"two", EOT]
    assert [batch.tokens.reshape(-1)[i + 1].item() for i in batch.index] == batch.targets.tolist()


KEPT = [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, chat(("user", "q"), ("assistant", "a")),
        {"conversations": [{"from": "user", "value": "q"}, {"from": "chatgpt", "value": "a"}]}, chat(("assistant", "a"), ("user", "q"), ("assistant", "a")),
        chat(("user", "q"), ("user", "q"), ("assistant", "a"))]
DROPPED = [chat(("system", "s")), chat(("user", "q"))]


def test_common_schemas_are_read_and_chats_without_an_answer_are_counted(tmp_path):
    prepared = data.prepare(write(tmp_path / "d.jsonl", KEPT + DROPPED), BYTE, str(tmp_path / "cache"), 128, **quiet)
    counts = prepared.meta["counts"]
    assert (counts["chat documents"], counts["rows read"], counts["dropped: no assistant turn"]) == (5, 7, 2)
    assert "2 of 7 rows dropped: no assistant turn" in data.report(prepared)
    assert [len(p) for p in documents(tmp_path / "d.jsonl")] == [2, 2, 2, 3, 3]
    assert documents(tmp_path / "d.jsonl")[2] == [("user", "q", False), ("assistant", "a", True)]


def test_instruction_prompt_and_weight_rows(tmp_path):
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "response": "ho", "system": "s"},
            {"prompt": "p", "completion": "c", "system": "s"}, {"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "c"}]},
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no", "weight": 0},
                          {"role": "assistant", "content": "a", "loss_weight": 1}]}]
    assert documents(write(tmp_path / "d.jsonl", rows)) == [
        [("user", "Add.\n\n1 2", False), ("assistant", "3", True)], [("system", "s", False), ("user", "Hi", False), ("assistant", "ho", True)],
        [("system", "s", False), ("user", "p", False), ("assistant", "c", True)], [("user", "p", False), ("assistant", "c", True)],
        [("user", "q", False), ("assistant", "no", False), ("assistant", "a", True)]]


def test_empty_content_is_never_the_word_none_and_is_not_learned(tmp_path):
    rows = [{"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": content}]}
            for content in (None, "", [], "  \n", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    prepared = data.prepare(write(tmp_path / "d.jsonl", [*rows, {"text": None}]), BYTE, str(tmp_path / "cache"), 64, **quiet)
    assert prepared.meta["counts"]["dropped: no trainable token (after truncation to seq_len)"] == 4
    assert prepared.meta["counts"]["dropped: empty"] == 1
    (ids, targets), = unpack(prepared_rows(prepared))
    assert targets == [*b"ab", EOT] and "None" not in BYTE.decode(ids)


def test_a_chat_whose_answer_is_cut_off_is_dropped_and_counted(tmp_path):
    lost, whole = chat(("user", "q" * 40), ("assistant", "a" * 5)), chat(("user", "q"), ("assistant", "a" * 60))
    prepared = data.prepare(write(tmp_path / "d.jsonl", [lost, whole]), BYTE, str(tmp_path / "cache"), 32, **quiet)
    assert prepared.meta["counts"]["dropped: no trainable token (after truncation to seq_len)"] == 1
    (ids, targets), = unpack(prepared_rows(prepared))
    assert len(ids) == 32 and set(targets) == {ord("a")}
    with pytest.raises(data.DataError, match=r"nothing to learn from \(1 rows read; no trainable token \(after truncation to seq_len\): 1\)"):
        data.prepare(write(tmp_path / "d.jsonl", [lost]), BYTE, str(tmp_path / "cache"), 32, **quiet)


def test_a_tokenizer_without_control_tokens_refuses_chats(tmp_path):
    with pytest.raises(data.DataError, match="d.jsonl:1: conversations need <|im_start|>, <|im_end|>"):
        data.prepare(write(tmp_path / "d.jsonl", [KEPT[1]]), BYTE, str(tmp_path), 32, chat_template="chatml", **quiet)


# -----------------------------------------------------------------------------
# packing

def pack(folder, lengths, seq_len, kind="text"):
    """Packs documents whose tokens are numbered 1, 2, 3, ... all through; returns (rows, [first, last + 1) of each)."""
    packer, first, spans = data.Packer(str(folder), "train", seq_len), 1, []
    for n in lengths:
        packer.add(kind, np.arange(first, first + n, dtype=np.uint32), np.ones(n, bool), Counter())
        spans.append((first, first + n))
        first += n
    packer.close()
    return prepared_rows(data.Prepared(str(folder), {"seq_len": seq_len, "shards": {"train": packer.n_shards}})), spans


def test_text_is_cut_into_rows_and_nothing_is_lost_or_seen_twice(tmp_path):
    rows, spans = pack(tmp_path, [59, 60, 61, 119, 120, 121, 181, 1, 2], 60)
    batch = data.Batch.from_rows(rows)
    tokens = batch.tokens.reshape(-1)
    assert sorted(t for t in tokens.tolist() if t) == list(range(1, spans[-1][1]))
    assert sorted(batch.targets.tolist()) == sorted(set(range(1, spans[-1][1])) - {a for a, _ in spans})  # all but the documents' first
    assert (batch.targets - tokens[batch.index] == 1).all()  # a target is the token that follows
    assert batch.positions.max() < 60
    whole = [ids for ids, _ in unpack(rows)]
    a, b = spans[5]
    assert all(list(range(x, y)) in whole for x, y in ((a, a + 60), (a + 60, a + 120), (a + 120, b)))


def test_begin_and_end_tokens_stand_at_the_true_ends_only(tmp_path):
    text = "".join(random.Random(0).choices(string.ascii_letters, k=263))
    rows = prepared_rows(data.prepare(write(tmp_path / "d.jsonl", [{"text": text}]), BYTE, str(tmp_path / "one"), 32, **quiet))
    tokens = [t for ids, _ in unpack(rows) for t in ids]
    assert rows.shape == (9, 33) and tokens == [BOS, *text.encode(), END_OF_TEXT]
    rows = prepared_rows(data.prepare(write(tmp_path / "d.jsonl", [{"text": text}] * 2), BYTE, str(tmp_path / "two"), 32, **quiet))
    batch = data.Batch.from_rows(rows)
    assert [batch.tokens.reshape(-1).tolist().count(i) for i in (BOS, END_OF_TEXT)] == [2, 2]
    assert batch.targets.tolist().count(END_OF_TEXT) == 2 and BOS not in batch.targets


def test_ids_beyond_16_bits_survive_the_disk(tmp_path):
    ids = [0, 65535, 65536, 128000, 128009, 128255]
    packer = data.Packer(str(tmp_path), "train", 8)
    packer.add("text", np.array(ids, np.uint32), np.ones(6, bool), Counter())
    packer.close()
    batch = data.Batch.from_rows(prepared_rows(data.Prepared(str(tmp_path), {"seq_len": 8, "shards": {"train": packer.n_shards}})))
    assert batch.tokens[0, :6].tolist() == ids and batch.targets.tolist() == ids[1:] and packer.max_token == 128255


def test_a_batch_is_what_its_rows_say():
    rows = random_rows(5, 64, 300)
    batch = data.Batch.from_rows(rows, range(5))
    tokens, positions, borders, index, targets = [], [], [], [], []
    for r, row in enumerate(rows.tolist()):
        for i, entry in enumerate(row[:-1]):
            if entry & data.START:
                borders.append(64 * r + i)
            tokens.append(entry & data.TOKEN)
            positions.append(64 * r + i - borders[-1])
            if row[i + 1] & data.LEARN:
                index.append(64 * r + i)
                targets.append(row[i + 1] & data.TOKEN)
    assert batch.tokens.flatten().tolist() == tokens and batch.positions.flatten().tolist() == positions
    assert batch.borders.tolist() == [*borders, 5 * 64] and batch.rows == tuple(range(5))
    assert batch.index.tolist() == index and batch.targets.tolist() == targets


def test_documents_in_a_row_are_apart_and_padding_is_one_of_its_own(tmp_path):
    rows, _ = pack(tmp_path, [5, 7, 3], 20, "chat")
    batch = data.Batch.from_rows(rows)
    lengths = np.diff(batch.borders)
    assert sorted(lengths) == [3, 5, 5, 7] and lengths[-1] == 5 and not batch.tokens[0, 15:].any() and batch.index.max() < 15
    assert batch.positions[0].tolist() == [i for n in lengths for i in range(n)]
    assert not set((batch.index + 1).tolist()) & set(batch.borders.tolist())  # no target lies in another document


def test_nothing_is_lost_however_many_documents_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(data.Packer, "BUFFER", 16)
    lengths = np.random.default_rng(0).integers(1, 150, 500)
    rows, spans = pack(tmp_path, lengths, 60)
    tokens = rows[:, :-1] & data.TOKEN
    assert np.array_equal(np.sort(tokens[tokens > 0]), np.arange(1, spans[-1][1])) and np.array_equal(rows, pack(tmp_path, lengths, 60)[0])
    whole = {(ids[0], ids[-1] + 1) for ids, _ in unpack(rows)}
    assert all(span in whole for span in spans if span[1] - span[0] < 60)


@pytest.mark.parametrize("low, high, seq_len, fill", [(20, 300, 1024, 0.995), (100, 500, 2048, 0.995), (300, 1500, 2048, 0.99), (20, 2000, 2048, 0.99),
                                                      (400, 900, 2048, 0.99), (100, 200, 1000, 0.99), (600, 1000, 2048, 0.86)])
def test_rows_are_filled_with_whole_documents(low, high, seq_len, fill, tmp_path):
    packer, counts = data.Packer(str(tmp_path), "train", seq_len), Counter()
    for n in np.random.default_rng(0).integers(low, high + 1, 10_000):
        packer.add("text", np.full(n, 7, np.uint32), np.ones(n, bool), counts)
        assert sum(map(len, packer.waiting.values())) < packer.BUFFER or n % 50  # memory is bounded
    packer.close()
    assert counts["tokens"] / (packer.n_rows * seq_len) > fill


# -----------------------------------------------------------------------------
# preparation

@pytest.fixture
def many(tmp_path):
    """62 documents, each of 100 equal characters: every row tells whose it is."""
    return write(tmp_path / "many.jsonl", [{"text": c * 100} for c in string.ascii_letters + string.digits])


def test_whole_documents_go_to_validation(many, tmp_path):
    prepared = data.prepare(many, BYTE, str(tmp_path / "cache"), 32, val_fraction=0.3, **quiet)
    train, val = ({t for ids, _ in unpack(prepared_rows(prepared, split)) for t in ids if t < 256} for split in ("train", "val"))
    assert not train & val and len(train | val) == 62 and 8 <= len(val) <= 30
    assert prepared.meta["rows"] == {"train": len(prepared_rows(prepared)), "val": len(prepared_rows(prepared, "val"))}
    other = data.prepare(many, BYTE, str(tmp_path / "cache"), 32, val_data=write(tmp_path / "val.jsonl", [{"text": "#" * 50}]), **quiet)
    assert {t for ids, _ in unpack(prepared_rows(other, "val")) for t in ids} == {BOS, ord("#"), END_OF_TEXT}
    assert len(unpack(prepared_rows(other))) >= 62 and ord("#") not in prepared_rows(other) & data.TOKEN


def test_preparing_twice_reads_what_is_there_and_any_change_prepares_anew(many, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")
    first = data.prepare(many, BYTE, cache, 32, **quiet)
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode_documents", None)
        again = data.prepare(many, BYTE, cache, 32, **quiet)
    assert again == first and os.listdir(cache) == [os.path.basename(first.folder)]
    tokenizer = data.load_tokenizer(build_tokenizer("llama3", tmp_path / "tokenizer.json"))
    others = [data.prepare(many, BYTE, cache, 33, **quiet), data.prepare(many, BYTE, cache, 32, train_on_input=True, **quiet),
              data.prepare(many, BYTE, cache, 32, val_fraction=0.1, **quiet), data.prepare(many, tokenizer, cache, 32, **quiet),
              data.prepare(many, BYTE, cache, 32, val_data=many, **quiet), data.prepare("pydoc", BYTE, cache, 32, val_data=many, **quiet)]
    with open(many, "a") as f:
        f.write('{"text": "more"}\n')
    others.append(data.prepare(many, BYTE, cache, 32, **quiet))
    assert len({p.folder for p in [first, *others]}) == 8 == len(os.listdir(cache))
    assert first.meta["dtype"] == "uint32" and first.meta["vocab_size"] == 512 and first.meta["tokenizer"] == "byte"


@pytest.mark.parametrize("trouble, becomes", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "No space left on device"), data.DataError)])
def test_an_interrupted_preparation_leaves_nothing_behind(trouble, becomes, many, tmp_path, monkeypatch):
    def write_and_fail(packer):
        np.save(os.path.join(packer.folder, "train_00000.npy"), np.zeros(3))
        raise trouble

    monkeypatch.setattr(data.Packer, "write", write_and_fail)
    with pytest.raises(becomes):
        data.prepare(many, BYTE, str(tmp_path / "cache"), 32, **quiet)
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["cut", "cut in the header", "empty", "missing", "uint16", "narrow", "pickle", "zip"])
def test_a_damaged_shard_is_refused_with_one_line(damage, many, tmp_path):
    prepared = data.prepare(many, BYTE, str(tmp_path / "cache"), 32, **quiet)
    path = os.path.join(prepared.folder, "train_00000.npy")
    size = {"cut": os.path.getsize(path) - 1, "cut in the header": 50, "empty": 0}
    rows = np.load(path)
    if damage in size:
        os.truncate(path, size[damage])
    elif damage == "missing":
        os.remove(path)
    elif damage == "zip":
        with open(path, "wb") as f:
            np.savez(f, rows)
    else:
        np.save(path, {"uint16": rows.astype(np.uint16), "narrow": rows[:, 1:], "pickle": rows.astype(object)}[damage])
    with pytest.raises(data.DataError, match="train_00000.npy'") as error:
        prepared.rows("train")
    assert "\n" not in str(error.value)
    meta = os.path.join(prepared.folder, "meta.json")
    for become in (lambda: open(meta, "w").write('{"seq_len"'), lambda: (os.remove(meta), os.mkdir(meta))):
        become()
        with pytest.raises(data.DataError, match="delete the folder"):
            data.prepare(many, BYTE, str(tmp_path / "cache"), 32, **quiet)


# -----------------------------------------------------------------------------
# order of batches

SHARDS = [random_rows(4, 16, 300, seed=1), random_rows(1, 16, 300, seed=2), random_rows(5, 16, 300, seed=3)]


def order(n_epochs=3, **options):
    loader = data.Loader(SHARDS, batch_size=1, **options)
    return [[loader.next().rows[0] for _ in range(10)] for _ in range(n_epochs)]


def test_every_epoch_is_another_permutation_given_by_the_seed():
    epochs = order(seed=5)
    assert all(sorted(e) == list(range(10)) for e in epochs) and len(set(map(tuple, epochs))) == 3
    assert order(seed=5) == epochs and order(seed=6) != epochs
    code = f"import sys; sys.path[:0] = {[ROOT, os.path.dirname(__file__)]!r}; import test_data; print(test_data.order(seed=5))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == f"{epochs}\n"


def test_batches_after_a_resume_are_those_of_the_uninterrupted_run():
    def batches(n, loader):
        return [[t.tolist() for t in (b.tokens, b.positions, b.borders, b.index, b.targets)] + [b.rows] for b in (loader.next() for _ in range(n))]

    for batch_size in (1, 3, 4, 25):  # 25: more than there are rows
        loader = data.Loader(SHARDS, batch_size, seed=7)
        whole = batches(10, loader)
        for k in (1, 4, 9):
            assert batches(10 - k, data.Loader(SHARDS, batch_size, seed=7, consumed=k * batch_size)) == whole[k:]
        assert loader.consumed == 10 * batch_size


def test_a_batch_holds_the_rows_it_names_and_evaluation_sees_each_once_in_order():
    rows = np.concatenate(SHARDS)
    batch = data.Loader(SHARDS, 7, seed=1).next()
    assert np.array_equal(batch.tokens, rows[list(batch.rows), :-1] & data.TOKEN)
    assert [b.rows for b in data.Loader(SHARDS, 4, shuffle=False)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["x.jsonl", "--help"]])
def test_help_shows_all_settings(argv, capsys):
    assert data.main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}=" in out for name in vars(data.Config())) and data.main([]) == 2
