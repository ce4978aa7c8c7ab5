"""
Settings: a dataclass declares them, Python files and flags override them.

    python train.py                                             the defaults
    python train.py config/llama3_8b_24gb.py --batch_size=4     a file, then a flag; the later one wins

A config file is plain Python: every name it leaves behind is a setting, except
modules and names that begin with an underscore (helpers). Files and flags pass
the same check: the name must exist and the value must fit the declared type
without loss, so 1e4 is fine for an int and 1.5 is not.
"""

import ast
import dataclasses
import difflib
import inspect
import os
import re
import runpy
import sys
import types
import typing


class UserError(Exception):
    """What a user can put right. The message is one line and not too long, whatever names and values it quotes."""

    def __init__(self, message: str):
        message = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", message)  # a file's names must not drive the terminal
        super().__init__(message if len(message) < 800 else f"{message[:500]} ... {message[-200:]}")


class ConfigError(UserError):
    """A mistake in the settings."""


def parse(config_class, argv: list[str]):
    """
    argv -> (an instance of config_class, {name: where its value came from}).
    Raises ConfigError for an unknown name, a wrong type or a file that can't be run.
    """
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    hints = typing.get_type_hints(config_class)
    values, origin = {}, {}

    def put(name, value, where, is_text):
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; --help lists all settings"
            raise ConfigError(f"{where}: unknown setting '{name}'{hint}")
        try:
            values[name] = cast(value, hints[name], is_text)
        except ValueError as error:
            raise ConfigError(f"{where}: '{name}' {error}") from None
        origin[name] = where if name not in origin else f"{where} (over {origin[name].split(' (over ')[0]})"

    for arg in argv:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            if not equals and hints.get(name) is bool:
                text = "true"                       # --resume is short for --resume=true
            elif not equals and name in fields:
                raise ConfigError(f"flag '{arg}': write it as --{name}=VALUE")
            put(name, text, f"flag '{arg}'", is_text=True)
        else:
            for name, value in run_file(arg).items():
                put(name, value, f"file '{arg}'", is_text=False)
    return config_class(**values), origin


def run_file(path: str) -> dict:
    """The settings that a config file sets; any error in the file becomes one line that names it."""
    if not path.endswith(".py"):
        raise ConfigError(f"argument '{path}': a config file ends in .py and a setting is written --name=value")
    if not os.path.exists(path):
        raise ConfigError(f"config file '{path}' does not exist")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:        # the file is the user's program: it can raise anything
        raise ConfigError(f"config file '{path}' failed: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return {k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def cast(value, hint, is_text: bool):
    """
    value as the declared type, or ValueError that says what was expected.
    is_text: the value is the raw text of a flag; otherwise a Python object from a file.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in options:
        if value is None or (is_text and value in ("None", "none", "null")):
            return None
        options = tuple(o for o in options if o is not type(None))
    kind = options[0]
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if isinstance(value, str) and value in choices:
            return value
        near = difflib.get_close_matches(shown(value).strip("'"), choices, n=1)
        raise ValueError(f"must be one of {', '.join(map(repr, choices))}, got {shown(value)}"
                         + (f"; did you mean '{near[0]}'?" if near else ""))
    expected = ValueError(f"expects {type_name(hint)}, got {shown(value)}")
    if kind is str:
        if not isinstance(value, str):
            raise expected
        return value
    if is_text:
        text = value.strip()
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise expected
            return text.lower() == "true"
        try:
            value = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            try:                                    # the spellings that are no Python literal: inf, nan
                value = float(text)
            except ValueError:
                raise expected from None
    if kind is bool:
        if not isinstance(value, bool):
            raise expected
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise expected                              # a bool is an int in Python, but not in a config
    if kind is int:
        if not -2 ** 63 <= value < 2 ** 63 or int(value) != value:
            raise expected
        return int(value)
    if abs(value) > sys.float_info.max or value != value:
        raise expected                              # inf, nan and integers beyond the range of a float
    return float(value)


def command(main):
    """Ends a script with main()'s exit code; quietly, as other tools end, when nobody reads its output any more (`| head`)."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        code = 128 + 13  # as if by SIGPIPE
    sys.exit(code)


def silence_stdout():
    """What is written from now on, and what Python still holds, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shown(value) -> str:
    """repr, where there is one: a file can make integers of 10,000 digits, very deep lists, and objects of its own."""
    try:
        return repr(value)
    except Exception:
        return f"what can't be printed, of type {type(value).__name__}"


def type_name(hint) -> str:
    """A type as people write it: int, float or None, 'a' or 'b'."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    args = typing.get_args(hint)
    if args:
        return " or ".join("None" if a is type(None) else type_name(a) for a in args)
    return hint.__name__


def help_text(config_class) -> str:
    """Every setting with its default and the comment that stands beside it in the source."""
    hints = typing.get_type_hints(config_class)
    defaults = {f.name: f.default for f in dataclasses.fields(config_class)}
    lines = []
    for line in inspect.getsource(config_class).splitlines():
        setting = re.match(r"\s+(\w+):[^#]*?(?:#\s*(.*))?$", line)
        if setting and setting[1] in defaults:
            value = f"--{setting[1]}={defaults[setting[1]]}"
            lines.append(f"  {value:<38} {setting[2] or ''} [{type_name(hints[setting[1]])}]")
        elif line.strip().startswith("# "):
            lines.append(f"\n{line.strip()[2:]}")
    return "\n".join(lines)
