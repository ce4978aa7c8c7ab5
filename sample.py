"""
Generate text with a finetuned model.

    python sample.py out --prompt='The "for" statement'      continue a text
    python sample.py weights/smollm2-135m-instruct           talk to it, where there is a terminal; or --prompt='...'

The first argument is a run folder or a folder with Llama weights. Whether it is talked to follows from what it was made
for: a run that learned conversations, a folder with a chat template. --chat decides otherwise.
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

import checkpoint
import configurator
import data
from model import KVCache, Llama


@torch.no_grad()
def stream(model: Llama, tokenizer, prompt: list[int], max_tokens: int, temperature=0.8, top_p=0.95, seed=0, stop=()):
    """
    Yields text piece by piece, sampled after the token ids of prompt until a stop id or max_tokens. temperature 0 is
    greedy; top_p keeps the most likely tokens that hold this probability together. Same seed, same text.
    """
    weight = model.tok_embeddings.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    caches = [KVCache(model.config, len(prompt) + max_tokens, weight) for _ in model.layers]
    tokens, pending = torch.tensor([prompt], device=weight.device), b""
    for _ in range(max_tokens):
        logits = model.logits(tokens, caches)[0, -1]
        logits[tokenizer.vocab_size:] = -torch.inf  # rows that only pad the table
        token = choose(logits, temperature, top_p, generator)
        if token in stop or token == tokenizer.end_of_text:
            break
        tokens = torch.tensor([[token]], device=weight.device)
        pending += tokenizer.decode_bytes([token])
        try:
            text, pending = pending.decode("utf-8"), b""
        except UnicodeDecodeError as error:  # a character may need several tokens
            if len(pending) - error.start < 4:
                continue
            text, pending = pending.decode("utf-8", errors="replace"), b""
        yield text


def prompt_ids(text, tokenizer, chat: bool) -> list[int]:
    """Token ids to continue: of a text, or with chat of a user's message or of (role, content, learn) turns."""
    if not chat:
        return [t for t in (tokenizer.bos,) if t is not None] + (tokenizer.encode(text) or [tokenizer.end_of_text] * (tokenizer.bos is None))
    ids = []
    for segment, _ in data.chat_segments([("user", text, False)] if isinstance(text, str) else text, tokenizer, reply=True):
        ids += tokenizer.encode(segment) if isinstance(segment, str) else [segment]
    return ids


def choose(logits: torch.Tensor, temperature: float, top_p: float, generator) -> int:
    """One token id from fp32 logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    probs, order = torch.softmax(logits / temperature, -1).sort(descending=True)
    probs[probs.cumsum(-1) - probs >= top_p] = 0  # the most likely token always stays
    return int(order[torch.multinomial(probs, 1, generator=generator)])


def load(path: str, device: str, dtype: str):
    """(model, tokenizer, whether it is made for conversations) from a run folder or a folder with weights."""
    settings_path = os.path.join(path, "config.json")
    settings = checkpoint.read_json(settings_path) if os.path.isfile(settings_path) else {}
    if "out_dir" in settings:  # a run folder: its config.json holds the run's settings
        folder = checkpoint.newest(path)
        chat = checkpoint.load_state(folder).get("chat", False)
        tokenizer = settings["tokenizer"] or ("byte" if settings["init_from"] == "scratch" else settings["init_from"])
    else:
        folder = tokenizer = path
        extra = os.path.join(path, "tokenizer_config.json")
        chat = os.path.isfile(os.path.join(path, "chat_template.jinja")) or (
            os.path.isfile(extra) and "chat_template" in checkpoint.read_json(extra))
    tokenizer = data.load_tokenizer(tokenizer)
    with torch.device("meta"):
        model = Llama(checkpoint.read_config(folder), getattr(torch, dtype))
    checkpoint.load_weights(model, folder, device)
    return model, tokenizer, chat


@dataclass
class Config:
    prompt: str = ""              # text to continue, or with chat the user's message
    chat: bool | None = None      # use the chat template; None: if the model was made for it
    system: str = ""              # system message of a chat
    max_tokens: int = 500         # at most this many new tokens
    temperature: float = 0.8      # 0: always the most likely token
    top_p: float = 0.95           # sample among the likeliest tokens that hold this probability
    seed: int = 0                 # same seed, same text
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: the GPU if there is one
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the weights


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal can't show
    if not argv or argv[0].startswith("-"):
        print(__doc__.strip(), "\n", configurator.help_text(Config), sep="\n")
        return 0 if "--help" in argv or "-h" in argv else 2
    try:
        cfg, _ = configurator.parse(Config, argv[1:])
        device = ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
        if not cfg.prompt and not sys.stdin.isatty():
            raise configurator.ConfigError("there is no terminal to talk on; give --prompt='...'")
        model, tokenizer, made_for_chat = load(argv[0], device, cfg.dtype)

        def reply(ids):
            text = ""
            for piece in stream(model, tokenizer, ids, cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.seed, (tokenizer.end_of_turn,)):
                print(piece, end="", flush=True)
                text += piece
            print()
            return text

        chat = [("system", cfg.system, False)] if cfg.system else []
        while True:
            question = cfg.prompt or input("> ")
            talk = made_for_chat if cfg.chat is None else cfg.chat
            chat.append(("user", question, False))
            answer = reply(prompt_ids(chat if talk else question, tokenizer, talk))
            chat.append(("assistant", answer, False))
            if cfg.prompt:
                return 0
    except configurator.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print()
        return 0


if __name__ == "__main__":
    configurator.command(main)
