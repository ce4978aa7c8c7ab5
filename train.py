"""
Finetune (or train from scratch) a Llama with all its parameters, on one GPU or on a CPU.

    python train.py                                                       a small model on a CPU, two minutes
    python train.py config/llama3_8b_24gb.py --data=chats.jsonl           Llama-3 8B on a 24 GB card
    python train.py config/llama3_8b_24gb.py --data=chats.jsonl --resume  go on after an interruption
    python train.py --help                                                all settings

Exit codes: 0 done, 1 the run failed, 2 a mistake in settings or data, 130 interrupted with a checkpoint left.
"""

import contextlib
import dataclasses
import functools
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
import forecast
import monitor
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
    deterministic: bool = False          # a GPU computes the same bits every time, a little slower
    activation_checkpointing: bool = True  # recompute blocks in backward
    recompute: float = 1.0               # share of the blocks for which that holds; the others keep all they need
    activation_offloading: bool = False  # keep blocks' inputs, or all that is kept, in host memory
    loss_chunk: int = 1024               # tokens whose logits exist at one time
    state_buffer_gb: float = 1.0         # GPU memory to page optimizer states through
    state_resident_gb: float | None = None  # GPU memory for states that never travel; None: what is left over
    gpu_gb: float | None = None          # GiB of GPU memory to use at most; None: what is free
    host_gb: float | None = None         # GiB of host memory to use at most; None: what is free
    dry_run: bool = False                # only say what the run would need, on this machine or one with gpu_gb and host_gb
    max_hours: float = 0.0               # save and stop after this time, 0: no limit
    # output
    log_every: int = 10                  # steps per log line, 0: off
    eval_every: int = 100                # steps between validations, 0: only at the end
    eval_batches: int = 0                # batches per validation, 0: all
    eval_only: bool = False              # only the validation loss of init_from, or with resume of the newest checkpoint
    meter_every: int = 0                 # steps between measurements of what rounding does to the updates, 0: off
    save_every: int = 0                  # steps between checkpoints, 0: only at the end
    keep_checkpoints: int = 2            # newest ones kept
    keep_best: bool = False              # and the one with the lowest validation loss
    tensorboard: bool = False            # log to out_dir/tensorboard
    wandb_project: str | None = None     # log to Weights & Biases
    sample_tokens: int = 200             # length of the sample at the end, 0: none
    sample_prompt: str = "The "          # what it continues
    export: str | None = None            # folder for the result in Hugging Face's format
    export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"  # float32 holds what master=residual kept


console = monitor.Console()
say = console.say


class RunError(Exception):
    """The run can't go on; the message is one clear line."""


class NonFinite(RunError):
    """The loss was NaN or infinite before anything was updated."""


def check(cfg: Config):
    """Settings that contradict each other or are out of range: ConfigError."""
    def need(ok, message):
        if not ok:
            raise configurator.ConfigError(message)
    for name in ("seq_len", "batch_size", "gradient_accumulation_steps", "loss_chunk", "keep_checkpoints"):
        need(getattr(cfg, name) >= 1, f"'{name}' must be at least 1, got {getattr(cfg, name)}")
    for name in ("learning_rate", "min_lr", "warmup_steps", "weight_decay", "grad_clip", "log_every", "eval_every", "eval_batches",
                 "save_every", "sample_tokens", "state_buffer_gb", "seed", "skip_nonfinite", "meter_every", "max_hours"):
        need(getattr(cfg, name) >= 0, f"'{name}' must not be negative, got {getattr(cfg, name)}")
    for name in ("gpu_gb", "host_gb", "max_steps", "state_resident_gb"):
        need(getattr(cfg, name) is None or getattr(cfg, name) >= 0, f"'{name}' must not be negative, got {getattr(cfg, name)}")
    for name in ("beta1", "beta2"):
        need(0 <= getattr(cfg, name) < 1, f"'{name}' must be in [0, 1), got {getattr(cfg, name)}")
    need(cfg.init_from, "'init_from' must be 'scratch' or a folder")
    need(cfg.eps > 0, f"'eps' must be positive, got {cfg.eps}")
    need(0 <= cfg.val_fraction < 1, f"'val_fraction' must be in [0, 1), got {cfg.val_fraction}")
    need(cfg.max_steps is not None or cfg.epochs > 0, f"'epochs' must be positive, got {cfg.epochs}")
    need(0 <= cfg.recompute <= 1, f"'recompute' must be in [0, 1], got {cfg.recompute}")
    need(cfg.seq_len >= 2, "'seq_len' must be at least 2")
    need(not cfg.grad_clip or cfg.optimizer != "bnb_paged_adamw8bit",
         "'grad_clip' needs the whole gradient at once, but bitsandbytes' optimizer is stepped inside backward; use --optimizer=adam8bit")
    need(cfg.master == "none" or (cfg.optimizer == "adam8bit" and cfg.dtype == "bfloat16"),
         "'master' is for bfloat16 weights with --optimizer=adam8bit")
    need(not cfg.meter_every or cfg.optimizer == "adam8bit", "'meter_every' looks into --optimizer=adam8bit only")
    need(cfg.device != "cuda" or cfg.dry_run or torch.cuda.is_available(),
         "'device' is cuda, but torch finds no GPU" + ("" if torch.version.cuda else " (this torch is a CPU build)"))
    need(not monitor.missing_logger(cfg), monitor.missing_logger(cfg))


# -----------------------------------------------------------------------------
# building blocks, shared with bench.py and the tests

def make_model(cfg: Config, config: ModelConfig, device: torch.device, weights: str | None, log=print) -> Llama:
    """The model on the device, filled from the folder `weights`, or at random."""
    with torch.device("meta"):
        model = Llama(config, getattr(torch, cfg.dtype))
    if weights:
        start = time.time()
        found = checkpoint.load_weights(model, weights, device)
        log(f"weights from {weights} ({found}) in {time.time() - start:.1f} s")
    else:
        model.to_empty(device=device)
        model.init_weights(cfg.seed)
    return model


def make_optimizer(cfg: Config, model: Llama, gpu_bytes: int | None = None):
    """gpu_bytes: what this process may use of the GPU; optimizer states stay there as far as there is room."""
    common = dict(beta1=cfg.beta1, beta2=cfg.beta2, eps=cfg.eps, weight_decay=cfg.weight_decay, grad_clip=cfg.grad_clip)
    if cfg.optimizer != "adam8bit":
        return optim.StockOptimizer(cfg.optimizer, model.named_parameters(), **common)
    return optim.Adam8bit(model.named_parameters(), **common, rounding=cfg.rounding, seed=cfg.seed, residual=cfg.master == "residual",
                          allocate=functools.partial(offload.pinned_zeros, device=model.norm.weight.device),
                          buffer_bytes=int(cfg.state_buffer_gb * 1e9),
                          resident_bytes=int(1e9 * forecast.resident_gb(cfg, model.config, gpu_bytes)))


def make_run_layer(cfg: Config, model: Llama):
    """How a block runs over the micro-batches, and the offloader in it (or None)."""
    offloader = None
    again = set(forecast.recomputed(cfg, model.config))
    again = {block for i, block in enumerate(model.layers) if i in again}
    if cfg.activation_offloading:
        moving = forecast.moving_bytes(cfg, model.config)
        offloader = offload.ActivationOffload(model.parameters(), model.norm.weight.device, ahead_bytes=moving,
                                              out_bytes=moving if len(again) < len(model.layers) else 0)

    def run_layer(block, xs, contexts):
        return offload.run_layer(block, xs, contexts, recompute=block in again, offload=offloader)

    return run_layer, offloader


def compile_blocks(cfg: Config, model: Llama, device: torch.device, log=print):
    """Compile what can be compiled, and say so where a setting asks for what the machine can't do."""
    problem = optim.kernel_problem(device) if device.type == "cuda" else "the GPU is missing"
    if device.type == "cuda" and problem and cfg.optimizer == "adam8bit":
        log(f"warning: the optimizer's kernel can't be built ({problem}): updates run in plain PyTorch, slower, with the same results")
    if cfg.compile and problem:
        log(f"note: compile=True is of no use here ({problem}): running without, slower, with the same results")
    elif cfg.compile:
        model.compile_blocks()


def train_step(model: Llama, optimizer, batches, lr: float, run_layer, loss_chunk: int) -> tuple[float, torch.Tensor]:
    """
    One optimizer step over all micro-batches -> (loss, gradient norm as a device scalar). NonFinite is raised before
    anything is touched. There must be at least one supervised token. With clipping, weights get their update when the next
    step first needs them, behind whose forward pass it hides; optimizer.catch_up() before anyone else looks at them.
    """
    def layer(block, xs, contexts):
        optimizer.catch_up(block.parameters() if block is not model.layers[-1] else None)
        return run_layer(block, xs, contexts)

    optimizer.catch_up(model.tok_embeddings.parameters())
    loss = model.loss(batches, sum(len(b.targets) for b in batches), layer, loss_chunk)
    value = loss.item()
    if not math.isfinite(value):
        raise NonFinite(f"the loss is {value}; rows {[r for b in batches for r in b.rows]} of the data; nothing was updated")
    optimizer.begin(lr)
    loss.backward()
    return value, optimizer.finish(later=True)


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


# -----------------------------------------------------------------------------
# the run

class Signals:
    """
    SIGINT, SIGTERM or SIGHUP (the terminal was closed) asks the loop to stop after the current step; SIGINT or SIGTERM again
    ends the process at once. (When a terminal is closed kernel, shell and system may each send a signal of their own.)
    """

    def __init__(self):
        self.received, self.seen = None, set()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it; Windows has none
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        if number in self.seen and number in (signal.SIGINT, signal.SIGTERM):
            os._exit(128 + number)
        self.seen.add(number)
        if self.received:
            return
        self.received = number
        with contextlib.suppress(OSError):  # not print, which can't be entered twice
            os.write(2, f"\n{signal.Signals(number).name}: stopping after this step (again: at once)\n".encode())

    def raise_if_received(self):
        if self.received:
            raise KeyboardInterrupt


def memory_limits(cfg: Config, device: torch.device) -> tuple[int | None, int | None]:
    """Bytes that this process may use: of the GPU (None: it runs on the CPU) and of the host (None: not known)."""
    gpu, host = None, forecast.host_available()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gpu = min(free + forecast.BARE_CONTEXT, total)
        if cfg.gpu_gb:
            gpu = min(gpu, int(cfg.gpu_gb * forecast.GiB))
            torch.cuda.set_per_process_memory_fraction((gpu - forecast.CUDA_CONTEXT) / total)
    if cfg.host_gb:
        host = int(cfg.host_gb * forecast.GiB) if host is None else min(host, int(cfg.host_gb * forecast.GiB))
    return gpu, host


def dry_run(cfg: Config, device: torch.device) -> int:
    """What the run would need, here or on a machine with gpu_gb and host_gb; 0 if it fits, else 2."""
    if cfg.init_from != "scratch" and os.path.isdir(cfg.init_from):
        config = checkpoint.read_config(cfg.init_from)
    else:
        config = PRESETS[cfg.model]
        print(f"model    shape of --model={cfg.model}" + (f" ('{cfg.init_from}' is not there)" if cfg.init_from != "scratch" else ""))
    gpu, host = (None, None) if cfg.gpu_gb and cfg.host_gb else memory_limits(cfg, device)
    gpu, host = (int(given * forecast.GiB) if given else here for given, here in ((cfg.gpu_gb, gpu), (cfg.host_gb, host)))
    if gpu is None:
        print("device   CPU (ask about a GPU with --gpu_gb=24 --host_gb=64)")
    resident = forecast.resident_gb(cfg, config, gpu)
    shown = dataclasses.replace(cfg, state_resident_gb=resident)
    card = forecast.card_named(torch.cuda.get_device_name(device) if device.type == "cuda" else "RTX 4090") if gpu else None
    for line in forecast.table(shown, config, gpu, host, card):
        print(line)
    problem = forecast.verdict(shown, config, gpu, host)
    print(f"verdict  does not fit: {problem}" if problem else "verdict  fits")
    return 2 if problem else 0


def start_page(cfg, config, prepared, plan, device, resumed_at, origin, limits):
    """One screen: what is trained, on what, how a step is made up, what it needs, where it goes."""
    say(f"model    {forecast.n_params(config) / 1e6:,.1f} M parameters, {config.n_layers} layers, dim {config.dim}, "
        f"vocabulary {config.vocab_size:,}, {cfg.dtype}")
    for i, line in enumerate(data.report(prepared)):
        say(f"{'data' if i == 0 else '':<8} {line}")
    say(f"step     {cfg.batch_size} rows x {cfg.seq_len} tokens x {cfg.gradient_accumulation_steps} micro-batches = {plan['tokens']:,} tokens")
    say(f"run      steps {resumed_at:,} to {plan['max_steps']:,}, {plan['max_steps'] * plan['rows'] / prepared.meta['rows']['train']:.2f} epochs; "
        f"{cfg.optimizer}, lr {cfg.learning_rate:g} {cfg.lr_schedule} to {cfg.min_lr:g}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    say(f"device   {name}, torch {torch.__version__}")
    for line in forecast.table(plan["as_run"], config, *limits):
        say(line)
    say(f"writes   {cfg.out_dir}/ (config.json, metrics.jsonl, step_*/)")
    groups = {}
    for key, value in dataclasses.asdict(cfg).items():
        where = origin.get(key, "defaults")
        groups.setdefault("flags" if where.startswith("flag ") else where.split("'")[1] if "'" in where else where, []).append(f"{key}={value!r}")
    for where, settings in reversed(groups.items()):
        say(textwrap.fill(f"{where}: {', '.join(settings)}", 120, initial_indent=" " * 9, subsequent_indent=" " * 11))
    say()


def run(cfg: Config, origin: dict[str, str]) -> int:
    """The whole run -> exit code."""
    check(cfg)
    device = torch.device("cuda" if torch.cuda.is_available() and cfg.device != "cpu" else "cpu")
    if cfg.dry_run:
        return dry_run(cfg, device)
    if cfg.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS asks for
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    os.makedirs(cfg.out_dir, exist_ok=True)
    with checkpoint.lock(cfg.out_dir):
        return locked_run(cfg, origin, device, Signals())


def where_to_start(cfg: Config) -> tuple[str | None, dict]:
    """(the checkpoint to go on from, or None; its state, or that of a new run)"""
    new = {"step": 0, "consumed": 0, "tokens": 0, "best": math.inf, "validated_at": -1}
    if not checkpoint.checkpoints(cfg.out_dir):
        if cfg.resume:
            say(f"nothing to resume in '{cfg.out_dir}': starting from {cfg.init_from}")
        return None, new
    if not cfg.resume:
        if cfg.eval_only:
            return None, new
        raise configurator.ConfigError(f"'{cfg.out_dir}' holds checkpoints of an earlier run; continue it with --resume, "
                                       "choose another --out_dir, or delete it")
    folder = checkpoint.newest(cfg.out_dir)
    state = checkpoint.load_state(folder)
    say(f"resuming {folder}")
    for name, value in dataclasses.asdict(cfg).items():
        if name in state["settings"] and state["settings"][name] != value and name != "resume":
            say(f"  {name}: {state['settings'][name]} -> {value}")
    return folder, state


def locked_run(cfg: Config, origin: dict[str, str], device: torch.device, signals: Signals) -> int:
    """The run, when nobody else writes to its folder."""
    began = time.time()
    folder, state = where_to_start(cfg)

    # data and model shape; all that can be wrong is found here, before the GPU is touched
    source = cfg.init_from if cfg.init_from != "scratch" else None
    tokenizer_source = cfg.tokenizer or source or "byte"
    tokenizer = data.load_tokenizer(tokenizer_source)
    if cfg.export:
        checkpoint.check_target(cfg.export, source, tokenizer_source)
    config = checkpoint.read_config(folder or source) if folder or source else \
        dataclasses.replace(PRESETS[cfg.model], vocab_size=tokenizer.vocab_size)
    prepared = data.prepare(cfg.data, tokenizer, cfg.cache_dir, cfg.seq_len, cfg.val_fraction, cfg.val_data, cfg.text_documents,
                            cfg.train_on_input, cfg.chat_template, say, signals.raise_if_received)
    if prepared.meta["max_token"] >= config.vocab_size:
        raise data.DataError(f"the tokenizer makes token {prepared.meta['max_token']}, but the model's vocabulary ends at {config.vocab_size - 1}")
    val_shards = prepared.rows("val")
    if not val_shards:
        say("note: no document fell to validation, so there will be no validation loss (--val_fraction, --val_data)")
    chat = "chat documents" in prepared.meta["counts"]
    rows_per_step = cfg.batch_size * cfg.gradient_accumulation_steps
    max_steps = cfg.max_steps if cfg.max_steps is not None else max(1, math.ceil(cfg.epochs * prepared.meta["rows"]["train"] / rows_per_step))
    limits = memory_limits(cfg, device)
    as_run = dataclasses.replace(cfg, state_resident_gb=forecast.resident_gb(cfg, config, limits[0]))
    plan = {"rows": rows_per_step, "tokens": rows_per_step * cfg.seq_len, "max_steps": max_steps, "as_run": as_run}
    if folder and state.get("fingerprint") != prepared.meta["fingerprint"]:
        say("warning: the data differs from what the checkpoint was trained on: starting at its first row")
        state["consumed"] = 0
    problem = forecast.verdict(as_run, config, *limits)
    if problem:
        raise configurator.ConfigError(problem)

    weights = folder or source
    if cfg.eval_only:
        if not val_shards:
            raise configurator.ConfigError("there is nothing to validate on; give --val_data or a --val_fraction")
        model = make_model(cfg, config, device, weights, say)
        loss = evaluate(model, val_shards, cfg, device, signals.raise_if_received)
        say(f"val loss {loss:.4f} | perplexity {math.exp(min(loss, 700)):.2f}")
        return 0
    saves = min(cfg.keep_checkpoints + 1, 1 + (max_steps // cfg.save_every if cfg.save_every else 0))
    n_params = forecast.n_params(config)
    size = n_params * (forecast.element_bytes(cfg) + (3 if cfg.master == "residual" else 2))
    checkpoint.check_disk(cfg.out_dir, saves * size, f"room for {saves} checkpoint{'s' * (saves > 1)}")
    if cfg.export:
        place = os.path.dirname(os.path.abspath(cfg.export))
        os.makedirs(place, exist_ok=True)
        same_disk = os.stat(place).st_dev == os.stat(cfg.out_dir).st_dev
        checkpoint.check_disk(place, n_params * getattr(torch, cfg.export_dtype).itemsize + saves * size * same_disk,
                              "the export" + " with the checkpoints" * same_disk)
    model = make_model(cfg, config, device, weights, say)
    optimizer = make_optimizer(cfg, model, limits[0])
    if folder:
        checkpoint.load_optimizer(optimizer, folder, state)
    compile_blocks(cfg, model, device, say)
    run_layer, offloader = make_run_layer(cfg, model)
    loader = data.Loader(prepared.rows("train"), cfg.batch_size, cfg.seed, consumed=state["consumed"])
    checkpoint.write_json(os.path.join(cfg.out_dir, "config.json"), dataclasses.asdict(cfg))
    checkpoint.write_json(os.path.join(cfg.out_dir, "forecast.json"), forecast.needs(as_run, config, device.type == "cuda"))
    start_page(cfg, config, prepared, plan, device, state["step"], origin, limits)
    metrics = monitor.Metrics(cfg, state["step"])

    peak = monitor.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    step, tokens, first_loss, val_loss = state["step"], state["tokens"], None, math.nan
    best, validated_at, saved_at = state["best"], state["validated_at"], step if folder else None
    skipped, spike = 0, monitor.Spike()
    window_ms, rates = [], []  # of the steps since the last log line
    fresh = True  # the first step warms up and compiles: it is logged, but not counted in tok/s

    def save():
        nonlocal saved_at, best
        optimizer.catch_up()
        is_best = cfg.keep_best and validated_at == step and val_loss < best
        best = val_loss if is_best else best
        now = {"step": step, "consumed": loader.consumed, "tokens": tokens, "fingerprint": prepared.meta["fingerprint"],
               "tokenizer": tokenizer.digest, "chat": chat, "settings": dataclasses.asdict(cfg), "validated_at": validated_at}
        start = time.time()
        checkpoint.save(cfg.out_dir, model, optimizer, now | ({"best": best} if math.isfinite(best) else {}), cfg.keep_checkpoints, is_best)
        saved_at = step
        say(f"saved {cfg.out_dir}/step_{step:06d} in {time.time() - start:.1f} s{', the best so far' if is_best else ''}")

    while True:
        out_of_time = cfg.max_hours and time.time() - began > 3600 * cfg.max_hours
        last_step = step >= max_steps or signals.received or out_of_time
        # once in a while, and at the end: validate, save
        if val_shards and not signals.received and validated_at != step and (last_step or (cfg.eval_every and step % cfg.eval_every == 0)):
            optimizer.catch_up()
            val_loss = evaluate(model, val_shards, cfg, device, lambda: signals.received)
            if not signals.received:
                validated_at = step
                metrics.write(step=step, val_loss=val_loss)
                say(f"step {step:6d}/{max_steps} | val loss {val_loss:.4f} | perplexity {math.exp(min(val_loss, 700)):.2f}")
        if saved_at != step and (last_step or (cfg.save_every and step and step % cfg.save_every == 0)):
            save()
        if last_step:
            optimizer.catch_up()
            break

        # -- one step --------------------------------------------------------
        start = time.perf_counter()
        batches = [loader.next() for _ in range(cfg.gradient_accumulation_steps)]
        supervised = sum(len(b.targets) for b in batches)
        if supervised == 0:
            say(f"warning: rows {[r for b in batches for r in b.rows]} hold nothing to learn: no step taken")
            continue
        lr = optim.schedule(step, max_steps, cfg.warmup_steps, cfg.learning_rate, cfg.min_lr, cfg.lr_schedule)
        metering = cfg.meter_every and (step + 1) % cfg.meter_every == 0
        optimizer.metering = bool(metering)
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
        except torch.OutOfMemoryError as error:
            if saved_at != step and step > state["step"]:
                save()
            raise RunError(out_of_memory(error, as_run, config, limits, f"step {step + 1}", saved_at)) from None
        grad_norm = norm.item()
        ms = 1000 * (time.perf_counter() - start)
        # --------------------------------------------------------------------

        if not math.isfinite(grad_norm):
            save()
            raise RunError(f"step {step + 1}: the gradient of {optimizer.worst()} is not finite, rows {[r for b in batches for r in b.rows]}; "
                           "from there on nothing was updated, but blocks above it are one step ahead (--grad_clip finds it before any)")
        step += 1
        tokens += plan["tokens"]
        first_loss = first_loss if first_loss is not None else loss
        if spike(loss):
            say(f"warning: the loss of step {step} stands out: {loss:.4f}, the ones before it were about {spike.mean:.4f}; "
                f"rows {[r for b in batches for r in b.rows]}")
        if not fresh:
            window_ms.append(ms)
        mean_ms = sum(window_ms) / len(window_ms) if window_ms else ms
        rate = plan["tokens"] / mean_ms * 1000
        eta = time.strftime("%H:%M:%S", time.gmtime((max_steps - step) * mean_ms / 1000))
        if cfg.log_every and (step % cfg.log_every == 0 or fresh or step == max_steps):
            mfu = f" | mfu {100 * rate * monitor.flops_per_token(n_params, config, cfg.seq_len) / peak:4.1f} %" if peak else ""
            gpu = f" | gpu {monitor.peak_gpu_gb(device):5.2f} GB" if device.type == "cuda" else ""
            say(f"step {step:6d}/{max_steps} | loss {loss:.4f} | norm {grad_norm:.3f} | lr {lr:.2e} | {mean_ms:7.0f} ms | "
                f"{rate:7,.0f} tok/s{mfu}{gpu} | host {monitor.host_gb():5.2f} GB | eta {eta}{' (first step)' if fresh else ''}")
            metrics.write(step=step, loss=loss, lr=lr, grad_norm=grad_norm, ms=round(mean_ms, 3), tok_s=round(rate, 1),
                          gpu_gb=monitor.peak_gpu_gb(device), host_gb=monitor.host_gb(), tokens=tokens, supervised_tokens=supervised,
                          **({"offloaded_bytes": offloader.packed_bytes} if offloader else {}))
            rates += [rate] * bool(window_ms)
            window_ms = []
        else:
            console.live(f"step {step}/{max_steps} | loss {loss:.4f} | {rate:,.0f} tok/s | eta {eta}")
        if metering:
            measured = optimizer.meter()
            metrics.write(step=step, **measured)
            say("         " + "; ".join(f"{kind}: update/weight {m['ratio']:.1e}, {100 * m['kept']:.0f} % of it arrived, "
                                        f"{100 * m['unchanged']:.0f} % of weights unchanged" for kind, m in measured.items()))
        if offloader:
            offloader.packed = offloader.packed_bytes = 0
        fresh = False

    metrics.close()
    if signals.received:
        say(f"interrupted after step {step}; go on with --resume")
        return 130 if signals.received == signal.SIGINT else 0
    if step < max_steps:
        say(f"stopped after {cfg.max_hours:g} hours, at step {step}; go on with --resume")
        return 0
    if first_loss is not None:
        say(f"\ndone: {step:,} steps, {tokens:,} tokens, loss {first_loss:.4f} -> {loss:.4f}"
            + (f", validation {val_loss:.4f}" if not math.isnan(val_loss) else "")
            + (f"; {sorted(rates)[len(rates) // 2]:,.0f} tok/s" if rates else ""))
        expected = {place: sum(kinds.values()) / 1e9 for place, kinds in forecast.needs(as_run, config, device.type == "cuda").items()}
        measured = {"gpu": monitor.peak_gpu_gb(device), "host": monitor.host_gb()}
        say("memory at most: " + ", ".join(f"{p} {measured[p]:.2f} GB (expected {expected[p]:.2f})" for p in measured if expected[p]))
    if cfg.export:
        specials = checkpoint.special_ids(tokenizer, chat)
        exact = optimizer.exact if cfg.master == "residual" and cfg.export_dtype == "float32" else None
        checkpoint.export(model, cfg.export, source, tokenizer_source, specials,
                          getattr(torch, cfg.export_dtype), exact, say)
        say(f"exported {cfg.export}")
    if cfg.sample_tokens:
        say(f"\na sample: {cfg.sample_prompt}")
        for piece in sample.stream(model, tokenizer, sample.prompt_ids(cfg.sample_prompt, tokenizer, chat), cfg.sample_tokens, seed=cfg.seed):
            console.write(piece)
        say(f"\n\nmore with: python sample.py {cfg.out_dir} --prompt='...'")
    return 0


def said(error) -> str:
    """The first two sentences of PyTorch's message."""
    return ". ".join(" ".join(str(error).split()).split(". ")[:2]).rstrip(".")


def out_of_memory(error, cfg, config, limits, when: str, saved_at) -> str:
    """What to say when the GPU is full after all: the forecast, and the next smaller settings."""
    for line in forecast.table(cfg, config, *limits):
        print(line, file=sys.stderr)
    total = sum(forecast.needs(cfg, config)["gpu"].values())
    smaller = forecast.nearest_fit(cfg, config, total - 1, None) or {}
    return (f"{when}: the GPU is out of memory ({said(error)}); "
            f"try {' '.join(f'--{k}={v}' for k, v in smaller.items())}"
            + (f" --resume; the checkpoint of step {saved_at} is whole, but blocks whose update had begun are one step ahead in it"
               if saved_at is not None else ""))


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal can't show
    if any(a in ("-h", "--help") for a in argv):
        print(__doc__.strip(), "\n", configurator.help_text(Config), sep="\n")
        return 0
    try:
        return run(*configurator.parse(Config, argv))
    except configurator.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RunError, optim.GradientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"error: the GPU is out of memory ({said(error)}); lower --batch_size, --state_resident_gb or "
              "--state_buffer_gb, or raise --gradient_accumulation_steps; checkpoints are intact", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first step", file=sys.stderr)
        return 130


if __name__ == "__main__":
    configurator.command(main)
