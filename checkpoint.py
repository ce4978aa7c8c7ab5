"""
Weights in and out, and the training state.

read_config, load_weights   a Hugging Face folder (config.json, *.safetensors) or Meta's (params.json, consolidated.00.pth)
export                      a complete Hugging Face folder
save, load                  a checkpoint of a run: the same safetensors layout, plus optimizer states and state.json

    python checkpoint.py RUN OUT [--dtype=float32]      export a run's newest checkpoint

Everything is streamed tensor by tensor or shard by shard: no second copy of the model is ever in memory.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import sys
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import configurator
from model import Llama, ModelConfig

SHARD_BYTES = 10 ** 9


class CheckpointError(configurator.UserError):
    """A checkpoint can't be read or written."""


# -----------------------------------------------------------------------------
# names and layouts

HF_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
            "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
            "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj"}
IGNORED = re.compile(r"rope\.freqs|(.*\.)?rotary_emb\.inv_freq")  # tables that old checkpoints carry; ours are computed


def hf_name(name: str) -> str:
    """layers.3.attention.wq.weight -> model.layers.3.self_attn.q_proj.weight"""
    layer = re.match(r"layers\.(\d+)\.(.+)\.weight$", name)
    if layer:
        return f"model.layers.{layer[1]}.{HF_NAMES[layer[2]]}.weight"
    return HF_NAMES[name.removesuffix(".weight")] + ".weight"


def meta_to_hf_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """
    q or k projection [heads * D, C] from Meta's row order (rotary pairs interleaved) to Hugging Face's (pairs half a
    head apart). heads is n_heads for q and n_kv_heads for k.
    """
    rows, cols = weight.shape
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


# -----------------------------------------------------------------------------
# in

def read_json(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({str(error)[:80]}); incomplete download?") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def field(spec: dict, path: str, key: str, kind, default=..., least: int = 1):
    """
    A number (or bool) from a JSON file. CheckpointError if it is missing or of another type, an int below least or too
    large to make sense, a float that is not finite or negative, or zero where least is not.
    """
    value = spec.get(key)
    if value is None:
        if default is ...:
            raise CheckpointError(f"{path}: '{key}' is missing")
        return default
    if kind is bool:
        good = isinstance(value, bool)
    else:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and (
            least <= value < 2 ** (24 if least > 0 else 62) and value == int(value) if kind is int else
            0 <= value <= sys.float_info.max and (value > 0 or least <= 0))
    if not good:
        raise CheckpointError(f"{path}: '{key}' must be a valid {kind.__name__}, got {value!r}")
    return kind(value)


def read_config(folder: str) -> ModelConfig:
    """The model's shape, from config.json or params.json. Everything that changes the maths must be given there."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        if os.path.isfile(os.path.join(folder, "params.json")):
            return read_params(os.path.join(folder, "params.json"), folder)
        raise CheckpointError(f"'{folder}': no config.json (Hugging Face) or params.json (Meta) there")
    spec = read_json(path)
    if "out_dir" in spec:
        raise CheckpointError(f"'{folder}' is the folder of a run; name one of the step_... folders in it")
    if spec.get("model_type") != "llama":
        raise CheckpointError(f"{path}: model_type {spec.get('model_type')!r} is not supported, only 'llama' is")
    rope = spec.get("rope_scaling") or spec.get("rope_parameters") or {}  # transformers 5 puts theta and scaling in one dict
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: rope_scaling must be an object or null")
    for key, want in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if (spec | rope).get(key, want) not in (want, None):
            raise CheckpointError(f"{path}: {key} = {(spec | rope)[key]!r} is not supported, only {want!r} is")
    heads, dim = field(spec, path, "num_attention_heads", int), field(spec, path, "hidden_size", int)
    if spec.get("head_dim") is None and dim % heads:
        raise CheckpointError(f"{path}: hidden_size {dim} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
    config = ModelConfig(
        dim=dim, n_layers=field(spec, path, "num_hidden_layers", int), n_heads=heads,
        n_kv_heads=field(spec, path, "num_key_value_heads", int, heads), head_dim=field(spec, path, "head_dim", int, dim // heads),
        ffn_dim=field(spec, path, "intermediate_size", int), vocab_size=field(spec, path, "vocab_size", int),
        max_seq_len=field(spec, path, "max_position_embeddings", int), norm_eps=field(spec, path, "rms_norm_eps", float),
        rope_theta=field(spec | rope, path, "rope_theta", float), rope_scaling=check_scaling(rope, path),
        tie_word_embeddings=field(spec, path, "tie_word_embeddings", bool, False))
    return check_shape(config, path)


def check_scaling(rope: dict, path: str) -> dict | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"{path}: rope_scaling type {kind!r} is not supported, only 'llama3' is")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {k: field(rope, path, k, float if k.endswith("factor") else int) for k in keys}
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError(f"{path}: low_freq_factor must be below high_freq_factor")
    return {"rope_type": "llama3"} | scaling


def check_shape(config: ModelConfig, path: str) -> ModelConfig:
    if config.n_heads % config.n_kv_heads:
        raise CheckpointError(f"{path}: {config.n_heads} query heads can't share {config.n_kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim {config.head_dim} is odd")
    if config.n_layers > 1000 or config.n_heads * config.head_dim >= 2 ** 24:
        raise CheckpointError(f"{path}: {config.n_layers} layers of {config.n_heads} heads x {config.head_dim} can't be right")
    return config


def read_params(path: str, folder: str) -> ModelConfig:
    """Meta's params.json. It leaves out ffn_dim (read from the weights) and how a model's rope is scaled."""
    spec = read_json(path)
    heads, dim = field(spec, path, "n_heads", int), field(spec, path, "dim", int)
    weights = open_pth(folder)
    if dim % heads:
        raise CheckpointError(f"{path}: dim {dim} is not a multiple of n_heads {heads}")
    try:
        (ffn_dim, _), (vocab_size, _) = (weights[k].shape for k in ("layers.0.feed_forward.w1.weight", "tok_embeddings.weight"))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}/consolidated.00.pth does not hold a Llama as Meta stores it: {error}") from None
    scaled = field(spec, path, "use_scaled_rope", bool, False)
    # Meta's files do not say which factor: 8 for 3.1's sizes, 32 for the small 3.2 models
    scaling = {"rope_type": "llama3", "factor": 32.0 if dim < 4096 else 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    output = weights.get("output.weight")
    tied = output is None or (dim < 4096 and torch.equal(output, weights["tok_embeddings.weight"]))
    return check_shape(ModelConfig(
        dim=dim, n_layers=field(spec, path, "n_layers", int), n_heads=heads, n_kv_heads=field(spec, path, "n_kv_heads", int, heads),
        head_dim=dim // heads, ffn_dim=ffn_dim, vocab_size=vocab_size, max_seq_len=131072 if scaled else 8192,
        norm_eps=field(spec, path, "norm_eps", float), rope_theta=field(spec, path, "rope_theta", float),
        rope_scaling=scaling if scaled else None, tie_word_embeddings=tied), path)


def open_pth(folder: str) -> dict[str, torch.Tensor]:
    """Meta's weights, mapped into memory rather than read; nothing in the file is executed."""
    path = os.path.join(folder, "consolidated.00.pth")
    if os.path.exists(os.path.join(folder, "consolidated.01.pth")):
        raise CheckpointError(f"'{folder}' is split over several consolidated files (model parallel), which is not supported")
    try:
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise unreadable(path, error) from None
    if not isinstance(weights, dict) or not all(isinstance(k, str) and torch.is_tensor(t) and t.layout == torch.strided
                                                for k, t in weights.items()):
        raise CheckpointError(f"{path} holds something else than tensors by name, as Meta's files do")
    return weights


def unreadable(path: str, error: Exception) -> CheckpointError:
    """What to say of a file of weights or states that its library does not take."""
    try:
        with open(path, "rb") as f:
            lfs = f.read(40).startswith(b"version https://git-lfs")
        hint = "it is a git-lfs pointer: run git lfs pull" if lfs else "incomplete download or copy?"
        return CheckpointError(f"{path} can't be read ({os.path.getsize(path):,} bytes): {str(error)[:150]}; {hint}")
    except OSError as reason:
        return CheckpointError(f"{path}: {reason.strerror}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names and torch's


class Tensors:
    """The tensors of a Hugging Face folder by name: headers are read and checked at once, data when asked for."""

    def __init__(self, folder: str):
        single = os.path.join(folder, "model.safetensors")
        index = f"{single}.index.json"
        if os.path.isfile(index) and not os.path.isfile(single):  # where both are, transformers reads the single file
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise CheckpointError(f"{index}: no weight_map")
            names = sorted(set(weight_map.values()))
            outside = [n for n in names if not re.fullmatch(r"[^/\\]+", n)]
            if outside:
                raise CheckpointError(f"{index} names files outside the folder: {', '.join(outside[:3])}")
        else:
            weight_map, names = None, ["model.safetensors"]
        missing = [n for n in names if not os.path.isfile(os.path.join(folder, n))]
        if missing:
            raise CheckpointError(f"'{folder}': missing {', '.join(missing)}; incomplete download?")
        self.files, self.where = {}, {}
        for name in names:
            path = os.path.join(folder, name)
            try:
                self.files[name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise unreadable(path, error) from None
            for key in self.files[name].keys():
                self.where[key] = name
        lost = [k for k in weight_map or () if self.where.get(k) != weight_map[k]]
        if lost:
            raise CheckpointError(f"{index}: {lost[0]} is not in {weight_map[lost[0]]}, where the index says it is")

    def about(self, key: str) -> tuple[list[int], str]:
        """(shape, dtype) from the header"""
        piece = self.files[self.where[key]].get_slice(key)
        return piece.get_shape(), FLOATS.get(piece.get_dtype(), piece.get_dtype())

    def get(self, key: str) -> torch.Tensor:
        return self.files[self.where[key]].get_tensor(key)


@torch.no_grad()
def load_weights(model: Llama, folder: str, device: torch.device | str | None = None) -> str:
    """
    Fill the model's parameters from a folder, tensor by tensor, each cast once to the parameter's dtype. All names,
    shapes and dtypes are checked before the first is read, and before a model that is on the meta device gets its
    memory, on `device`. Returns the dtypes found, for the log.
    """
    config = model.config
    meta = not os.path.isfile(os.path.join(folder, "config.json"))
    if meta:
        weights = open_pth(folder)
        names, get, about = set(weights), weights.__getitem__, lambda k: (list(weights[k].shape), dtype_name(weights[k].dtype))
    else:
        tensors = Tensors(folder)
        names, get, about = set(tensors.where), tensors.get, tensors.about
    key = {name: name if meta else hf_name(name) for name, _ in model.named_parameters()}
    head, table = ("output.weight", "tok_embeddings.weight") if meta else ("lm_head.weight", "model.embed_tokens.weight")
    missing = [k for k in key.values() if k not in names]
    if missing:
        hint = "; the config says the head is not tied to the embedding" if missing == [head] else ""
        raise CheckpointError(f"'{folder}': no tensor {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}{hint}")
    extra = [k for k in names - set(key.values()) if not IGNORED.fullmatch(k) and not (k == head and config.tie_word_embeddings)]
    if extra:
        raise CheckpointError(f"'{folder}': unexpected tensor {', '.join(sorted(extra)[:3])}; is this a plain Llama?")
    dtypes = set()
    for name, p in model.named_parameters():
        shape, dtype = about(key[name])
        if shape != list(p.shape):
            raise CheckpointError(f"'{folder}': {key[name]} has shape {shape}, the config asks for {list(p.shape)}")
        if dtype not in FLOATS.values():
            raise CheckpointError(f"'{folder}': {key[name]} is stored as {dtype}; only {', '.join(FLOATS.values())} are read")
        dtypes.add(dtype)
    if config.tie_word_embeddings and head in names and not torch.equal(get(head), get(table)):
        raise CheckpointError(f"'{folder}': the config ties {head} to the embedding, but they differ; set tie_word_embeddings to false there")
    if device is not None:
        model.to_empty(device=device)
    for name, p in model.named_parameters():
        weight = get(key[name])
        if meta and name.endswith(("attention.wq.weight", "attention.wk.weight")):
            weight = meta_to_hf_rows(weight, config.n_heads if ".wq." in name else config.n_kv_heads)
        p.copy_(weight)
    return ", ".join(sorted(dtypes))


# -----------------------------------------------------------------------------
# out

def write_text(path: str, text: str):
    """Writes a small file beside and renames it: under its name, it is always whole."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


def write_json(path: str, value):
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_safetensors(path: str, tensors: dict[str, torch.Tensor]):
    open(path, "wb").close()  # with the rights that files of this user have; save_file may put in its own, for the owner alone
    mode = os.stat(path).st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    with open(path, "rb+") as f:
        os.fsync(f.fileno())
    os.chmod(path, mode)


def write_shards(folder: str, sizes: list[int], tensors):
    """
    Writes an iterable of (name, host tensor) as model-0000i-of-0000n.safetensors with an index, one shard in memory
    at a time. sizes: bytes of each, known beforehand, to cut the shards.
    """
    cuts, fill = [0], 0
    for i, size in enumerate(sizes):
        if fill and fill + size > SHARD_BYTES:
            cuts.append(i)
            fill = 0
        fill += size
    weight_map, shard, number, total = {}, {}, 0, len(cuts)
    cuts = [*cuts[1:], len(sizes)]
    for i, (name, tensor) in enumerate(tensors, 1):
        shard[name] = tensor.contiguous()
        if i == cuts[number]:
            number += 1
            file = f"model-{number:05d}-of-{total:05d}.safetensors" if total > 1 else "model.safetensors"
            write_safetensors(os.path.join(folder, file), shard)
            weight_map.update(dict.fromkeys(shard, file))
            shard = {}
    if total > 1:
        write_json(os.path.join(folder, "model.safetensors.index.json"), {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def hf_config(config: ModelConfig, dtype: str) -> dict:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": config.dim, "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
            "intermediate_size": config.ffn_dim, "vocab_size": config.vocab_size, "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling,
            "tie_word_embeddings": config.tie_word_embeddings, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "torch_dtype": dtype}


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model",
                   "vocab.json", "merges.txt", "added_tokens.json")


def special_ids(tokenizer, chat: bool) -> dict:
    """What config.json says of a tokenizer: how a text begins and what ends it; in a chat, the end of a turn does too."""
    ends = [i for i in (tokenizer.end_of_text, tokenizer.end_of_turn if chat else None) if i is not None]
    return {"bos_token_id": tokenizer.bos, "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def id_list(value) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def check_target(folder: str, *sources: str | None):
    """CheckpointError if an export to this folder would take the place of what it is made from, or of anything but an export."""
    here = os.path.realpath(folder)
    if here in [os.path.realpath(s) for s in sources if s]:
        raise CheckpointError(f"'{folder}' is where this model comes from; export to another folder")
    ours = re.compile(r"(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
    try:
        others = sorted(n for n in os.listdir(here) if not ours.fullmatch(n) and n not in TOKENIZER_FILES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"'{folder}': {error.strerror}; export to another folder") from None
    if others:
        raise CheckpointError(f"'{folder}' holds {others[0]}, which is no part of an export; export to a folder of its own")


def export(model: Llama, folder: str, source: str | None, tokenizer_source: str | None, specials: dict | None = None,
           dtype: torch.dtype = torch.bfloat16, exact=None, log=print):
    """
    A complete Hugging Face folder: config.json, generation_config.json, the tokenizer's files byte for byte from where
    it came from, weights in dtype. source: the folder that training started from, whose config.json is kept but for
    what changed. specials: see special_ids. exact(name, p) -> the fp32 weights that a bf16 p stands for, where a run
    kept more of them. Written beside and renamed, so a folder with this name is always whole; only another export may be
    in its place.
    """
    check_target(folder, source, tokenizer_source)
    name, specials = dtype_name(dtype), specials or {}

    def of_source(file):
        path = os.path.join(source or "", file)
        return read_json(path) if source and os.path.isfile(path) else {}

    ids = {} if tokenizer_source in (None, source) else specials  # another tokenizer than the source's
    spec = hf_config(model.config, name) | specials | of_source("config.json") | ids | {
        "architectures": ["LlamaForCausalLM"], "torch_dtype": name, "vocab_size": model.config.vocab_size,
        "tie_word_embeddings": model.config.tie_word_embeddings}
    if "dtype" in spec:
        spec["dtype"] = name
    generation = (of_source("generation_config.json") or {"do_sample": True, "temperature": 0.6, "top_p": 0.9, **specials}) | ids
    ends = list(dict.fromkeys(id_list(generation.get("eos_token_id")) + id_list(specials.get("eos_token_id"))))
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]

    def tensors():
        for ours, p in model.named_parameters():
            weight = (exact(ours, p) if exact else p.detach()).to(dtype).cpu()
            if not torch.isfinite(weight).all():
                raise CheckpointError(f"export: {hf_name(ours)} {'does not fit into float16' if dtype == torch.float16 else 'is not finite'}")
            yield hf_name(ours), weight

    with whole_folder(folder, "the export") as work:
        write_json(os.path.join(work, "config.json"), spec)
        write_json(os.path.join(work, "generation_config.json"), generation)
        for file in TOKENIZER_FILES:
            path = os.path.join(tokenizer_source or "", file) if os.path.isdir(tokenizer_source or "") else tokenizer_source or ""
            if os.path.basename(path) == file and os.path.isfile(path):
                shutil.copyfile(path, os.path.join(work, file))
        if not os.path.exists(os.path.join(work, "tokenizer.json")):
            log(f"note: {folder} has no tokenizer.json, because the tokenizer did not come from one; transformers needs it, vLLM too")
        write_shards(work, [p.numel() * dtype.itemsize for p in model.parameters()], tensors())


@contextlib.contextmanager
def whole_folder(folder: str, what: str):
    """A folder to write into, which gets its name when all is written; if that fails, it is removed: CheckpointError."""
    folder = os.path.realpath(folder)
    work = f"{folder}.unfinished.tmp"
    shutil.rmtree(work, ignore_errors=True)
    try:
        os.makedirs(work)
        yield work
        replace_folder(work, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise CheckpointError(f"{what} could not be written ({error}); what was there before is intact") from None
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def replace_folder(work: str, folder: str):
    """Rename work to folder; a folder of that name steps aside first and is removed after, or comes back if that fails."""
    sync_folder(work)
    old, there = f"{folder}.replaced.old", os.path.exists(folder)
    if there:
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    try:
        os.rename(work, folder)
    except OSError:
        if there:
            os.rename(old, folder)
        raise
    sync_folder(os.path.dirname(folder))
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: str):
    """Make renames in a folder durable, where the system can."""
    if os.name == "posix":
        fd = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems can't
            os.fsync(fd)
        os.close(fd)


# -----------------------------------------------------------------------------
# checkpoints of a run

def checkpoint_bytes(model: Llama, optimizer) -> int:
    """About how large one checkpoint is: weights, and two bytes of state per parameter or what the optimizer holds."""
    weights = sum(p.nbytes for p in model.parameters())
    return weights + max(sum(optimizer.memory().values()), 2 * sum(p.numel() for p in model.parameters()))


def check_disk(folder: str, needed: int, what: str):
    """CheckpointError unless folder's own disk has room for needed bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{what} needs {needed / 1e9:.1f} GB on the disk of '{folder}', {free / 1e9:.1f} GB are free")


@contextlib.contextmanager
def lock(run_dir: str):
    """
    Holds run_dir/lock, with this process's number in it, for as long as the process lives; CheckpointError if another
    one has it. The system drops the lock with the process, so one left behind by a crash does not matter.
    """
    path = os.path.join(run_dir, "lock")
    try:
        f = open(path, "a+", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; choose another --out_dir") from None
    with f:
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            f.seek(0)
            raise CheckpointError(f"'{run_dir}' is in use by process {f.read().strip() or 'unknown'}; choose another --out_dir") from None
        f.seek(0)
        f.truncate()
        f.write(f"{os.getpid()}\n")
        f.flush()
        yield


def point(run_dir: str, pointer: str, name: str):
    """Makes run_dir/pointer ('latest', 'best') a text file that names a checkpoint, in one step."""
    path = os.path.join(run_dir, pointer)
    try:
        write_text(path, name + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} could not be written ({error}), but {name} is complete") from None


def pointed(run_dir: str, pointer: str) -> str | None:
    """The complete checkpoint that a pointer names, if there is one."""
    try:
        with open(os.path.join(run_dir, pointer), encoding="utf-8") as f:
            name = f.read().strip()
    except (OSError, ValueError):
        return None
    return name if re.fullmatch(r"step_\d{6,}", name) and os.path.isfile(os.path.join(run_dir, name, "state.json")) else None


def save(run_dir: str, model: Llama, optimizer, state: dict, keep: int, best: bool = False):
    """
    Writes run_dir/step_000100 under a temporary name, renames it, points run_dir/latest (and run_dir/best, if it is)
    at it, and removes all but the newest `keep` checkpoints and the best. If anything fails, what was written is removed
    and earlier checkpoints are as they were.
    """
    name = f"step_{state['step']:06d}"
    sweep(run_dir, ".tmp")
    check_disk(run_dir, checkpoint_bytes(model, optimizer), "a checkpoint")
    with whole_folder(os.path.join(run_dir, name), f"the checkpoint of step {state['step']}") as work:
        write_shards(work, [p.nbytes for p in model.parameters()], ((hf_name(n), p.detach().cpu()) for n, p in model.named_parameters()))
        # parameter by parameter, one file each time a shard is full
        shard, files = {}, 0

        def flush():
            nonlocal shard, files
            if shard:
                write_safetensors(os.path.join(work, f"optimizer-{files:05d}.safetensors"), shard)
                shard, files = {}, files + 1

        for param, tensors in optimizer.state():
            shard.update({f"{param}|{key}": t.contiguous() for key, t in tensors.items()})
            if sum(t.nbytes for t in shard.values()) > SHARD_BYTES // 2:  # the next parameter's come on top, 1 GB for an 8B's head
                flush()
        flush()
        write_json(os.path.join(work, "config.json"), hf_config(model.config, dtype_name(model.output.weight.dtype)))
        write_json(os.path.join(work, "state.json"), state | {"optimizer_files": files})
    for pointer in ["latest"] + ["best"] * best:
        point(run_dir, pointer, name)
    for old in sorted(checkpoints(run_dir))[:-keep] if keep else []:
        if old < state["step"] and f"step_{old:06d}" != pointed(run_dir, "best"):
            with contextlib.suppress(OSError):  # a name that says so first: what a kill leaves of it is no checkpoint
                os.rename(*(os.path.join(run_dir, f"step_{old:06d}{ending}") for ending in ("", ".replaced.old")))
    sweep(run_dir, ".old")


def sweep(run_dir: str, ending: str):
    """Removes what saves that were killed, or that no longer need it, left in a run folder."""
    for name in os.listdir(run_dir):
        if re.fullmatch(r"step_\d+\.(unfinished\.tmp|replaced\.old)", name) and name.endswith(ending):
            shutil.rmtree(os.path.join(run_dir, name), ignore_errors=True)


def checkpoints(run_dir: str) -> list[int]:
    """Steps of the complete checkpoints in a run folder."""
    names = (n for n in (os.listdir(run_dir) if os.path.isdir(run_dir) else []) if os.path.isfile(os.path.join(run_dir, n, "state.json")))
    found = ((n, re.fullmatch(r"step_(\d{6,})", n)) for n in names)
    return [int(m[1]) for n, m in found if m and n == f"step_{int(m[1]):06d}"]


def newest(run_dir: str) -> str:
    """Folder of the newest complete checkpoint: what 'latest' names, else the highest step. CheckpointError if none."""
    name = pointed(run_dir, "latest")
    if name:
        return os.path.join(run_dir, name)
    steps = checkpoints(run_dir)
    if not steps:
        raise CheckpointError(f"'{run_dir}': no complete checkpoint there")
    return os.path.join(run_dir, f"step_{max(steps):06d}")


def load_state(folder: str) -> dict:
    """What save() was given as state; CheckpointError if it is damaged."""
    path = os.path.join(folder, "state.json")
    state = read_json(path)
    counts = {key: field(state, path, key, int, 0, least=0) for key in ("consumed", "tokens", "optimizer_files")}
    for key, kind in (("settings", dict), ("fingerprint", str)):
        if not isinstance(state.get(key, kind()), kind):
            raise CheckpointError(f"{path}: '{key}' must be a {kind.__name__}")
    return state | counts | {"step": field(state, path, "step", int, least=0), "best": field(state, path, "best", float, math.inf, least=0),
                             "validated_at": field(state, path, "validated_at", int, -1, least=-1)}


def optimizer_files(folder: str, state: dict) -> dict[str, dict[str, tuple]]:
    """{parameter name: {state's key: (open file, key in the file)}} of a checkpoint's optimizer states."""
    keys = {}
    for i in range(state["optimizer_files"]):
        path = os.path.join(folder, f"optimizer-{i:05d}.safetensors")
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from None
        for key in file.keys():
            name, _, part = key.partition("|")
            keys.setdefault(name, {})[part] = (file, key)
    return keys


def load_optimizer(optimizer, folder: str, state: dict):
    """Optimizer states back into their places, parameter by parameter; CheckpointError where names or shapes differ."""
    try:
        keys = optimizer_files(folder, state)
        names = set(optimizer.names.values())
        if set(keys) != names:
            odd = sorted(set(keys) ^ names)
            raise CheckpointError(f"'{folder}': optimizer states do not belong to this model or optimizer ({odd[0]})")
        optimizer.load_state(lambda name: {part: file.get_tensor(key) for part, (file, key) in keys[name].items()}, state["step"])
    except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"'{folder}': optimizer states can't be loaded ({type(error).__name__}: {str(error)[:150]})") from None


@dataclasses.dataclass
class Config:
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"  # of the weights; float32 holds what --master=residual kept


def main(argv=None) -> int:
    import data
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) < 2 or any(a.startswith("-") for a in argv[:2]) or "--help" in argv:
        print(__doc__.strip(), "\n", configurator.help_text(Config), sep="\n")
        return 0 if "--help" in argv or "-h" in argv else 2
    run_dir, out = argv[:2]
    try:
        dtype = getattr(torch, configurator.parse(Config, argv[2:])[0].dtype)
        folder, path = newest(run_dir), os.path.join(run_dir, "config.json")
        state, settings = load_state(folder), read_json(path)
        source, tokenizer = settings.get("init_from"), settings.get("tokenizer")
        if not all(isinstance(name, str | None) for name in (source, tokenizer)):
            raise CheckpointError(f"{path}: 'init_from' and 'tokenizer' must be text")
        source = None if source == "scratch" else source
        if source and not os.path.isdir(source):
            raise CheckpointError(f"the run started from '{source}', which is not there; call this from where the run was started")
        check_target(out, source, tokenizer)
        specials = special_ids(data.load_tokenizer(tokenizer or source or "byte"), bool(state.get("chat")))
        with torch.device("meta"):
            model = Llama(read_config(folder), torch.float32 if settings.get("dtype") == "float32" else torch.bfloat16)
        load_weights(model, folder, device="cpu")
        exact = None
        if settings.get("master") == "residual" and dtype == torch.float32:
            from optim import join_residual
            files = optimizer_files(folder, state)

            def exact(name, p):
                found = files.get(name, {}).get("residual")
                if not found:
                    return p.detach()
                return join_residual(p.detach().flatten(), found[0].get_tensor(found[1])[:p.numel()]).view(p.shape)
        export(model, out, source, tokenizer or source, specials, dtype, exact)
        print(f"{out}: step {state['step']} of {run_dir}, {dtype_name(dtype)}")
        return 0
    except configurator.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    configurator.command(main)
