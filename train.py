"""
Finetune (or train from scratch) a Llama with all its parameters, on one GPU or on a CPU.

    python train.py                                                       a small model on a CPU, about a minute
    python train.py config/llama3_8b_24gb.py --data=chats.jsonl           Llama-3 8B on a 24 GB card
    python train.py config/llama3_8b_24gb.py --data=chats.jsonl --resume  go on after an interruption
    python train.py --help                                                all settings

Exit codes: 0 done, 1 the run failed, 2 a mistake in settings or data, 130 interrupted with a checkpoint left.
"""

import dataclasses
import functools
import json
import math
import os
import signal
import sys
import textwrap
import time
from dataclasses import dataclass
from typing import Literal

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before torch: no holes between large tensors

import torch

import checkpoint
import configurator
import data
import offload
import optim
import sample
from model import PRESETS, Llama, ModelConfig


@dataclass
class Config:
    # model and data
    init_from: str = "scratch"           # 'scratch', or a folder with Llama weights (Hugging Face's or Meta's)
    model: Literal[*PRESETS] = "debug"   # shape of a model from scratch
    tokenizer: str | None = None         # 'byte', a tokenizer file, or a folder with one; None: init_from's, else 'byte'
    data: str = "pydoc"                  # a .jsonl, .json, .txt or .md file, a folder or a glob of them; 'pydoc': Python's manual
    val_data: str | None = None          # the same, for validation; None: val_fraction of data
    val_fraction: float = 0.1            # share of documents kept for validation
    text_documents: Literal["file", "block"] = "file"  # one document per text file, or blank lines separate documents
    train_on_input: bool = False         # learn the user's turns too, not only the assistant's
    chat_template: Literal["llama3", "chatml"] | None = None  # None: what the tokenizer is made for
    cache_dir: str = "cache"             # prepared data
    # run
    out_dir: str = "out"                 # everything the run writes
    resume: bool = False                 # go on from out_dir's newest checkpoint
    seed: int = 1337                     # of initial weights, data order and rounding
    max_steps: int | None = 300          # optimizer steps; None: from epochs
    epochs: float = 1.0                  # passes over the data, where max_steps is None
    # step: batch_size x seq_len x gradient_accumulation_steps tokens
    seq_len: int = 256                   # tokens per packed row
    batch_size: int = 8                  # rows that go through a block together
    gradient_accumulation_steps: int = 1 # micro-batches per step; costs activations on the host, not gradients
    # optimizer
    optimizer: Literal["adam8bit", "bnb_paged_adamw8bit", "adamw"] = "adam8bit"  # ours, bitsandbytes', torch's
    rounding: Literal["stochastic", "nearest"] = "stochastic"  # of bf16 weights; nearest loses small updates
    master: Literal["none", "residual"] = "none"  # residual: 7 more bits of each bf16 weight, paged with the states
    skip_nonfinite: int = 0              # this many steps with a non-finite loss (with grad_clip: gradient) are skipped
    learning_rate: float = 3e-3          # peak of the schedule
    min_lr: float = 3e-4                 # at the end of the decay
    warmup_steps: int = 20               # linear warmup
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warmup
    weight_decay: float = 0.1            # decoupled, on matrices only
    beta1: float = 0.9                   # decay of the first moment
    beta2: float = 0.95                  # decay of the second moment
    eps: float = 1e-8                    # Adam's, added to sqrt(v)
    grad_clip: float = 0.0               # limit of the global gradient norm, 0: off; parks gradients on the host, 2 bytes each
    # machine
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: the GPU if there is one
    dtype: Literal["bfloat16", "float32"] = "float32"  # of matrices and activations; norms, rope and loss are always float32
    compile: bool = False                # torch.compile the blocks (GPU)
    activation_checkpointing: bool = True  # recompute blocks in backward
    activation_offloading: bool = False  # keep blocks' inputs in host memory
    loss_chunk: int = 1024               # tokens whose logits exist at one time
    state_buffer_gb: float = 1.0         # GPU memory to page optimizer states through
    state_resident_gb: float = 0.0       # GPU memory for states that never travel
    # output
    log_every: int = 10                  # steps per log line, 0: off
    eval_every: int = 100                # steps between validations, 0: only at the end
    eval_batches: int = 0                # batches per validation, 0: all
    save_every: int = 0                  # steps between checkpoints, 0: only at the end
    keep_checkpoints: int = 2            # newest ones kept
    sample_tokens: int = 200             # length of the sample at the end, 0: none
    export: str | None = None            # folder for the result in Hugging Face's format


class RunError(Exception):
    """The run can't go on; the message is one clear line."""


class NonFinite(RunError):
    """The loss was NaN or infinite before anything was updated."""


# bf16 tensor-core peaks with fp32 accumulation, dense, from the vendors' data sheets
PEAK_FLOPS = {"RTX 3090": 71e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s of a GPU by its name, None if unknown (then no MFU is shown rather than a wrong one)."""
    return next((v for k, v in PEAK_FLOPS.items() if k in device_name), None)


def flops_per_token(n_params: int, config: ModelConfig, seq_len: int) -> int:
    """6 N + 12 L H D T (PaLM appendix B, nanoGPT): forward and backward, attention not halved, recompute not counted."""
    return 6 * n_params + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len


def check(cfg: Config):
    """Settings that contradict each other or are out of range: ConfigError."""
    def need(ok, message):
        if not ok:
            raise configurator.ConfigError(message)
    for name in ("seq_len", "batch_size", "gradient_accumulation_steps", "loss_chunk", "keep_checkpoints"):
        need(getattr(cfg, name) >= 1, f"'{name}' must be at least 1, got {getattr(cfg, name)}")
    for name in ("learning_rate", "min_lr", "warmup_steps", "weight_decay", "grad_clip", "log_every", "eval_every",
                 "eval_batches", "save_every", "sample_tokens", "state_buffer_gb", "state_resident_gb", "seed", "skip_nonfinite"):
        need(getattr(cfg, name) >= 0, f"'{name}' must not be negative, got {getattr(cfg, name)}")
    for name in ("beta1", "beta2"):
        need(0 <= getattr(cfg, name) < 1, f"'{name}' must be in [0, 1), got {getattr(cfg, name)}")
    need(cfg.eps > 0, f"'eps' must be positive, got {cfg.eps}")
    need(0 <= cfg.val_fraction < 1, f"'val_fraction' must be in [0, 1), got {cfg.val_fraction}")
    need(cfg.max_steps is None or cfg.max_steps >= 0, f"'max_steps' must not be negative, got {cfg.max_steps}")
    need(cfg.max_steps is not None or cfg.epochs > 0, f"'epochs' must be positive, got {cfg.epochs}")
    need(cfg.seq_len >= 2, "'seq_len' must be at least 2")
    need(not cfg.grad_clip or cfg.optimizer != "bnb_paged_adamw8bit",
         "'grad_clip' needs the whole gradient at once, but bitsandbytes' optimizer is stepped inside backward; use --optimizer=adam8bit")
    need(cfg.master == "none" or (cfg.optimizer == "adam8bit" and cfg.dtype == "bfloat16"),
         "'master' is for bfloat16 weights with --optimizer=adam8bit")
    need(cfg.device != "cuda" or torch.cuda.is_available(),
         "'device' is cuda, but torch finds no GPU" + ("" if torch.version.cuda else " (this torch is a CPU build)"))


# -----------------------------------------------------------------------------
# building blocks, shared with bench.py and the tests

def make_model(cfg: Config, config: ModelConfig, device: torch.device, weights: str | None, log=print) -> Llama:
    """The model on the device, filled from the folder `weights`, or at random."""
    with torch.device("meta"):
        model = Llama(config, getattr(torch, cfg.dtype))
    model.to_empty(device=device)
    if config.tie_word_embeddings:
        model.output.weight = model.tok_embeddings.weight
    if weights:
        start = time.time()
        found = checkpoint.load_weights(model, weights)
        log(f"weights from {weights} ({found}) in {time.time() - start:.1f} s")
    else:
        model.init_weights(cfg.seed)
    return model


def make_optimizer(cfg: Config, model: Llama):
    common = dict(beta1=cfg.beta1, beta2=cfg.beta2, eps=cfg.eps, weight_decay=cfg.weight_decay)
    if cfg.optimizer != "adam8bit":
        return optim.StockOptimizer(cfg.optimizer, model.named_parameters(), **common, grad_clip=cfg.grad_clip)
    device = model.norm.weight.device
    return optim.Adam8bit(model.named_parameters(), **common, rounding=cfg.rounding, seed=cfg.seed, residual=cfg.master == "residual", grad_clip=cfg.grad_clip,
                          allocate=functools.partial(offload.pinned_zeros, device=device),
                          buffer_bytes=int(cfg.state_buffer_gb * 1e9), resident_bytes=int(cfg.state_resident_gb * 1e9))


def make_run_layer(cfg: Config, model: Llama):
    """How a block runs over the micro-batches, and the offloader in it (or None)."""
    offloader = None
    if cfg.activation_offloading:
        offloader = offload.ActivationOffload(model.parameters(), model.norm.weight.device, ahead=cfg.gradient_accumulation_steps)
    return functools.partial(offload.run_layer, recompute=cfg.activation_checkpointing, offload=offloader), offloader


def train_step(model: Llama, optimizer, batches, lr: float, run_layer, loss_chunk: int) -> tuple[float, torch.Tensor]:
    """
    One optimizer step over all micro-batches -> (loss, gradient norm as a device scalar). NonFinite is raised before
    anything is touched. There must be at least one supervised token.
    """
    loss = model.loss(batches, sum(len(b.targets) for b in batches), run_layer, loss_chunk)
    value = loss.item()
    if not math.isfinite(value):
        raise NonFinite(f"the loss is {value}; rows {[r for b in batches for r in b.rows]} of the data; nothing was updated")
    optimizer.begin(lr)
    loss.backward()
    return value, optimizer.finish()


@torch.no_grad()
def evaluate(model: Llama, shards, cfg: Config, device, stop=lambda: False) -> float:
    """
    Validation loss: summed over all supervised tokens, divided by their number; nan if there are none or stop() became
    true. Uses no random numbers and a loader of its own, so training goes on as if it had not happened.
    """
    total, count = 0.0, 0
    for i, batch in enumerate(data.Loader(shards, cfg.batch_size, shuffle=False)):
        if cfg.eval_batches and i >= cfg.eval_batches:
            break
        if stop():
            return math.nan
        if len(batch.targets):
            total += model.loss([batch.to(device)], 1, chunk_size=cfg.loss_chunk).item()
            count += len(batch.targets)
    return total / count if count else math.nan


def host_gb() -> float:
    """Peak host memory of this process, GB."""
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def gpu_gb(device: torch.device) -> float:
    """Memory in use on the GPU, by all that runs on it, as the driver counts, GB."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 1e9


def forecast(cfg: Config, config: ModelConfig, n_params: int) -> dict[str, dict[str, int]]:
    """Bytes by kind: {'gpu': {...}, 'host': {...}} for a run on a GPU."""
    size = 2 if cfg.dtype == "bfloat16" else 4
    micro = cfg.batch_size * cfg.seq_len
    tokens = micro * cfg.gradient_accumulation_steps
    saved = tokens * config.dim * config.n_layers * size
    head = config.vocab_size * config.dim
    layer = config.dim * (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim + 3 * config.dim * config.ffn_dim
    wide = 6 * config.dim + (2 * config.n_heads + 4 * config.n_kv_heads) * config.head_dim + 5 * config.ffn_dim
    many = cfg.gradient_accumulation_steps > 1
    states = 2 * n_params + n_params // 32 + (n_params if cfg.master == "residual" else 0) + (n_params * size if cfg.grad_clip else 0)
    resident = min(states, int(cfg.state_resident_gb * 1e9))
    in_head = 4 * head + max(size * head, cfg.loss_chunk * config.vocab_size * (4 + size)) + 2 * tokens * config.dim * size
    in_block = layer * (size + (4 if many else 0)) + micro * wide * size + 3 * tokens * config.dim * size
    return {"gpu": {"weights": n_params * size, "gradients and working memory, at the fullest": max(in_head, in_block),
                    "optimizer state buffers": min(states, int(cfg.state_buffer_gb * 1e9)) + resident,
                    **({} if cfg.activation_offloading else {"block inputs": saved})},
            "host": {"optimizer states" + (" and parked gradients" if cfg.grad_clip else ""): states - resident, **({"block inputs": saved} if cfg.activation_offloading else {})}}


# -----------------------------------------------------------------------------
# the run

class Signals:
    """The first SIGINT or SIGTERM asks the loop to stop after the current step; the second ends the process at once."""

    def __init__(self):
        self.received = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        if self.received:
            os._exit(128 + number)
        self.received = number
        print(f"\n{signal.Signals(number).name}: stopping after this step (again: at once)", file=sys.stderr)

    def raise_if_received(self):
        if self.received:
            raise KeyboardInterrupt


class Metrics:
    """metrics.jsonl: one row per logged step or validation. On resume, rows past the checkpoint are removed."""

    def __init__(self, path: str, step: int):
        kept = []
        if step and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                for line in f:
                    try:
                        if json.loads(line)["step"] <= step:
                            kept.append(line)
                    except (ValueError, KeyError):
                        continue  # the last line of a killed run
        self.file = open(path, "w", encoding="utf-8")
        self.file.writelines(kept)

    def write(self, **row):
        self.file.write(json.dumps({k: round(v, 6) if isinstance(v, float) and k not in ("lr", "loss", "val_loss", "grad_norm") else v
                                    for k, v in row.items()}) + "\n")
        self.file.flush()


def say(line: str = ""):
    print(line, flush=True)


def start_page(cfg, config, model, prepared, plan, device, resumed_at, origin):
    """One screen: what is trained, on what, how a step is made up, what it needs, where it goes."""
    n_params = sum(p.numel() for p in model.parameters())
    say(f"model    {n_params / 1e6:,.1f} M parameters, {config.n_layers} layers, dim {config.dim}, vocabulary {config.vocab_size:,}, {cfg.dtype}")
    for i, line in enumerate(data.report(prepared)):
        say(f"{'data' if i == 0 else '':<8} {line}")
    say(f"step     {cfg.batch_size} rows x {cfg.seq_len} tokens x {cfg.gradient_accumulation_steps} micro-batches = {plan['tokens']:,} tokens")
    say(f"run      steps {resumed_at:,} to {plan['max_steps']:,}, {plan['max_steps'] * plan['rows'] / prepared.meta['rows']['train']:.2f} epochs; "
        f"{cfg.optimizer}, lr {cfg.learning_rate:g} {cfg.lr_schedule} to {cfg.min_lr:g}")
    if device.type == "cuda":
        for place, kinds in forecast(cfg, config, n_params).items():
            parts = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in kinds.items())
            say(f"{place:<8} {sum(kinds.values()) / 1e9:.2f} GB expected: {parts}")
        say(f"device   {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    else:
        say(f"device   CPU, {torch.get_num_threads()} threads, torch {torch.__version__}")
    say(f"writes   {cfg.out_dir}/ (config.json, metrics.jsonl, step_*/)")
    groups = {}
    for key, value in dataclasses.asdict(cfg).items():
        where = origin.get(key, "defaults")
        groups.setdefault("flags" if where.startswith("flag ") else where.split("'")[1] if "'" in where else where, []).append(f"{key}={value!r}")
    for where, settings in reversed(groups.items()):
        say(textwrap.fill(f"{where}: {', '.join(settings)}", 120, initial_indent=" " * 9, subsequent_indent=" " * 11))
    say()


def run(cfg: Config, origin: dict[str, str]) -> int:
    check(cfg)
    signals = Signals()
    device = torch.device("cuda" if cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available()) else "cpu")

    # resume or start: which weights, which step
    folder, state = None, {"step": 0, "consumed": 0, "tokens": 0}
    if checkpoint.checkpoints(cfg.out_dir):
        if not cfg.resume:
            raise configurator.ConfigError(f"'{cfg.out_dir}' holds checkpoints of an earlier run; continue it with --resume, "
                                           "choose another --out_dir, or delete it")
        folder = checkpoint.newest(cfg.out_dir)
        state = checkpoint.load_state(folder)
    elif cfg.resume:
        say(f"nothing to resume in '{cfg.out_dir}': starting from {cfg.init_from}")

    # data and model shape; all that can be wrong is found here, before the GPU is touched
    from_folder = cfg.init_from != "scratch"
    tokenizer_source = cfg.tokenizer or (cfg.init_from if from_folder else "byte")
    tokenizer = data.load_tokenizer(tokenizer_source)
    config = checkpoint.read_config(folder or cfg.init_from) if folder or from_folder else \
        dataclasses.replace(PRESETS[cfg.model], vocab_size=tokenizer.vocab_size)
    prepared = data.prepare(cfg.data, tokenizer, cfg.cache_dir, cfg.seq_len, cfg.val_fraction, cfg.val_data, cfg.text_documents,
                            cfg.train_on_input, cfg.chat_template, say, signals.raise_if_received)
    if prepared.meta["max_token"] >= config.vocab_size:
        raise data.DataError(f"the tokenizer makes token {prepared.meta['max_token']}, but the model's vocabulary ends at {config.vocab_size - 1}")
    rows_per_step = cfg.batch_size * cfg.gradient_accumulation_steps
    n_rows = prepared.meta["rows"]["train"]
    max_steps = cfg.max_steps if cfg.max_steps is not None else max(1, math.ceil(cfg.epochs * n_rows / rows_per_step))
    plan = {"rows": rows_per_step, "tokens": rows_per_step * cfg.seq_len, "max_steps": max_steps}
    if folder:
        say(f"resuming {folder}")
        for name, value in dataclasses.asdict(cfg).items():
            if name in state.get("settings", {}) and state["settings"][name] != value and name != "resume":
                say(f"  {name}: {state['settings'][name]} -> {value}")
        if state["fingerprint"] != prepared.meta["fingerprint"]:
            say("warning: the data differs from what the checkpoint was trained on: starting at its first row")
            state["consumed"] = 0

    os.makedirs(cfg.out_dir, exist_ok=True)
    model = make_model(cfg, config, device, folder or (cfg.init_from if from_folder else None), say)
    optimizer = make_optimizer(cfg, model)
    if folder:
        checkpoint.load_optimizer(optimizer, folder, state)
    checkpoint.check_disk(cfg.out_dir, checkpoint.checkpoint_bytes(model, optimizer), "the first checkpoint")
    if cfg.compile and device.type == "cuda" and optim.triton:
        model.compile_blocks()
    elif cfg.compile:
        say(f"note: compile=True needs {'triton' if device.type == 'cuda' else 'a GPU'}; running without, slower, same results")
    run_layer, offloader = make_run_layer(cfg, model)
    loader = data.Loader(prepared.rows("train"), cfg.batch_size, cfg.seed, consumed=state["consumed"])
    val_shards = prepared.rows("val")
    if not val_shards:
        say("note: no document fell to validation, so there will be no validation loss (--val_fraction, --val_data)")
    checkpoint.write_json(os.path.join(cfg.out_dir, "config.json"), dataclasses.asdict(cfg))
    metrics = Metrics(os.path.join(cfg.out_dir, "metrics.jsonl"), state["step"])
    start_page(cfg, config, model, prepared, plan, device, state["step"], origin)

    n_params = sum(p.numel() for p in model.parameters())
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    step, tokens, first_loss, val_loss = state["step"], state["tokens"], None, math.nan
    saved_at = step if folder else None
    skipped = 0  # steps whose loss or gradient was not finite
    window_ms = []  # of the steps since the last log line
    fresh = True  # the first step warms up and compiles: it is logged, but not counted in tok/s

    def save():
        nonlocal saved_at
        now = {"step": step, "consumed": loader.consumed, "tokens": tokens, "fingerprint": prepared.meta["fingerprint"],
               "tokenizer": tokenizer.digest, "chat": "chat documents" in prepared.meta["counts"], "settings": dataclasses.asdict(cfg)}
        checkpoint.save(cfg.out_dir, model, optimizer, now, cfg.keep_checkpoints)
        saved_at = step
        say(f"saved {cfg.out_dir}/step_{step:06d}")

    def next_batches():
        return [loader.next() for _ in range(cfg.gradient_accumulation_steps)]

    while True:
        last_step = step >= max_steps or signals.received
        # once in a while, and at the end: validate, save
        if val_shards and not signals.received and (last_step or (cfg.eval_every and step % cfg.eval_every == 0)):
            val_loss = evaluate(model, val_shards, cfg, device, lambda: signals.received)
            if not signals.received:
                metrics.write(step=step, val_loss=val_loss)
                say(f"step {step:6d}/{max_steps} | val loss {val_loss:.4f} | perplexity {math.exp(min(val_loss, 700)):.2f}")
        if saved_at != step and (last_step or (cfg.save_every and step and step % cfg.save_every == 0)):
            save()
        if last_step:
            break

        # -- one step --------------------------------------------------------
        start = time.perf_counter()
        batches = next_batches()
        supervised = sum(len(b.targets) for b in batches)
        if supervised == 0:
            say(f"warning: rows {[r for b in batches for r in b.rows]} hold nothing to learn: no step taken")
            continue
        lr = optim.schedule(step, max_steps, cfg.warmup_steps, cfg.learning_rate, cfg.min_lr, cfg.lr_schedule)
        try:
            loss, norm = train_step(model, optimizer, [b.to(device) for b in batches], lr, run_layer, cfg.loss_chunk)
        except (NonFinite, optim.NonFiniteGradient) as error:
            skipped += 1
            if skipped > cfg.skip_nonfinite:
                if saved_at != step:
                    save()
                raise RunError(f"step {step + 1}: {error}") from None
            say(f"warning: step {step + 1} is tried again with the next rows: {error}")
            continue
        grad_norm = norm.item()
        ms = 1000 * (time.perf_counter() - start)
        # --------------------------------------------------------------------

        if not math.isfinite(grad_norm):
            raise RunError(f"step {step + 1}: the gradient of {optimizer.worst()} is not finite; nothing is saved, the last good "
                           f"checkpoint is {checkpoint.newest(cfg.out_dir) if saved_at is not None else 'none'}")
        step += 1
        tokens += plan["tokens"]
        first_loss = first_loss if first_loss is not None else loss
        if not fresh:
            window_ms.append(ms)
        if cfg.log_every and (step % cfg.log_every == 0 or fresh or step == max_steps):
            mean_ms = sum(window_ms) / len(window_ms) if window_ms else ms
            rate = plan["tokens"] / mean_ms * 1000
            mfu = f" | mfu {100 * rate * flops_per_token(n_params, config, cfg.seq_len) / peak:4.1f} %" if peak else ""
            gpu = f" | gpu {gpu_gb(device):5.2f} GB" if device.type == "cuda" else ""
            eta = time.strftime("%H:%M:%S", time.gmtime((max_steps - step) * mean_ms / 1000))
            say(f"step {step:6d}/{max_steps} | loss {loss:.4f} | norm {grad_norm:.3f} | lr {lr:.2e} | {mean_ms:7.0f} ms | "
                f"{rate:7,.0f} tok/s{mfu}{gpu} | host {host_gb():5.2f} GB | eta {eta}{' (first step)' if fresh else ''}")
            metrics.write(step=step, loss=loss, lr=lr, grad_norm=grad_norm, ms=mean_ms, tok_s=rate, gpu_gb=gpu_gb(device), host_gb=host_gb(),
                          tokens=tokens, supervised_tokens=supervised, **({"offloaded_bytes": offloader.packed_bytes} if offloader else {}))
            window_ms = []
        if offloader:
            offloader.packed = offloader.packed_bytes = 0
        fresh = False

    if signals.received:
        say(f"interrupted after step {step}; go on with --resume")
        return 130 if signals.received == signal.SIGINT else 0
    if first_loss is not None:
        say(f"\ndone: {step:,} steps, {tokens:,} tokens, loss {first_loss:.4f} -> {loss:.4f}"
            + (f", validation {val_loss:.4f}" if not math.isnan(val_loss) else ""))
    if cfg.export:
        specials = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.end_of_text}
        checkpoint.export(model, cfg.export, cfg.init_from if from_folder else None, tokenizer_source, specials, log=say)
        say(f"exported {cfg.export}")
    if cfg.sample_tokens and tokenizer.bos is not None:
        say("\na sample:")
        for piece in sample.stream(model, tokenizer, [tokenizer.bos], cfg.sample_tokens, temperature=0.8, seed=cfg.seed):
            print(piece, end="", flush=True)
        say(f"\n\nmore with: python sample.py {cfg.out_dir} --prompt='...'")
    return 0


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal can't show
    if any(a in ("-h", "--help") for a in argv):
        print(__doc__.strip(), "\n", configurator.help_text(Config), sep="\n")
        return 0
    try:
        return run(*configurator.parse(Config, argv))
    except (configurator.ConfigError, data.DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (checkpoint.CheckpointError, RunError, optim.GradientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, checkpoint.CheckpointError) else 1
    except torch.OutOfMemoryError as error:
        print(f"error: the GPU is out of memory ({str(error).splitlines()[0][:160]}); lower --batch_size, --state_resident_gb or "
              "--state_buffer_gb, or raise --gradient_accumulation_steps; checkpoints are intact", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
