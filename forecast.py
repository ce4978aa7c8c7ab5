"""
What a run will need, before it starts: bytes by kind on the GPU, on the host and over PCIe, and time per step.

    python train.py CONFIG --dry_run=true --gpu_gb=24 --host_gb=64

Sizes follow from shapes alone, so no GPU is needed to ask. The constants at the top are what was measured on one.
"""

import dataclasses
import textwrap
from dataclasses import dataclass

from model import ModelConfig
from offload import FFN_TOKENS
from optim import PARKING

GiB = 2 ** 30
CUDA_CONTEXT = int(1.2e9)  # on the GPU beside tensors: context, kernels, cuBLAS workspaces, the allocator's slack
BARE_CONTEXT = int(0.5e9)  # of that, what is taken as soon as the GPU is asked anything
PROCESS = int(2.0e9)       # on the host beside what is counted: Python, torch, CUDA's libraries
COMPILER = int(0.5e9)      # and with compile=True
PROCESS_CPU = int(0.5e9)   # the same without a GPU
STATE_SPEED = 190e9        # parameters per second that the update kernel steps on a card with 4.8 TB/s
KEEP_FREE = int(0.3e9)     # of the GPU, when leftover memory is given to optimizer states


@dataclass
class Card:
    """bf16 FLOP/s of matrix products within a step, GPU memory bandwidth and PCIe bandwidth each way, bytes/s."""
    name: str
    flops: float
    memory: float
    pcie: float


# the H200's row was measured; the others are 85 % of the data sheets' dense bf16 rate with fp32 accumulation
CARDS = [Card("RTX 3090", 60e12, 0.94e12, 20e9), Card("RTX 4090", 140e12, 1.01e12, 20e9), Card("RTX 5090", 178e12, 1.79e12, 40e9),
         Card("A100", 265e12, 1.6e12, 20e9), Card("H100", 600e12, 3.35e12, 45e9), Card("H200", 640e12, 4.8e12, 49e9)]


def card_named(name: str) -> Card | None:
    return next((c for c in CARDS if c.name in name), None)


def block_params(config: ModelConfig) -> int:
    """Parameters of one block's matrices."""
    attention = config.dim * (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    return attention + 3 * config.dim * config.ffn_dim


def n_params(config: ModelConfig) -> int:
    tables = 1 if config.tie_word_embeddings else 2
    return config.n_layers * (block_params(config) + 2 * config.dim) + tables * config.vocab_size * config.dim + config.dim


def element_bytes(cfg) -> int:
    """Bytes of one weight or activation."""
    return 2 if cfg.dtype == "bfloat16" else 4


def recomputed(cfg, config: ModelConfig) -> list[int]:
    """Numbers of the blocks that run again in backward, spread evenly."""
    share = cfg.recompute if cfg.activation_checkpointing else 0.0
    return [i for i in range(config.n_layers) if int((i + 1) * share + 1e-9) > int(i * share + 1e-9)]


def kept_width(config: ModelConfig) -> int:
    """Numbers a token that a block saves for backward if it is not run again: around norms and products, q, k, v, and in w1, w3, w2."""
    return 4 * config.dim + 2 * (config.n_heads + config.n_kv_heads) * config.head_dim + 3 * config.ffn_dim


def saved_bytes(cfg, config: ModelConfig, again: bool) -> int:
    """What a block saves for backward, over all micro-batches: its inputs if it runs again, else its activations."""
    width = config.dim if again else kept_width(config)
    return cfg.batch_size * cfg.seq_len * cfg.gradient_accumulation_steps * width * element_bytes(cfg)


def moving_bytes(cfg, config: ModelConfig) -> int:
    """Offloaded activations on the GPU on their way back at one time (and out, if blocks are kept): a block's, or 0.7 GB."""
    inputs = saved_bytes(cfg, config, True)
    if len(recomputed(cfg, config)) == config.n_layers:
        return inputs
    return min(saved_bytes(cfg, config, False), max(int(0.7e9), inputs))


def needs(cfg, config: ModelConfig, cuda: bool = True) -> dict[str, dict[str, int]]:
    """
    Bytes by kind: {'gpu': {...}, 'host': {...}, 'pcie': {...}} (pcie: bytes a step, the larger of the two ways).
    Without a GPU everything is under 'host'.
    """
    params, size = n_params(config), element_bytes(cfg)
    tokens = cfg.batch_size * cfg.seq_len                                  # of one micro-batch
    micro = cfg.gradient_accumulation_steps
    row = tokens * config.dim * size                                       # one [B, T, C]
    rows = row * micro                                                     # one of every micro-batch
    head, block = config.vocab_size * config.dim, block_params(config)
    paged = cfg.optimizer == "adam8bit"
    parked = params * size if paged and cfg.grad_clip else 0
    states = {"adam8bit": params * 2 + params // 32 + (params if cfg.master == "residual" else 0), "adamw": params * 2 * size,
              "bnb_paged_adamw8bit": params * 2 + params // 32}[cfg.optimizer]
    resident = min(states + parked, int((cfg.state_resident_gb or 0) * 1e9)) if paged and cuda else 0
    # the fullest moment is in the head (its gradient in fp32, a chunk's logits and their gradient) or in a block's backward
    vocab_chunk = min(cfg.loss_chunk, tokens) * config.vocab_size
    in_head = 4 * head + vocab_chunk * (4 + size if cuda else 16) + 2 * rows + 3 * row  # the loss is compiled on GPUs only
    again = len(recomputed(cfg, config))
    in_block = block * (size + (4 if micro > 1 or tokens > FFN_TOKENS else 0)) + 3 * rows + 4 * row
    if again:
        in_block += size * (5 + (micro > 1)) * config.ffn_dim * min(tokens, FFN_TOKENS)
    if not cuda or cfg.dtype != "bfloat16":                                # attention through a mask
        in_block += tokens * cfg.seq_len * (1 + 4 * config.n_heads)
    if again < config.n_layers and cfg.activation_offloading and cuda:
        in_head, in_block = (n + moving_bytes(cfg, config) for n in (in_head, in_block))
    if parked:
        in_block += min(parked, PARKING)                                   # gradients on their way out
    every = params * size if cfg.optimizer == "adamw" else 0               # torch's AdamW needs all gradients at once
    kept = again * saved_bytes(cfg, config, True) + (config.n_layers - again) * saved_bytes(cfg, config, False)
    gpu = {"weights": params * size, "gradients and working memory, at the fullest": max(in_head, in_block + every)}
    host = {"optimizer states": states - resident} | ({"parked gradients": parked} if parked else {})
    if not paged:
        gpu["optimizer states"] = host.pop("optimizer states")
    elif cuda:
        gpu["optimizer states on their way"] = min(states + parked - resident, int(cfg.state_buffer_gb * 1e9))
        gpu["optimizer states that stay"] = resident
    (host if cfg.activation_offloading else gpu)["blocks' inputs" if again == config.n_layers else "activations"] = kept
    host["process"] = PROCESS + COMPILER * cfg.compile if cuda else PROCESS_CPU
    pcie = {"optimizer states": states - resident if paged else 0, "activations": kept if cfg.activation_offloading else 0,
            "parked gradients": parked}
    if not cuda:
        merged = {k: gpu.get(k, 0) + host.get(k, 0) for k in gpu | host}
        return {"gpu": {}, "host": merged, "pcie": {}}
    # fp32 sums among bf16 gradients leave holes, of a block's gradients about
    gpu["CUDA context and library workspaces"] = CUDA_CONTEXT + block * size * (micro > 1)
    return {"gpu": gpu, "host": host, "pcie": pcie}


def step_seconds(cfg, config: ModelConfig, card: Card) -> dict[str, float]:
    """
    Seconds a step: matrix products and attention, work bound by the card's memory, the optimizer's kernel; and beside
    them PCIe.
    """
    tokens = cfg.batch_size * cfg.seq_len * cfg.gradient_accumulation_steps
    table = config.vocab_size * config.dim
    block, last = block_params(config), config.dim * config.ffn_dim
    again = 2 * (block - last) * len(recomputed(cfg, config)) / config.n_layers  # without the block's last product
    attention = 4 * config.n_heads * config.head_dim * min(cfg.seq_len, 512) / 2 * 3.5
    flops = tokens * (6 * table + config.n_layers * (6 * block + again + attention))
    size = element_bytes(cfg)
    width = kept_width(config) + 2 * config.ffn_dim + 4 * config.dim
    traffic = config.n_layers * 4 * tokens * width * size  # activations, written and read, forward and backward
    if cfg.gradient_accumulation_steps > 1:
        traffic += config.n_layers * cfg.gradient_accumulation_steps * block * (8 + size)  # fp32 sums of gradients
    update = n_params(config) / STATE_SPEED * (4.8e12 / card.memory if cfg.optimizer == "adam8bit" else 8)
    return {"products": flops / card.flops, "memory": traffic / (0.7 * card.memory), "update": update,
            "pcie": sum(needs(cfg, config)["pcie"].values()) / card.pcie}


def resident_gb(cfg, config: ModelConfig, gpu_bytes: int | None) -> float:
    """GB of optimizer state to keep on a GPU with gpu_bytes for this process: state_resident_gb, or what is left over."""
    if cfg.state_resident_gb is not None or gpu_bytes is None or cfg.optimizer != "adam8bit":
        return cfg.state_resident_gb or 0.0
    without = needs(dataclasses.replace(cfg, state_resident_gb=0.0), config)
    left = gpu_bytes - KEEP_FREE - sum(without["gpu"].values())
    return max(0.0, min(left, without["host"]["optimizer states"] + without["host"].get("parked gradients", 0)) / 1e9)


def lacking(cfg, config: ModelConfig, gpu_bytes: int | None, host_bytes: int | None) -> str:
    """'gpu' or 'host', whichever is too small for the run, or ''."""
    found = needs(cfg, config, cuda=gpu_bytes is not None)
    if gpu_bytes is not None and sum(found["gpu"].values()) > gpu_bytes:
        return "gpu"
    return "host" if host_bytes is not None and sum(found["host"].values()) > host_bytes else ""


def nearest_fit(cfg, config: ModelConfig, gpu_bytes: int | None, host_bytes: int | None):
    """The settings nearest to cfg that fit, as {name: value} of what changes; None if nothing was found that does."""
    now, half = cfg, lambda n: max(1, n // 2)
    for _ in range(40):
        short = lacking(now, config, gpu_bytes, host_bytes)
        if not short:
            return {k: v for k, v in dataclasses.asdict(now).items() if v != getattr(cfg, k)}
        again = half(now.batch_size)
        steps = {  # in this order: first what only costs time, then what changes the step
            "gpu": [dict(dtype="bfloat16"), dict(optimizer="adam8bit"), dict(activation_checkpointing=True, recompute=1.0),
                    dict(activation_offloading=True), dict(state_resident_gb=0.0),
                    dict(batch_size=again, gradient_accumulation_steps=now.gradient_accumulation_steps * now.batch_size // again),
                    dict(loss_chunk=min(now.loss_chunk, 256)), dict(state_buffer_gb=min(now.state_buffer_gb, 0.3)),
                    dict(gradient_accumulation_steps=half(now.gradient_accumulation_steps)), dict(seq_len=max(128, now.seq_len // 2))],
            "host": [dict(activation_checkpointing=True, recompute=1.0), dict(grad_clip=0.0), dict(master="none"),
                     dict(gradient_accumulation_steps=half(now.gradient_accumulation_steps)), dict(batch_size=again),
                     dict(seq_len=max(128, now.seq_len // 2))]}[short]
        change = next((s for s in steps if any(getattr(now, k) != v for k, v in s.items())), None)
        if change is None:
            return None
        now = dataclasses.replace(now, **change)
    return None


def table(cfg, config: ModelConfig, gpu_bytes: int | None, host_bytes: int | None, card: Card | None = None) -> list[str]:
    """The forecast as lines: a sum and its parts for each place, and what the machine has."""
    lines, have = [], {"gpu": gpu_bytes, "host": host_bytes}
    for place, kinds in needs(cfg, config, cuda=gpu_bytes is not None).items():
        total = sum(kinds.values())
        if total:
            of = f" of {have[place] / 1e9:.2f}" if have.get(place) else ""
            parts = ", ".join(f"{kind} {n / 1e9:.2f}" for kind, n in kinds.items() if n)
            line = f"{place:<8} {total / 1e9:.2f}{of} GB{' a step' if place == 'pcie' else ''}: {parts}"
            lines += textwrap.wrap(line, 120, subsequent_indent=" " * 11)
    if card:
        parts = step_seconds(cfg, config, card)
        total = max(sum(parts.values()) - parts["pcie"], parts["pcie"])
        tokens = cfg.batch_size * cfg.seq_len * cfg.gradient_accumulation_steps
        lines.append(f"{'time':<8} about {1000 * total:,.0f} ms a step, {tokens / total:,.0f} tok/s on an {card.name}: "
                     + ", ".join(f"{k} {1000 * v:,.0f}" for k, v in parts.items()))
    return lines


def verdict(cfg, config: ModelConfig, gpu_bytes: int | None, host_bytes: int | None) -> str:
    """'' if the run fits, else one line that says what is too small and the nearest settings that fit."""
    short = lacking(cfg, config, gpu_bytes, host_bytes)
    if not short:
        return ""
    have = {"gpu": gpu_bytes, "host": host_bytes}[short]
    found = sum(needs(cfg, config, cuda=gpu_bytes is not None)[short].values())
    change = nearest_fit(cfg, config, gpu_bytes, host_bytes)
    hint = "try " + " ".join(f"--{k}={v}" for k, v in change.items()) if change else "no settings were found that do"
    return f"{'GPU' if short == 'gpu' else 'host'} memory: {found / 1e9:.2f} GB are needed, {have / 1e9:.2f} GB are there; {hint}"


def host_available() -> int | None:
    """Bytes of memory that this process may still take, by /proc/meminfo and the control group; None if not known."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            found += [int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
                        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")):
        try:
            with open(limit, encoding="ascii") as a, open(used, encoding="ascii") as b:
                found.append(max(0, int(a.read()) - int(b.read())))
        except (OSError, ValueError):  # no such group, or 'max'
            continue
    return min(found, default=None)
