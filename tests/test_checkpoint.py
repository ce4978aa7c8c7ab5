"""python -m pytest tests/test_checkpoint.py"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint
import model as llama
import offload
import optim
import train
from helpers import random_batch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TINY = llama.ModelConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=96, vocab_size=304, max_seq_len=256)
SHAPES = {"untied": TINY, "tied": dataclasses.replace(TINY, tie_word_embeddings=True), "scaled": dataclasses.replace(TINY, rope_scaling=LLAMA3),
          "own head_dim": dataclasses.replace(TINY, head_dim=16), "no groups": dataclasses.replace(TINY, n_kv_heads=4),
          "other constants": dataclasses.replace(TINY, norm_eps=1e-2, rope_theta=100.0)}


def make(config=TINY, seed=0, dtype=torch.float32):
    model = llama.Llama(config, dtype)
    model.init_weights(seed)
    for p in model.parameters():  # norms that are not all ones show a swap
        if p.dim() == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5, generator=torch.Generator().manual_seed(len(p) + seed))
    return model


def exported(tmp_path, config=TINY, seed=0, dtype=torch.float32, name="hf"):
    """(model, folder of its export)"""
    model = make(config, seed)
    checkpoint.export(model, str(tmp_path / name), None, None, dtype=dtype, log=lambda line: None)
    return model, str(tmp_path / name)


def loaded(folder, dtype=torch.float32):
    model = llama.Llama(checkpoint.read_config(folder), dtype)
    checkpoint.load_weights(model, folder)
    return model


def edit(path, **changes):
    """Change keys of a JSON file; None deletes one."""
    spec = json.load(open(path))
    spec = {k: v for k, v in (spec | changes).items() if v is not None}
    json.dump(spec, open(path, "w"))


def reshard(folder, dtypes=(torch.float32,) * 3):
    """Cut model.safetensors into three shards with an index, the i-th in dtypes[i]; norms stay as they are."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    os.remove(os.path.join(folder, "model.safetensors"))
    weight_map = {}
    for i, dtype in enumerate(dtypes):
        name = f"model-0000{i + 1}-of-00003.safetensors"
        part = {k: t if t.dim() == 1 else t.to(dtype) for n, (k, t) in enumerate(tensors.items()) if n % 3 == i}
        save_file(part, os.path.join(folder, name))
        weight_map.update(dict.fromkeys(part, name))
    json.dump({"weight_map": weight_map}, open(os.path.join(folder, "model.safetensors.index.json"), "w"))


def meta_folder(tmp_path, config=TINY, seed=0, **params):
    """A folder as Meta publishes them, with the weights of make(config, seed)."""
    folder, state = tmp_path / "meta", {}
    folder.mkdir()
    for name, p in make(config, seed).named_parameters():
        w = p.detach()
        if name.endswith(("wq.weight", "wk.weight")):  # pairs half a head apart -> neighbours
            w = w.view(-1, 2, config.head_dim // 2, config.dim).transpose(1, 2).reshape(w.shape)
        state[name] = w.clone()
    state["rope.freqs"] = torch.ones(config.head_dim // 2)
    torch.save(state, folder / "consolidated.00.pth")
    json.dump({"dim": config.dim, "n_layers": config.n_layers, "n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "norm_eps": config.norm_eps,
               "rope_theta": config.rope_theta, "vocab_size": -1, "multiple_of": 8, **params}, open(folder / "params.json", "w"))
    return str(folder)


TOKENS = torch.randint(0, 304, (2, 100), generator=torch.Generator().manual_seed(5))


# -----------------------------------------------------------------------------
# the same logits everywhere

@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_an_export_and_computes_the_same(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    ours, folder = exported(tmp_path, SHAPES[shape])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (theirs(TOKENS).logits - ours.logits(TOKENS)).abs().max() <= 1e-5
    again = loaded(folder)
    assert again.config == SHAPES[shape] and torch.equal(again.logits(TOKENS), ours.logits(TOKENS))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_transformers_saves_is_read_and_computes_the_same(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    _, folder = exported(tmp_path, SHAPES[shape])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert (theirs(TOKENS).logits - loaded(str(tmp_path / "theirs")).logits(TOKENS)).abs().max() <= 1e-5


@pytest.mark.parametrize("shape", ["untied", "scaled", "no groups"])
def test_metas_weights_give_the_same_logits_through_an_export(tmp_path, shape):
    transformers = pytest.importorskip("transformers")
    config = SHAPES[shape]
    scaled = shape == "scaled"
    folder = meta_folder(tmp_path, config, **({"use_scaled_rope": True} if scaled else {}))
    model = loaded(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make(config).parameters()))
    if not scaled:  # the factor there is the published one, not this test's
        assert torch.equal(model.logits(TOKENS), make(config).logits(TOKENS))
    checkpoint.export(model, str(tmp_path / "hf"), folder, None, dtype=torch.float32, log=lambda line: None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert (theirs(TOKENS).logits - model.logits(TOKENS)).abs().max() <= 1e-5


def test_a_bfloat16_folder_comes_back_bit_for_bit(tmp_path):
    _, folder = exported(tmp_path, dtype=torch.bfloat16)
    checkpoint.export(loaded(folder, torch.bfloat16), str(tmp_path / "back"), folder, None, log=lambda line: None)
    before, after = (load_file(os.path.join(f, "model.safetensors")) for f in (folder, str(tmp_path / "back")))
    assert before.keys() == after.keys() and all(torch.equal(before[k].view(torch.int16), after[k].view(torch.int16)) for k in before)
    assert json.load(open(os.path.join(folder, "config.json"))) == json.load(open(tmp_path / "back" / "config.json"))


def test_rows_of_query_and_key_are_reordered_by_their_own_number_of_heads():
    rows = torch.arange(8.0)[:, None].expand(8, 3)
    assert checkpoint.meta_to_hf_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert checkpoint.meta_to_hf_rows(rows, 4)[:, 0].tolist() == list(range(8))


def test_interleaved_rotation_of_metas_rows_equals_ours_of_the_reordered_ones():
    torch.manual_seed(0)
    D, heads, T = 12, 4, 60
    w, x = torch.randn(heads * D, 48, dtype=torch.double), torch.randn(T, 48, dtype=torch.double)
    angles = torch.arange(T)[:, None].double() * llama.rope_frequencies(TINY).double()
    meta = torch.view_as_complex((x @ w.T).view(T, heads, D // 2, 2)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    ours = llama.apply_rope((x @ checkpoint.meta_to_hf_rows(w, heads).T).view(1, T, heads, D).float(), angles.cos().float()[None, :, None], angles.sin().float()[None, :, None])
    q, k = ours[0, -1], ours[0, 3]  # scores are what must agree: the order of channels may differ
    assert torch.allclose((q * k).sum(-1).double(), (meta[-1] * meta[3].conj()).real.sum(-1), atol=1e-4, rtol=1e-5)


# -----------------------------------------------------------------------------
# the shape: config.json and params.json

def test_a_missing_head_is_the_embedding_only_if_the_config_says_so(tmp_path):
    _, folder = exported(tmp_path, SHAPES["tied"])
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as f:
        assert "lm_head.weight" not in f.keys() and f.metadata() == {"format": "pt"}
    model = loaded(folder)
    assert model.output.weight is model.tok_embeddings.weight and len(list(model.parameters())) == 2 * 9 + 2
    edit(os.path.join(folder, "config.json"), tie_word_embeddings=False)
    with pytest.raises(checkpoint.CheckpointError, match=r"no tensor lm_head\.weight; the config says the head is not tied"):
        loaded(folder)


def test_a_tied_head_that_is_stored_too_must_be_equal(tmp_path):
    _, folder = exported(tmp_path, SHAPES["tied"])
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, path)
    assert torch.equal(loaded(folder).output.weight, table)
    save_file(tensors | {"lm_head.weight": table + 1}, path)
    with pytest.raises(checkpoint.CheckpointError, match="they differ"):
        loaded(folder)


@pytest.mark.parametrize("rope, want", [
    (None, None), ({"rope_type": "default"}, None), (LLAMA3, LLAMA3), ({"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}, LLAMA3),
    ({"rope_type": "yarn", "factor": 4.0}, "yarn"), ({"type": "linear", "factor": 2.0}, "linear"), ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ("llama3", "must be an object")])
def test_rope_scaling_is_taken_from_the_config_or_refused(tmp_path, rope, want):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), rope_scaling=rope)
    if isinstance(want, str):
        with pytest.raises(checkpoint.CheckpointError, match=want):
            checkpoint.read_config(folder)
    else:
        assert checkpoint.read_config(folder).rope_scaling == want


def test_rope_in_the_one_dict_of_transformers_5(tmp_path):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), rope_theta=None, rope_scaling=None, rope_parameters=LLAMA3 | {"rope_theta": 1234.0})
    config = checkpoint.read_config(folder)
    assert config.rope_theta == 1234.0 and config.rope_scaling == LLAMA3


@pytest.mark.parametrize("key, value, message", [
    ("rms_norm_eps", None, "'rms_norm_eps' is missing"), ("rope_theta", None, "'rope_theta' is missing"), ("hidden_size", "48", "must be a valid int"),
    ("num_hidden_layers", 2.5, "must be a valid int"), ("vocab_size", 10 ** 12, "must be a valid int"), ("num_key_value_heads", 3, "evenly"), ("head_dim", 13, "odd"),
    ("model_type", "mistral", "only 'llama'"), ("attention_bias", True, "attention_bias"), ("hidden_act", "gelu", "hidden_act"),
    ("tie_word_embeddings", 1, "must be a valid bool"), ("rms_norm_eps", True, "must be a valid float")])
def test_a_config_that_does_not_describe_a_plain_llama_is_refused(tmp_path, key, value, message):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), **{key: value})
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.read_config(folder)


@pytest.mark.parametrize("key, value", [
    ("num_hidden_layers", 10 ** 6), ("rms_norm_eps", float("inf")), ("rms_norm_eps", -1e-5), ("rope_theta", 0), ("rope_theta", float("nan")),
    ("num_attention_heads", 2 ** 23), ("partial_rotary_factor", 0.5), ("rope_scaling", LLAMA3 | {"low_freq_factor": 4.0}), ("rope_scaling", [1])])
def test_numbers_that_make_no_sense_are_refused(tmp_path, key, value):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), **{key: value})
    with pytest.raises(checkpoint.CheckpointError, match="config.json: "):
        checkpoint.read_config(folder)


def test_the_folder_of_a_run_is_no_folder_of_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"out_dir": "out", "model": "debug"}))
    with pytest.raises(checkpoint.CheckpointError, match="folder of a run; name one of the step_"):
        checkpoint.read_config(str(tmp_path))


def test_nothing_is_allocated_before_all_names_shapes_and_dtypes_are_right(tmp_path):
    _, folder = exported(tmp_path)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    last = list(tensors)[-1]
    for change, words in (({last: torch.zeros(3)}, "has shape"), ({last: tensors[last].to(torch.int8)}, "stored as I8"), ({"more": torch.zeros(1)}, "unexpected")):
        save_file(tensors | change, os.path.join(folder, "model.safetensors"))
        with torch.device("meta"):
            model = llama.Llama(TINY)
        with pytest.raises(checkpoint.CheckpointError, match=words):
            checkpoint.load_weights(model, folder, "cpu")
        assert all(p.is_meta for p in model.parameters())


def test_names_from_a_file_cannot_drive_the_terminal(tmp_path):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), model_type="\x1b[2J\nllama\u2028")
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.read_config(folder)
    assert str(error.value).isprintable()


def test_head_dim_is_derived_only_where_it_is_not_given(tmp_path):
    config = SHAPES["own head_dim"]
    _, folder = exported(tmp_path, config)
    model = loaded(folder)
    assert [tuple(getattr(model.layers[0].attention, n).weight.shape) for n in ("wq", "wk", "wo")] == [(64, 48), (32, 48), (48, 64)]
    batch = random_batch(2, 32, 304)
    train.train_step(model, optim.Adam8bit(model.named_parameters()), [batch], 1e-3, offload.run_layer, 64)
    checkpoint.export(model, str(tmp_path / "again"), folder, None, dtype=torch.float32, log=lambda line: None)
    assert torch.equal(loaded(str(tmp_path / "again")).logits(TOKENS), model.logits(TOKENS))
    edit(os.path.join(folder, "config.json"), head_dim=None)
    assert checkpoint.read_config(folder).head_dim == 12  # 48 / 4, which the tensors do not have
    with pytest.raises(checkpoint.CheckpointError, match=r"q_proj.weight has shape \[64, 48\], the config asks for \[48, 48\]"):
        loaded(folder)
    edit(os.path.join(folder, "config.json"), num_attention_heads=5)
    with pytest.raises(checkpoint.CheckpointError, match="not a multiple"):
        checkpoint.read_config(folder)


def test_eps_and_theta_come_from_the_config():
    for eps, value in ((1e-5, 0.3015), (1e-6, 0.7071)):
        assert llama.rms_norm(torch.full((1, 8), 1e-3), torch.ones(8), eps)[0, 0].item() == pytest.approx(value, abs=1e-4)


# -----------------------------------------------------------------------------
# the files: whole, in the right place, nothing else in them

def test_all_missing_shards_are_named_before_anything_is_read(tmp_path):
    _, folder = exported(tmp_path)
    reshard(folder)
    for i in (2, 3):
        os.remove(os.path.join(folder, f"model-0000{i}-of-00003.safetensors"))
    with pytest.raises(checkpoint.CheckpointError, match="missing model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"):
        loaded(folder)


@pytest.mark.parametrize("damage, hint", [
    (lambda b: b[:len(b) // 2], "incomplete download"), (lambda b: b[:-1], "incomplete download"), (lambda b: b + b"\0" * 4, "incomplete download"),
    (lambda b: b"", "incomplete download"), (lambda b: b"<!DOCTYPE html><html>not found</html>", "incomplete download"),
    (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull")])
def test_a_damaged_weights_file_is_named_with_its_size(tmp_path, damage, hint):
    _, folder = exported(tmp_path)
    path = os.path.join(folder, "model.safetensors")
    blob = damage(open(path, "rb").read())
    open(path, "wb").write(blob)
    with pytest.raises(checkpoint.CheckpointError, match=hint) as error:
        loaded(folder)
    assert path in str(error.value) and f"({len(blob):,} bytes)" in str(error.value) and "\n" not in str(error.value)


def test_stored_rope_tables_are_ignored_and_other_tensors_are_not(tmp_path):
    ours, folder = exported(tmp_path)
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    tables = {"rope.freqs": torch.ones(6), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6, dtype=torch.bfloat16)}
    save_file(tensors | tables, path)
    assert torch.equal(loaded(folder).logits(TOKENS), ours.logits(TOKENS))
    save_file(tensors | {"model.layers.9.foo.weight": torch.ones(1)}, path)
    with pytest.raises(checkpoint.CheckpointError, match="unexpected tensor model.layers.9.foo.weight"):
        loaded(folder)
    save_file({k: t for k, t in tensors.items() if "layers.1.mlp.up_proj" not in k}, path)
    with pytest.raises(checkpoint.CheckpointError, match="no tensor model.layers.1.mlp.up_proj.weight"):
        loaded(folder)


def test_the_vocabulary_must_be_as_long_as_the_table(tmp_path):
    _, folder = exported(tmp_path)
    edit(os.path.join(folder, "config.json"), vocab_size=303)
    with pytest.raises(checkpoint.CheckpointError, match=r"embed_tokens.weight has shape \[304, 48\], the config asks for \[303, 48\]"):
        loaded(folder)


def test_every_dtype_is_cast_once_to_the_models(tmp_path):
    model, folder = exported(tmp_path)
    reshard(folder, (torch.float32, torch.float16, torch.bfloat16))
    read = llama.Llama(checkpoint.read_config(folder), torch.bfloat16)
    assert checkpoint.load_weights(read, folder) == "bfloat16, float16, float32"
    for (name, a), b in zip(read.named_parameters(), model.parameters()):
        assert a.dtype == (torch.bfloat16 if a.dim() == 2 else torch.float32), name
        torch.testing.assert_close(a.float(), b, rtol=2 ** -7, atol=1e-7)  # float16 has no more below 6e-8


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, name):
    _, folder = exported(tmp_path)
    os.rename(os.path.join(folder, "model.safetensors"), str(tmp_path / "outside.safetensors"))
    json.dump({"weight_map": {"model.norm.weight": name}}, open(os.path.join(folder, "model.safetensors.index.json"), "w"))
    with pytest.raises(checkpoint.CheckpointError, match="outside the folder|missing"):
        loaded(folder)


def test_nothing_in_metas_file_is_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    folder = meta_folder(tmp_path)
    torch.save({"tok_embeddings.weight": Bomb()}, os.path.join(folder, "consolidated.00.pth"))
    with pytest.raises(checkpoint.CheckpointError, match="consolidated.00.pth can't be read"):
        checkpoint.read_config(folder)
    assert not (tmp_path / "boom").exists()


def test_metas_folder_damaged_or_split_is_refused(tmp_path):
    folder = meta_folder(tmp_path)
    path = os.path.join(folder, "consolidated.00.pth")
    blob = open(path, "rb").read()
    for part in (blob[:len(blob) // 2], b"", b"text"):
        open(path, "wb").write(part)
        with pytest.raises(checkpoint.CheckpointError, match=re.escape(path)):
            checkpoint.read_config(folder)
    open(path, "wb").write(blob)
    open(os.path.join(folder, "consolidated.01.pth"), "wb").write(blob)
    with pytest.raises(checkpoint.CheckpointError, match="several consolidated files"):
        checkpoint.read_config(folder)
    os.remove(path)
    os.remove(os.path.join(folder, "consolidated.01.pth"))
    with pytest.raises(checkpoint.CheckpointError, match="No such file"):
        checkpoint.read_config(folder)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no config.json"):
        checkpoint.read_config(str(tmp_path))


# -----------------------------------------------------------------------------
# memory: measured in a process of its own, as growth of anonymous memory (pages of mapped files do not count)

MEASURE = """
import sys, threading, time
sys.path[:0] = [{root!r}, {tests!r}]
import torch, checkpoint, model as llama
def anonymous():
    return int(next(x for x in open("/proc/self/status") if x.startswith("RssAnon")).split()[1]) * 1024
def growth(work):
    peak, stop, start = [0], threading.Event(), anonymous()
    def watch():
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return (max(peak[0], anonymous()) - start) / 1e6
config = llama.ModelConfig(dim=512, n_layers=12, n_heads=8, n_kv_heads=8, head_dim=64, ffn_dim=2048, vocab_size=4096)
model = llama.Llama(config, torch.bfloat16)
model.init_weights()
checkpoint.SHARD_BYTES = 25_000_000
"""


def measured(script):
    code = MEASURE.format(root=ROOT, tests=os.path.join(ROOT, "tests")) + script
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [float(x) for x in result.stdout.split()]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_reading_and_writing_take_no_second_copy_of_the_model(tmp_path):
    # 109 MB of weights in 5 shards; what is read goes straight into the parameters that are there
    read, wrote, saved, largest = measured(f"""
import os, optim
folder = {str(tmp_path)!r}
wrote = growth(lambda: checkpoint.export(model, folder + "/hf", None, None, log=lambda line: None))
assert len([n for n in os.listdir(folder + "/hf") if n.endswith(".safetensors")]) == 5
read = growth(lambda: checkpoint.load_weights(model, folder + "/hf"))
optimizer = optim.Adam8bit(model.named_parameters())
os.mkdir(folder + "/run")
saved = growth(lambda: checkpoint.save(folder + "/run", model, optimizer, {{"step": 1}}, 2))
print(read, wrote, saved, max(p.nbytes for p in model.parameters()) / 1e6)
""")
    assert largest < 5 and read < 1.3 * 25 and wrote < 2 * 25 and saved < 2.5 * 25, (read, wrote, saved)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_metas_file_is_mapped_not_read(tmp_path):
    growth, = measured(f"""
import json
folder = {str(tmp_path)!r}
torch.save({{n: p.detach() for n, p in model.named_parameters()}}, folder + "/consolidated.00.pth")
json.dump(dict(dim=512, n_layers=12, n_heads=8, n_kv_heads=8, norm_eps=1e-5, rope_theta=5e5), open(folder + "/params.json", "w"))
print(growth(lambda: checkpoint.load_weights(model, folder)))
""")
    assert growth < 30, growth


# -----------------------------------------------------------------------------
# export: what others need

def source_folder(tmp_path):
    """A folder to start from, with all the files a tokenizer brings, and a config with a field of its own."""
    _, folder = exported(tmp_path, name="source")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        open(os.path.join(folder, name), "wb").write(b'{"odd":  "spacing\\u00e9" }\r\n' + name.encode())
    edit(os.path.join(folder, "config.json"), torch_dtype="float16", dtype="float16", pad_token_id=7)
    return folder


def test_an_export_is_complete_and_says_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 40_000)
    source = source_folder(tmp_path)
    checkpoint.export(loaded(source, torch.bfloat16), str(tmp_path / "out"), source, source, log=lambda line: None)
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert hashlib.sha256((out / name).read_bytes()).digest() == hashlib.sha256(open(os.path.join(source, name), "rb").read()).digest()
    config, index = json.load(open(out / "config.json")), json.load(open(out / "model.safetensors.index.json"))
    assert (config["torch_dtype"], config["dtype"], config["pad_token_id"], config["vocab_size"]) == ("bfloat16", "bfloat16", 7, 304)
    assert config["architectures"] == ["LlamaForCausalLM"] and json.load(open(out / "generation_config.json"))
    total, names = 0, set()
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(str(out / file), "pt") as f:
            assert f.metadata() == {"format": "pt"}
            for key in f.keys():
                tensor = f.get_tensor(key)
                assert tensor.dtype == torch.bfloat16 and index["weight_map"][key] == file
                total, names = total + tensor.nbytes, names | {key}
    assert total == index["metadata"]["total_size"] and names == set(index["weight_map"])
    assert len(set(index["weight_map"].values())) > 2
    assert {p.stat().st_mode for p in out.glob("*.safetensors")} == {(out / "config.json").stat().st_mode}  # others may read them, too
    # what llama.cpp's converter looks for: these names alone, as many rows as the vocabulary
    known = r"model\.(embed_tokens|norm|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm))\.weight|lm_head\.weight"
    assert all(re.fullmatch(known, n) for n in names)


@pytest.mark.parametrize("said, chat, want", [(None, True, [7, 9]), (7, True, [7, 9]), ([7, 8], True, [7, 8, 9]), (7, False, 7), (None, False, 7)])
def test_what_ends_a_turn_ends_generation_too(tmp_path, said, chat, want):
    """A base model's folder knows only the end of text; finetuned on chats, others must stop at the end of a turn as well."""
    model, source = exported(tmp_path, name="source")
    edit(os.path.join(source, "generation_config.json"), temperature=0.3, eos_token_id=said)
    edit(os.path.join(source, "config.json"), bos_token_id=5)
    tokenizer = types.SimpleNamespace(bos=5, end_of_text=7, end_of_turn=9)
    checkpoint.export(model, str(tmp_path / "out"), source, source, checkpoint.special_ids(tokenizer, chat), log=lambda line: None)
    generation = json.load(open(tmp_path / "out" / "generation_config.json"))
    assert generation["eos_token_id"] == want and generation["temperature"] == 0.3
    assert json.load(open(tmp_path / "out" / "config.json"))["bos_token_id"] == 5


def test_an_export_takes_the_place_of_an_export_only(tmp_path):
    model, source = exported(tmp_path, name="source")
    quiet = dict(log=lambda line: None)
    with pytest.raises(checkpoint.CheckpointError, match="where this model comes from"):
        checkpoint.export(model, source + "/.", source, None, **quiet)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(checkpoint.CheckpointError, match="holds thesis.txt"):
        checkpoint.export(model, str(tmp_path / "home"), source, None, **quiet)
    assert train.main([f"--export={tmp_path}/home", f"--out_dir={tmp_path}/run", "--device=cpu"]) == 2  # before anything is trained
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious" and os.listdir(tmp_path / "run") == ["lock"]
    for _ in range(2):
        checkpoint.export(model, str(tmp_path / "out"), source, None, **quiet)
    assert sorted(os.listdir(tmp_path)) == ["home", "out", "run", "source"]


def test_an_overflow_is_an_error_and_leaves_no_folder(tmp_path):
    model = make()
    with torch.no_grad():
        model.layers[1].feed_forward.w2.weight[0, 0] = 70000.0
    with pytest.raises(checkpoint.CheckpointError, match=r"layers.1.mlp.down_proj.weight does not fit into float16"):
        checkpoint.export(model, str(tmp_path / "out"), None, None, dtype=torch.float16, log=lambda line: None)
    assert os.listdir(tmp_path) == []


def test_an_export_is_whole_or_absent(tmp_path, monkeypatch):
    _, folder = exported(tmp_path)
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "hf").iterdir())
    monkeypatch.setattr(checkpoint, "save_file", broken_after(0))
    for name in ("hf", "new"):
        with pytest.raises(checkpoint.CheckpointError, match="could not be written"):
            checkpoint.export(make(seed=1), str(tmp_path / name), None, None, log=lambda line: None)
    assert os.listdir(tmp_path) == ["hf"] and before == sorted((p.name, p.read_bytes()) for p in (tmp_path / "hf").iterdir())


def test_a_missing_tokenizer_is_said(tmp_path):
    lines = []
    checkpoint.export(make(), str(tmp_path / "out"), None, None, log=lines.append)
    assert "no tokenizer.json" in lines[0]


# -----------------------------------------------------------------------------
# checkpoints of a run

def broken_after(files, error=OSError(28, "No space left on device")):
    """A save_file that writes so many files, then half of one, and fails."""
    written = []

    def save(tensors, path, metadata=None):
        save_file(tensors, path, metadata=metadata)
        written.append(path)
        if len(written) > files:
            with open(path, "rb+") as f:
                f.truncate(os.path.getsize(path) // 2)
            raise error
    return save


def trained(steps=3, seed=0, config=TINY):
    model = make(config, seed, torch.bfloat16)
    optimizer = optim.Adam8bit(model.named_parameters(), residual=True, weight_decay=0.1)
    for i in range(steps):
        train.train_step(model, optimizer, [random_batch(2, 32, 304, seed=i)], 1e-3, offload.run_layer, 64)
    return model, optimizer


def test_weights_and_states_come_back_bit_for_bit(tmp_path):
    model, optimizer = trained(3)
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 3}, 2)
    folder = checkpoint.newest(str(tmp_path))
    again = loaded(folder, torch.bfloat16)
    restored = optim.Adam8bit(again.named_parameters(), residual=True, weight_decay=0.1)
    checkpoint.load_optimizer(restored, folder, checkpoint.load_state(folder))
    for (name, a), (_, b) in zip(optimizer.state(), restored.state()):
        assert a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a), name
    assert {t.dtype for _, s in optimizer.state() for t in s.values()} == {torch.uint8, torch.int8, torch.float32}
    for m, o in ((model, optimizer), (again, restored)):
        for i in range(3, 6):
            train.train_step(m, o, [random_batch(2, 32, 304, seed=i)], 1e-3, offload.run_layer, 64)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters())) and optimizer.steps == restored.steps == 6
    assert {os.path.splitext(n)[1] for n in os.listdir(folder)} == {".safetensors", ".json"}  # nothing is pickled


@pytest.mark.parametrize("change", [lambda t: {k.replace("layers.0", "layers.7"): v for k, v in t.items()},
                                    lambda t: {k: v for k, v in t.items() if not k.startswith("norm.")},
                                    lambda t: {k: v for k, v in t.items() if k != "tok_embeddings.weight|m_scale"},
                                    lambda t: t | {"extra.weight|m": torch.zeros(3)}, lambda t: {k: v[:-1] for k, v in t.items()},
                                    lambda t: {k: torch.cat([v, v]) for k, v in t.items()}, lambda t: {k: v.half() for k, v in t.items()}])
def test_states_of_another_model_are_refused(tmp_path, change):
    model, optimizer = trained(1)
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 1}, 2)
    folder = checkpoint.newest(str(tmp_path))
    path = os.path.join(folder, "optimizer-00000.safetensors")
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)
    with pytest.raises(checkpoint.CheckpointError, match="optimizer states"):
        checkpoint.load_optimizer(trained(0)[1], folder, checkpoint.load_state(folder))


@pytest.mark.parametrize("files", [0, 1])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("anything")])
def test_a_save_that_fails_leaves_the_one_before_as_it_was(tmp_path, monkeypatch, files, error):
    model, optimizer = trained(1)
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 1}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", broken_after(files, error))
        with pytest.raises((checkpoint.CheckpointError, RuntimeError)):
            checkpoint.save(str(tmp_path), model, optimizer, {"step": 2}, 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001"] and checkpoint.newest(str(tmp_path)).endswith("step_000001")
    loaded(checkpoint.newest(str(tmp_path)), torch.bfloat16)
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 2}, 1)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000002"]


@pytest.mark.skipif(os.name != "posix", reason="file size limits are a Unix thing")
def test_a_quota_reached_in_the_middle_of_a_file_is_survived(tmp_path):
    code = f"""
import sys; sys.path[:0] = [{ROOT!r}, {os.path.join(ROOT, 'tests')!r}]
import resource, signal, checkpoint, test_checkpoint as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model, optimizer = t.trained(1)
checkpoint.save({str(tmp_path)!r}, model, optimizer, {{"step": 1}}, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    checkpoint.save({str(tmp_path)!r}, model, optimizer, {{"step": 2}}, 2)
except checkpoint.CheckpointError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "could not be written" in result.stdout and "before is intact" in result.stdout, result.stdout + result.stderr
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001"]
    loaded(checkpoint.newest(str(tmp_path)), torch.bfloat16)


def test_leftovers_of_a_killed_save_are_ignored_and_cleaned(tmp_path):
    model, optimizer = trained(1)
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 1}, 2)
    for left in ("step_000002.unfinished.tmp", "step_000000.replaced.old"):
        shutil.copytree(tmp_path / "step_000001", tmp_path / left)
    os.mkdir(tmp_path / "step_000009")  # no state.json: not complete
    assert checkpoint.checkpoints(str(tmp_path)) == [1] and checkpoint.newest(str(tmp_path)).endswith("step_000001")
    checkpoint.save(str(tmp_path), model, optimizer, {"step": 2}, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_000001", "step_000002", "step_000009"]
    assert sorted(checkpoint.checkpoints(str(tmp_path))) == [1, 2]


@pytest.mark.parametrize("text", ["step_000009\n", "", "../elsewhere", "step_000001/../..", "\x00", None])
def test_the_newest_complete_checkpoint_is_found_whatever_latest_says(tmp_path, text):
    model, optimizer = trained(1)
    for step in (1, 2):
        checkpoint.save(str(tmp_path), model, optimizer, {"step": step}, 5)
    os.remove(tmp_path / "latest") if text is None else (tmp_path / "latest").write_text(text)
    assert checkpoint.newest(str(tmp_path)).endswith("step_000002")


def test_only_older_checkpoints_make_way(tmp_path):
    model, optimizer = trained(1)
    for step in (5, 6, 9, 2):
        checkpoint.save(str(tmp_path), model, optimizer, {"step": step}, 2)
    assert sorted(checkpoint.checkpoints(str(tmp_path))) == [2, 6, 9]


def test_a_full_disk_is_found_before_writing(tmp_path, monkeypatch):
    model, optimizer = trained(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(checkpoint.CheckpointError, match="0.0 GB are free"):
        checkpoint.save(str(tmp_path), model, optimizer, {"step": 1}, 2)
    assert os.listdir(tmp_path) == []


def test_the_command_line_exports_the_newest_checkpoint(tmp_path, capsys):
    assert train.main(["--max_steps=2", f"--out_dir={tmp_path}/run", f"--cache_dir={tmp_path}/cache", "--eval_every=0", "--val_fraction=0",
                       "--batch_size=1", "--seq_len=64", "--sample_tokens=0", "--device=cpu"]) == 0
    assert checkpoint.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype=float32"]) == 0
    assert "step 2 of" in capsys.readouterr().out
    assert torch.equal(loaded(str(tmp_path / "hf")).output.weight, loaded(str(tmp_path / "run" / "step_000002")).output.weight)
    for argv in ([str(tmp_path / "nowhere"), str(tmp_path / "x")], [str(tmp_path / "run"), str(tmp_path / "x"), "--dtype=int8"]):
        assert checkpoint.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and not (tmp_path / "x").exists()
