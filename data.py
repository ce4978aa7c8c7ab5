"""
From text and conversations on disk to packed rows of tokens, and from rows to batches.

    python data.py DATA [--tokenizer=byte] [--seq_len=2048] [--show=3]     prepare, report, show samples

Prepared rows are uint32 .npy shards [rows, seq_len + 1]. The lower 30 bits of an entry are the token; the two upper
bits say whether it is learned as a target, and whether a document starts with it. Column seq_len is only ever a target:
the token after the row, where the row ends inside a document.

What becomes of a document: text longer than a row is cut into rows, nothing lost, begin/end tokens only at its true
ends; a conversation is never cut in two: past seq_len it is truncated, and dropped if nothing learnable is left.
"""

import base64
import concurrent.futures
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import time
import unicodedata
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tiktoken
import torch

import configurator

LEARN, START, TOKEN = 1 << 31, 1 << 30, (1 << 30) - 1


class DataError(configurator.UserError):
    """A user's data or tokenizer can't be used."""


# -----------------------------------------------------------------------------
# tokenizers

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_GPT2_PATTERN = r"\p{N}|\s+(?=\p{N})|" + GPT2_PATTERN.replace(r" ?\p{N}+|", "")
MAX_RUN = 25_000  # characters: longer runs of (non-)space are cut, as Meta's tokenizer does, for the regex's sake


def llama3_specials(first: int) -> dict[str, int]:
    """Llama 3.1's 256 control tokens, numbered from first."""
    named = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
             "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image"]
    named += [f"reserved_special_token_{i}" for i in range(2, 246)]
    return {f"<|{name}|>": first + i for i, name in enumerate(named)}


class Tokenizer:
    """
    Byte-level BPE through tiktoken. encode() never makes control tokens out of text; the ids of those are in
    .specials, and named ones in .bos, .end_of_text and .end_of_turn (None where the vocabulary has none).
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, specials: dict[str, int], digest: str, nfc: bool = False,
                 no_token: set[int] = frozenset()):
        """no_token: ranks that stand for bytes the vocabulary lacks; they are dropped, as Hugging Face does."""
        self.specials, self.digest, self.nfc, self.no_token = specials, digest, nfc, no_token
        ids = [*specials.values(), *(r for r in ranks.values() if r not in no_token)]
        self.ids = set(ids)
        if len(self.ids) < len(ids) or max(ids) > TOKEN:
            raise DataError("two tokens have the same id, or one is out of range")
        self.encoding = tiktoken.Encoding("onecard", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = max(ids) + 1
        self.chat = ("llama3" if "<|start_header_id|>" in specials else "chatml" if "<|im_start|>" in specials else None)
        self.bos = specials.get("<|begin_of_text|>")
        self.end_of_text = specials.get("<|end_of_text|>", specials.get("<|endoftext|>"))
        self.end_of_turn = specials.get("<|eot_id|>", specials.get("<|im_end|>"))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, on all cores."""
        parts = [cut_runs(unicodedata.normalize("NFC", text) if self.nfc else text) for text in texts]
        flat = [p for of_text in parts for p in of_text]
        shares = min(os.cpu_count() or 1, 1 + len(flat) // 64)  # tiktoken's own batches start a task for every text
        encoded = [None] * len(flat)
        with concurrent.futures.ThreadPoolExecutor(shares) as pool:
            for k, ids in enumerate(pool.map(lambda k: [self.encoding.encode_ordinary(p) for p in flat[k::shares]], range(shares))):
                encoded[k::shares] = ids
        encoded = iter(encoded)
        return [[t for _ in of_text for t in next(encoded) if t not in self.no_token] for of_text in parts]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids) -> bytes:
        """Bytes of the ids; ids beyond the vocabulary (padding rows of a model) decode to nothing."""
        return b"".join(self.encoding.decode_single_token_bytes(i) for i in map(int, ids) if i in self.ids)

    def decode(self, ids) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def cut_runs(text: str) -> list[str]:
    """The text in parts, so that no run of spaces or of non-spaces within a part is longer than MAX_RUN."""
    half = MAX_RUN // 2  # a longer run fills an aligned block of this size; most texts have none
    blocks = (text[i:i + half] for i in range(0, len(text) - half + 1, half))
    if len(text) <= MAX_RUN or not any(b.isspace() or b.split(None, 1) == [b] for b in blocks):
        return [text]
    cuts = [0]
    for run in re.finditer(r"\s+|\S+", text):
        cuts += range(run.start() + MAX_RUN, run.end(), MAX_RUN)
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)])]


def load_tokenizer(path: str) -> Tokenizer:
    """
    'byte' (256 bytes and Llama's control tokens), a tiktoken file (Llama's tokenizer.model), a Hugging Face
    tokenizer.json, or a folder that holds one of them. DataError if it is none of these.
    """
    if path == "byte":
        ranks = {bytes([i]): i for i in range(256)}
        return Tokenizer(ranks, LLAMA3_PATTERN, llama3_specials(256), "byte")
    if os.path.isdir(path):
        names = [n for n in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model") if os.path.isfile(os.path.join(path, n))]
        if not names:
            raise DataError(f"tokenizer '{path}': the folder has neither tokenizer.json nor tokenizer.model")
        path = os.path.join(path, names[0])
    try:
        with open(path, "rb") as f:
            blob = f.read()
        return (from_tokenizer_json if path.endswith(".json") else from_tiktoken)(blob, hashlib.sha256(blob).hexdigest())
    except OSError as error:
        raise DataError(f"tokenizer '{path}': {error.strerror}") from None
    except DataError as error:
        raise DataError(f"tokenizer '{path}': {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"tokenizer '{path}' is damaged or of another format ({type(error).__name__}: {error})") from None


def from_tiktoken(blob: bytes, digest: str) -> Tokenizer:
    """Lines of 'base64 rank'; Llama 3's pattern and control tokens are added."""
    ranks = {}
    for number, line in enumerate(blob.splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise DataError(f"line {number} is not 'base64 rank'") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([i]) in ranks for i in range(256)):
        raise DataError("ranks have gaps or single bytes are missing; is the file complete?")
    return Tokenizer(ranks, LLAMA3_PATTERN, llama3_specials(len(ranks)), digest)


def from_tokenizer_json(blob: bytes, digest: str) -> Tokenizer:
    """Hugging Face's byte-level BPE (Llama 3, SmolLM2, Qwen2): merges in id order are tiktoken's ranks."""
    spec = json.loads(blob)
    model = spec["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise DataError("only byte-level BPE is supported")
    specials = {t["content"]: t["id"] for t in spec.get("added_tokens", [])}
    to_byte = {c: b for b, c in byte_characters().items()}
    ranks = {bytes(to_byte[c] for c in token): i for token, i in model["vocab"].items() if token not in specials}
    made = [model["vocab"]["".join(merge.split(" ") if isinstance(merge, str) else merge)] for merge in model["merges"]]
    if made != sorted(made):
        raise DataError("merges are not in the order of their ids, which tiktoken needs")
    if not model.get("ignore_merges") and {i for token, i in ranks.items() if len(token) > 1} - set(made):
        raise DataError("the vocabulary has tokens that no merge makes, which tiktoken would use")
    missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
    no_token = dict(zip(missing, itertools.count(max([*ranks.values(), *specials.values()]) + 1)))
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise DataError(f"normalizer {normalizer.get('type')} is not supported")
    pattern = split_pattern(spec["pre_tokenizer"])
    return Tokenizer(ranks | no_token, pattern, specials, digest, normalizer is not None, set(no_token.values()))


def split_pattern(pre: dict) -> str:
    """The regular expression that a pre_tokenizer section stands for."""
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    kinds = [s["type"] for s in steps]
    own_regex = steps[-1].get("use_regex", True)
    if not steps[-1].get("add_prefix_space"):
        if kinds == ["Split", "ByteLevel"] and not own_regex and steps[0]["behavior"] == "Isolated" and not steps[0].get("invert"):
            pattern = steps[0]["pattern"]["Regex"]
            if pattern in (LLAMA3_PATTERN, QWEN2_PATTERN):  # an unknown one may leave text out, which tiktoken would not tell
                return pattern
        if kinds == ["Digits", "ByteLevel"] and own_regex and steps[0]["individual_digits"]:
            return DIGITS_GPT2_PATTERN
        if kinds == ["ByteLevel"] and own_regex:
            return GPT2_PATTERN
    raise DataError(f"pre-tokenizer {kinds} with these options is not supported")


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte (github.com/openai/gpt-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


# -----------------------------------------------------------------------------
# documents: what a file holds, as (kind, payload, where)
#   text: a string      chat: a list of (role, content, learn) with role system, user, assistant or tool

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant",
         "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool",
         "ipython": "tool", "function": "tool", "observation": "tool"}


def find_files(data: str) -> list[str]:
    """The files that a path, a folder or a glob pattern names, sorted. DataError if there are none."""
    if os.path.isfile(data):
        return [data]
    pattern = os.path.join(glob.escape(data), "**", "*") if os.path.isdir(data) else data
    files = sorted(f for f in glob.glob(pattern, recursive=True) if f.endswith((".txt", ".md", ".json", ".jsonl")) and os.path.isfile(f))
    if not files:
        raise DataError(f"data '{data}': no such file, or no .txt, .md, .json or .jsonl file in it")
    return files


def documents(data: str, text_documents: str, counts: Counter):
    """
    Yields (kind, payload, where) for every document of data; drops are counted with their reason.
    text_documents: 'file' (each .txt or .md file is one document) or 'block' (blank lines separate documents).
    """
    if data == "pydoc":
        for name, text in sorted(pydoc_texts().items()):
            yield "text", text, name
        return
    for path in find_files(data):
        try:
            yield from text_file(path, text_documents, counts) if path.endswith((".txt", ".md")) else json_file(path, counts)
        except OSError as error:
            raise DataError(f"data '{path}': {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason}); convert the file first") from None


def pydoc_texts() -> dict[str, str]:
    """English text that comes with Python: its language reference, or the standard library's sources without it."""
    try:
        from pydoc_data.topics import topics
        return dict(topics)
    except ImportError:
        folder = os.path.dirname(os.__file__)
        return {n: open(os.path.join(folder, n), encoding="utf-8").read() for n in sorted(os.listdir(folder)) if n.endswith(".py")}


def text_file(path, text_documents, counts):
    with open(path, encoding="utf-8-sig") as f:
        blocks = ("".join(lines) for blank, lines in itertools.groupby(f, lambda line: not line.strip()) if not blank)
        for i, text in enumerate([f.read()] if text_documents == "file" else blocks, 1):
            counts["rows read"] += 1
            if text.strip():
                yield "text", text, f"{path}: document {i}"
            else:
                counts["dropped: empty"] += 1


def json_file(path, counts):
    for row, where in json_rows(path):
        counts["rows read"] += 1
        try:
            kind, payload = read_row(row)
        except (DataError, RecursionError) as error:
            raise DataError(f"{where}: {error}") from None
        if kind == "chat" and not any(role == "assistant" for role, _, _ in payload):
            counts["dropped: no assistant turn"] += 1
        elif not payload:
            counts["dropped: empty"] += 1
        else:
            yield kind, payload, where


def json_rows(path: str):
    """Yields (row, where) of a .jsonl file, or of a .json file that holds one array, without reading it all at once."""
    with open(path, encoding="utf-8-sig", newline="\n") as f:  # lines end at \n only, unlike str.splitlines()
        buffer = f.read(1 << 20).lstrip()
        if not buffer.startswith("["):
            f.seek(0)
            for number, line in enumerate(f, 1):
                if line.strip():
                    try:
                        yield json.loads(line), f"{path}:{number}"
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{path}:{number}: not JSON ({str(error)[:80]})") from None
            return
        decoder, gap, at, number = json.JSONDecoder(), re.compile(r"[ \t\r\n]*(,?)[ \t\r\n]*"), 1, 0
        while True:
            comma = gap.match(buffer, at)
            if buffer.startswith("]", comma.end()):
                if (buffer[comma.end() + 1:] + f.read()).strip():
                    raise DataError(f"{path}: something follows the array, after row {number}")
                return
            try:
                if bool(comma[1]) != (number > 0):
                    raise ValueError("a comma is missing or too many")
                row, at = decoder.raw_decode(buffer, comma.end())
            except (ValueError, RecursionError) as error:  # or the buffer ends here
                more = f.read(max(1 << 20, len(buffer) - at))
                if not more:
                    raise DataError(f"{path}: row {number + 1} is not JSON ({str(error)[:80]})") from None
                buffer, at = buffer[at:] + more, 0
                continue
            number += 1
            yield row, f"{path}: row {number}"


def read_row(row):
    """A JSON object -> ('text', str) or ('chat', [(role, content, learn), ...]). DataError where it is neither."""
    if not isinstance(row, dict):
        raise DataError(f"a row must be a JSON object, not {type(row).__name__}")
    if "messages" in row or "conversations" in row:
        turns = row.get("messages", row.get("conversations"))
        if not isinstance(turns, list):
            raise DataError("messages must be a list")
        chat = [read_turn(t) for t in turns]
    elif "instruction" in row:
        question = content_text(row["instruction"]), content_text(row.get("input"))
        answer = content_text(row.get("output", row.get("response")))
        chat = [("user", "\n\n".join(filter(None, question)), False), ("assistant", answer, True)]
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            chat = [read_turn(t) for t in [*row["prompt"], *row["completion"]]]
        else:
            chat = [("user", content_text(row["prompt"]), False), ("assistant", content_text(row["completion"]), True)]
    elif "text" in row:
        return "text", content_text(row["text"])
    else:
        raise DataError(f"a row needs messages, conversations, instruction, prompt/completion or text; it has {', '.join(list(row)[:6])}")
    if row.get("tools"):
        chat.insert(0, ("system", f"Tools: {row['tools'] if isinstance(row['tools'], str) else json.dumps(row['tools'])}", False))
    if row.get("system"):
        chat.insert(0, ("system", content_text(row["system"]), False))
    return "chat", chat


def read_turn(turn):
    if not isinstance(turn, dict):
        raise DataError(f"a message must be an object, not {type(turn).__name__}")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        raise DataError(f"unknown role {name!r}")
    weight = turn.get("weight", turn.get("loss_weight", 1))
    if weight not in (0, 1):
        raise DataError(f"weight {weight!r}: only 0 and 1 are supported")
    content = content_text(turn["content"] if "content" in turn else turn.get("value"))
    if turn.get("tool_calls"):
        content += json.dumps(turn["tool_calls"])
    return ROLES[name], content, ROLES[name] == "assistant" and weight == 1


def content_text(content) -> str:
    """None is no text; a list of {'type': 'text'} parts is joined; anything but text is an error."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    odd = [text for text in texts if not isinstance(text, str)]
    if odd:
        raise DataError(f"content must be text, not {str(odd[0])[:60]!r}")
    return "".join(texts)


def chat_segments(chat, tokenizer: Tokenizer, template: str | None = None, reply: bool = False):
    """
    A conversation as (text or control id, learn) segments. Learned: every assistant turn that says something and
    has learn set, with the token that ends it. reply: end with an open assistant turn instead.
    """
    template = template or tokenizer.chat
    special = tokenizer.specials
    needed = {"llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "chatml": ("<|im_start|>", "<|im_end|>")}
    missing = [s for s in needed.get(template, ["a chat template"]) if s not in special]
    if missing:
        raise DataError(f"conversations need {', '.join(missing)}, which this tokenizer does not have")
    end = special[needed[template][-1]]
    segments = [(tokenizer.bos, False)] if template == "llama3" else []
    for role, content, learn in [*chat, *([("assistant", None, False)] if reply else [])]:
        learn = learn and bool(content.strip())
        if template == "llama3":
            name = "ipython" if role == "tool" else role
            segments += [(special["<|start_header_id|>"], False), (name, False), (special["<|end_header_id|>"], False), ("\n\n", False)]
        else:
            segments += [(special["<|im_start|>"], False), (f"{role}\n", False)]
        if content is not None:
            segments += [(content.strip(), learn), (end, learn), *([("\n", False)] if template == "chatml" else [])]
    return segments


# -----------------------------------------------------------------------------
# preparation: documents -> packed rows on disk

@dataclass
class Prepared:
    """A folder of rows: train_*.npy, val_*.npy and meta.json."""
    folder: str
    meta: dict

    def rows(self, split: str) -> list[np.ndarray]:
        """Memory-mapped shards of 'train' or 'val', checked against meta.json."""
        shards = []
        for i in range(self.meta["shards"][split]):
            path = os.path.join(self.folder, f"{split}_{i:05d}.npy")
            try:
                shard = np.lib.format.open_memmap(path, mode="r")  # plain arrays only: nothing in the file is executed
                if shard.dtype != np.uint32 or shard.ndim != 2 or shard.shape[1] != self.meta["seq_len"] + 1:
                    raise ValueError(f"it holds {shard.dtype} {shard.shape}, not uint32 rows of {self.meta['seq_len'] + 1}")
            except Exception as error:  # numpy raises many kinds for a damaged header
                raise DataError(f"prepared data '{path}' is damaged ({error}); delete the folder to prepare it anew") from None
            shards.append(shard)
        return shards


def read_meta(folder: str) -> dict | None:
    """A prepared folder's meta.json, None if there is none; DataError unless it is as it was written."""
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
            meta = json.load(f)
        if meta.pop("check") == meta_check(meta):
            return meta
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise DataError(f"prepared data '{folder}' is damaged; delete the folder to prepare it anew")


def meta_check(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def fingerprint(sources: list[str], tokenizer: Tokenizer, **settings) -> str:
    """Hash of everything that decides the rows: the files' contents, the tokenizer, the settings and this format."""
    digest = hashlib.sha256(json.dumps(["rows-3", len(sources), tokenizer.digest, settings], sort_keys=True).encode())
    for data in sources:
        if data == "pydoc":
            digest.update(json.dumps(pydoc_texts(), sort_keys=True).encode())
            continue
        files = find_files(data)
        digest.update(str(len(files)).encode())
        for path in files:
            try:
                with open(path, "rb") as f:
                    digest.update(os.fsencode(os.path.basename(path)) + hashlib.file_digest(f, "sha256").digest())
            except OSError as error:
                raise DataError(f"data '{path}': {error.strerror}") from None
    return digest.hexdigest()[:16]


def prepare(data: str, tokenizer: Tokenizer, cache_dir: str, seq_len: int, val_fraction: float = 0.0, val_data: str | None = None,
            text_documents: str = "file", train_on_input: bool = False, chat_template: str | None = None, log=print,
            stop=lambda: None) -> Prepared:
    """
    Packed rows of data, from cache_dir if they are there already. Whole documents go to validation: val_data, or a
    share val_fraction of data, chosen by the document's number. DataError if nothing can be learned from the data.
    stop() is called now and then; it may raise.
    """
    settings = dict(seq_len=seq_len, val_fraction=0.0 if val_data else val_fraction, text_documents=text_documents,
                    train_on_input=train_on_input, chat_template=chat_template or tokenizer.chat)
    sources = [(data, "train"), (val_data, "val")] if val_data else [(data, None)]
    key = fingerprint([source for source, _ in sources], tokenizer, **settings)
    folder = os.path.join(cache_dir, key)
    meta = read_meta(folder)
    if meta:
        return Prepared(folder, meta)
    work = f"{folder}.{os.getpid()}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    try:
        os.makedirs(work)
        packers = {split: Packer(work, split, seq_len) for split in ("train", "val")}
        counts, start, shown, number = Counter(), time.time(), time.time(), 0
        for source, split in sources:
            for kind, ids, learn in encode_documents(source, tokenizer, text_documents, train_on_input, chat_template, counts):
                in_val = zlib.crc32(str(number).encode()) < val_fraction * 2 ** 32
                number += 1
                packers[split or ("val" if in_val else "train")].add(kind, ids, learn, counts)
                if time.time() - shown > 2:
                    shown = time.time()
                    log(f"  {number:,} documents, {counts['tokens']:,} tokens, {counts['tokens'] / (shown - start):,.0f} tokens/s")
                    stop()
        for packer in packers.values():
            packer.close()
        if counts["supervised tokens"] == 0:
            reasons = "; ".join(f"{k.removeprefix('dropped: ')}: {v}" for k, v in counts.items() if k.startswith("dropped"))
            raise DataError(f"data '{data}': nothing to learn from ({counts['rows read']} rows read; {reasons or 'all empty'})")
        if not packers["train"].n_rows:
            raise DataError(f"data '{data}': all documents fell to validation; lower --val_fraction or give --val_data")
        slots = sum(p.n_rows for p in packers.values()) * seq_len
        meta = {"seq_len": seq_len, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.digest, "dtype": "uint32",
                "fingerprint": key, "data": data, "fill": counts["tokens"] / slots, "counts": dict(counts),
                "rows": {s: p.n_rows for s, p in packers.items()}, "shards": {s: p.n_shards for s, p in packers.items()},
                "max_token": max(p.max_token for p in packers.values())}
        with open(os.path.join(work, "meta.json"), "w", encoding="utf-8") as f:
            json.dump(meta | {"check": meta_check(meta)}, f, indent=1)
        if os.path.exists(folder):  # another run was faster
            shutil.rmtree(work)
        else:
            os.rename(work, folder)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError):  # the disk is full, or cache_dir can't be written
            raise DataError(f"data can't be prepared in '{cache_dir}': {error}") from None
        raise
    return Prepared(folder, meta)


def encode_documents(data, tokenizer, text_documents, train_on_input, chat_template, counts):
    """Yields (kind, ids, learn) per document; learn is a bool per id. Tokenizes in batches, on all cores."""
    batch, size = [], 0
    for kind, payload, where in documents(data, text_documents, counts):
        if kind == "text":
            segments = [(tokenizer.bos, False), (payload, True), (tokenizer.end_of_text, True)]
        else:
            try:
                segments = chat_segments(payload, tokenizer, chat_template)
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
        counts[f"{kind} documents"] += 1
        batch.append((kind, segments))
        size += sum(len(s) for s, _ in segments if isinstance(s, str))
        if size > 1 << 20:
            yield from encode_batch(batch, tokenizer, train_on_input)
            batch, size = [], 0
    yield from encode_batch(batch, tokenizer, train_on_input)


def encode_batch(batch, tokenizer, train_on_input):
    encoded = iter(tokenizer.encode_batch([s for _, segments in batch for s, _ in segments if isinstance(s, str)]))
    for kind, segments in batch:
        ids, learn = [], []
        for segment, learned in segments:
            if segment is None:
                continue
            part = next(encoded) if isinstance(segment, str) else [segment]
            ids += part
            learn += [learned or train_on_input] * len(part)
        yield kind, np.array(ids, np.uint32), np.array(learn, bool)


class Packer:
    """
    Puts pieces of documents together to full rows. Pieces wait until there are BUFFER of them, then half of them go
    into rows; memory is bounded by the buffer and a shard of about 64 MB.
    """

    BUFFER = 4096

    def __init__(self, folder: str, split: str, seq_len: int):
        self.folder, self.split, self.seq_len = folder, split, seq_len
        self.waiting, self.count = defaultdict(list), np.zeros(seq_len, np.int64)  # pieces by length, and how many
        self.count[0] = self.BUFFER  # no piece at all: there are always enough of these
        self.done, self.n_shards, self.n_rows, self.max_token = [], 0, 0, 0
        self.shard_rows = max(1, 2 ** 24 // (seq_len + 1))

    def add(self, kind, ids, learn, counts):
        T = self.seq_len
        if kind == "chat" and len(ids) > T:
            ids, learn = ids[:T], learn[:T]
            counts["truncated"] += 1
        if kind == "chat" and not learn[1:].any():
            counts["dropped: no trainable token (after truncation to seq_len)"] += 1
            return
        self.max_token = max(self.max_token, int(ids.max(initial=0)))
        counts["tokens"] += len(ids)
        counts["supervised tokens"] += int(learn[1:].sum())
        entries = ids | np.where(learn, LEARN, 0).astype(np.uint32)
        for start in range(0, len(ids), T):
            piece = entries[start:start + T + 1].copy()  # one more than a row: the last is only a target
            piece[0] = (piece[0] | START) & ~np.uint32(LEARN)
            if len(piece) >= T:
                self.emit(np.pad(piece, (0, T + 1 - len(piece))))
            else:
                self.waiting[len(piece)].append(piece)
                self.count[len(piece)] += 1
        if self.count[1:].sum() >= self.BUFFER:
            self.fill_rows(self.BUFFER // 2)

    def fill_rows(self, left):
        """
        Rows of the pieces that wait, until so many are left. Each begins with the longest piece; then comes, again and
        again, one of the two that together leave the least room. Of such pairs the most common lengths are taken, so
        that others which fit as well stay at hand.
        """
        while self.count[1:].sum() > left:
            pieces, room, length = [], self.seq_len, np.flatnonzero(self.count)[-1]
            while length:
                pieces.append(self.waiting[length].pop())
                self.count[length] -= 1
                room -= length
                lengths = np.flatnonzero(self.count[:room + 1])
                second = lengths[np.searchsorted(lengths, room - lengths, side="right") - 1]
                together = lengths + second
                best = np.argmax(self.count[lengths] * self.count[second] * (together == together.max()))
                length = max(lengths[best], second[best])
            row = np.concatenate([*pieces, np.zeros(room + 1, np.uint32)])
            if room:
                row[-room - 1] = START  # padding is a document of its own, of token 0, never learned
            self.emit(row)

    def emit(self, row):
        self.done.append(row)
        self.n_rows += 1
        if len(self.done) == self.shard_rows:
            self.write()

    def write(self):
        np.save(os.path.join(self.folder, f"{self.split}_{self.n_shards:05d}.npy"), np.stack(self.done))
        self.n_shards += 1
        self.done = []

    def close(self):
        self.fill_rows(0)
        if self.done:
            self.write()


def report(prepared: Prepared) -> list[str]:
    """What preparation did, as lines."""
    meta, counts = prepared.meta, prepared.meta["counts"]
    kinds = ", ".join(f"{v:,} {k}" for k, v in counts.items() if k.endswith("documents"))
    lines = [f"{kinds}; {counts['tokens']:,} tokens, {counts['supervised tokens']:,} of them learned",
             f"{meta['rows']['train']:,} training and {meta['rows']['val']:,} validation rows of {meta['seq_len']}, "
             f"{100 * meta['fill']:.1f} % full"]
    lines += [f"{v:,} conversations truncated to seq_len" for k, v in counts.items() if k == "truncated"]
    lines += [f"{v:,} of {counts['rows read']:,} rows {k}" for k, v in counts.items() if k.startswith("dropped")]
    return lines


# -----------------------------------------------------------------------------
# batches

@dataclass
class Batch:
    """One micro-batch; see model.Llama.loss for the fields."""
    tokens: torch.Tensor     # int64 [B, T]
    positions: torch.Tensor  # int64 [B, T], restart with every document
    borders: torch.Tensor    # int32 [documents + 1]
    index: torch.Tensor      # int64 [n], places of supervised tokens in the flattened batch
    targets: torch.Tensor    # int64 [n]
    rows: tuple = ()         # numbers of its rows in the data, for messages

    @classmethod
    def from_rows(cls, entries: np.ndarray, numbers=()) -> "Batch":
        """entries uint32 [B, T + 1] as stored."""
        B, T = entries.shape[0], entries.shape[1] - 1
        inputs = entries[:, :-1]
        starts = (inputs & START) != 0
        place = np.arange(T)
        positions = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
        index = np.flatnonzero((entries[:, 1:] & LEARN).reshape(-1))
        targets = (entries[:, 1:] & TOKEN).reshape(-1)[index]
        borders = np.append(np.flatnonzero(starts.reshape(-1)), B * T)
        return cls(*(torch.from_numpy(x) for x in (
            (inputs & TOKEN).astype(np.int64), positions, borders.astype(np.int32), index, targets.astype(np.int64))), tuple(numbers))

    def to(self, device) -> "Batch":
        fields = (self.tokens, self.positions, self.borders, self.index, self.targets)
        if torch.device(device).type == "cuda":
            fields = tuple(f.pin_memory() for f in fields)
        return Batch(*(f.to(device, non_blocking=True) for f in fields), self.rows)


class Loader:
    """
    Endless batches of rows: each epoch is a permutation given by (seed, epoch), and the position is one number, the
    rows consumed so far. shuffle=False goes through the rows once, in order (evaluation).
    """

    def __init__(self, shards: list[np.ndarray], batch_size: int, seed: int = 0, shuffle: bool = True, consumed: int = 0):
        self.shards, self.batch_size, self.seed, self.shuffle, self.consumed = shards, batch_size, seed, shuffle, consumed
        self.ends = np.cumsum([len(s) for s in shards])
        self.n_rows = int(self.ends[-1]) if len(shards) else 0
        self.epoch, self.permutation = None, None

    def row_number(self, i: int) -> int:
        """Number of the i-th row of the endless stream."""
        if not self.shuffle:
            return i
        epoch = i // self.n_rows
        if epoch != self.epoch:
            self.epoch, self.permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.n_rows)
        return int(self.permutation[i % self.n_rows])

    def next(self) -> Batch:
        last = self.consumed + self.batch_size if self.shuffle else min(self.consumed + self.batch_size, self.n_rows)
        numbers = [self.row_number(i) for i in range(self.consumed, last)]
        self.consumed = last
        rows = []
        for n in numbers:
            shard = int(np.searchsorted(self.ends, n, side="right"))
            rows.append(self.shards[shard][n - (self.ends[shard - 1] if shard else 0)])
        return Batch.from_rows(np.stack(rows), numbers)

    def __iter__(self):
        """Batches until the rows end (shuffle=False)."""
        while self.consumed < self.n_rows:
            yield self.next()


def show(prepared: Prepared, tokenizer: Tokenizer, n: int):
    """Prints the first n documents as the model sees them; what is learned is highlighted."""
    on, off = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    for shard in prepared.rows("train"):
        for row in shard:
            starts = [*np.flatnonzero(row[:-1] & START), len(row) - 1]
            for a, b in zip(starts, starts[1:]):
                document = row[a:b].tolist()
                n_learned = sum(entry & LEARN != 0 for entry in document)
                if not n_learned:
                    continue
                print(f"--- {b - a} tokens, {n_learned} learned ({on}so{off})")
                for learned, part in itertools.groupby(document, lambda entry: entry & LEARN):
                    text = tokenizer.decode(entry & TOKEN for entry in part)
                    print(f"{on}{text}{off}" if learned else text, end="")
                print()
                n -= 1
                if n == 0:
                    return


@dataclass
class Config:
    tokenizer: str = "byte"               # 'byte', tokenizer.model, tokenizer.json, or a folder with one
    seq_len: int = 2048                   # tokens per row
    val_fraction: float = 0.0             # share of documents kept for validation
    text_documents: Literal["file", "block"] = "file"  # one document per text file, or blank lines separate documents
    train_on_input: bool = False          # learn users' turns too
    chat_template: Literal["llama3", "chatml"] | None = None  # None: what the tokenizer is made for
    cache_dir: str = "cache"              # prepared rows
    show: int = 0                         # print this many samples


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-") or "--help" in argv:
        print(__doc__.strip(), "\n", configurator.help_text(Config), sep="\n")
        return 0 if "--help" in argv or "-h" in argv else 2
    try:
        cfg, _ = configurator.parse(Config, argv[1:])
        if cfg.seq_len < 2 or not 0 <= cfg.val_fraction < 1:
            raise configurator.ConfigError("'seq_len' must be at least 2, 'val_fraction' in [0, 1)")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal need not know every character of the data
        tokenizer = load_tokenizer(cfg.tokenizer)
        prepared = prepare(argv[0], tokenizer, cfg.cache_dir, cfg.seq_len, cfg.val_fraction, None, cfg.text_documents,
                           cfg.train_on_input, cfg.chat_template)
        print("\n".join([f"prepared {argv[0]} in {prepared.folder}", *report(prepared)]))
        if cfg.show:
            show(prepared, tokenizer, cfg.show)
        return 0
    except configurator.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    configurator.command(main)
