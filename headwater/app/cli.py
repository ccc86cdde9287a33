"""The ``headwater`` command: serve, chat, doctor, bench, recipe, worker.

Turns arguments into settings and calls one function; imports that function's
module only then, so ``--help`` and ``--version`` never load torch. An error
that Headwater raised on purpose becomes one line on stderr and exit code 2;
anything else keeps its traceback, because it is our bug.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from headwater import __version__
from headwater.app.options import Setting, nearest
from headwater.app.settings import (
    SETTINGS,
    WORKER_SETTINGS,
    Settings,
    chosen_settings,
    load_settings,
    read_environment,
)
from headwater.app.target import Target
from headwater.core.errors import ConfigError, HeadwaterError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
CLIENT_KEY_ENV = "HEADWATER_API_KEY"
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = build_parser()
    try:
        arguments = parse_arguments(parser, sys.argv[1:] if argv is None else argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except HeadwaterError as error:
        print(f"headwater: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Like ``parse_args``, but an unknown flag names the nearest known one."""
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        word = rest[0].partition("=")[0]
        raise ConfigError(f"unknown argument {word}{nearest(word, arguments.known_flags)}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwater",
        description="Serve language models on the hardware you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_chat(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_recipe(commands)
    _add_worker(commands)
    return parser


# argparse keeps this class private; only its name is needed here.
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_command(
    commands: _Commands, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        allow_abbrev=False,
        # The generated line would name every setting before the help explains one.
        usage=f"headwater {name} [options]",
    )
    parser.set_defaults(command=run)
    return parser


def _finish(parser: argparse.ArgumentParser) -> None:
    """Remember the command's flags, to name the nearest one of a misspelt flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(known_flags=flags)


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """One flag per setting of ``names``; absent flags leave no trace in the namespace."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=None, help="TOML file with settings"
    )
    for group, settings in itertools.groupby(chosen_settings(names), lambda item: item.group):
        section = parser.add_argument_group(f"{group} settings")
        for setting in settings:
            _add_setting(section, setting)


def _add_setting(section: argparse._ArgumentGroup, setting: Setting) -> None:
    shown = setting.show(setting.default).replace("%", "%%")
    text = f"{setting.option.help.replace('%', '%%')} [{setting.env}; default: {shown}]"
    if setting.kind is bool:
        section.add_argument(
            setting.flag,
            action=argparse.BooleanOptionalAction,
            dest=setting.name,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        # Values stay text: `settings` converts and checks them as for every source.
        metavar = "|".join(setting.choices) or setting.kind.__name__.upper()
        action = "append" if setting.kind is tuple else "store"
        metavar = "TEXT" if metavar in ("STR", "TUPLE") else metavar
        section.add_argument(
            setting.flag,
            action=action,
            metavar=metavar,
            dest=setting.name,
            default=argparse.SUPPRESS,
            help=text,
        )


def settings_from(arguments: argparse.Namespace) -> Settings:
    names = {setting.name for setting in SETTINGS}
    flags = {name: value for name, value in vars(arguments).items() if name in names}
    return load_settings(flags, read_environment(), arguments.config)


def _add_serve(commands: _Commands) -> None:
    parser = _add_command(commands, "serve", "Start the server.", _serve)
    _add_settings(parser, ("server", "model", "recipe", "engine", "router", "worker"))
    _finish(parser)


def _serve(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import launch

    return launch.serve(settings)


def _add_worker(commands: _Commands) -> None:
    parser = _add_command(
        commands, "worker", "Start one worker process; `serve` does this itself.", _worker
    )
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="the front's address")
    parser.add_argument("--worker-id", required=True, metavar="ID", help="unique per front")
    _add_settings(parser, WORKER_SETTINGS)
    _finish(parser)


def _worker(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import worker_process

    return worker_process.run(settings, connect=arguments.connect, worker_id=arguments.worker_id)


def _add_doctor(commands: _Commands) -> None:
    parser = _add_command(
        commands, "doctor", "Show what would run here, how, and what would not.", _doctor
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--measure", action="store_true", help="also measure memory and GEMM rates (3 s)"
    )
    _add_settings(parser, ("server", "model", "engine"))
    _finish(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import doctor

    return doctor.run(settings, as_json=arguments.json, measure=arguments.measure)


def _add_client(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"base URL of any OpenAI-compatible server [{DEFAULT_URL}]",
    )
    parser.add_argument("--model", default=None, help="model name [the first that is served]")
    parser.add_argument(
        "--api-key", default=None, metavar="KEY", help=f"[{CLIENT_KEY_ENV}, its first key]"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="longest silence [600]"
    )


def _client_target(arguments: argparse.Namespace) -> Target:
    key = arguments.api_key or read_environment().get(CLIENT_KEY_ENV, "").partition(",")[0]
    return Target(
        base_url=arguments.url.rstrip("/"),
        model=arguments.model,
        api_key=key or None,
        timeout_s=arguments.timeout,
    )


def _add_chat(commands: _Commands) -> None:
    parser = _add_command(commands, "chat", "Talk to a running server in the terminal.", _chat)
    parser.usage = "headwater chat [options] [question]"
    parser.add_argument("question", nargs="*", help="ask once and exit; else read a dialogue")
    _add_client(parser)
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    parser.add_argument("--seed", type=int, default=None)
    _finish(parser)


def _chat(arguments: argparse.Namespace) -> int:
    from headwater.app import chat

    options = chat.ChatOptions(
        target=_client_target(arguments),
        system=arguments.system,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )
    return chat.run(options, " ".join(arguments.question) or None)


def _add_bench(commands: _Commands) -> None:
    parser = _add_command(
        commands, "bench", "Measure any OpenAI-compatible server under load.", _bench
    )
    _add_client(parser)
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument(
        "--prompt",
        choices=("text", "ids"),
        default="text",
        help="text: random words; ids: random token ids (completions only) [text]",
    )
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="measured [32]")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="not measured [2]")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=int, default=4, metavar="N", help="at once [4]")
    pace.add_argument(
        "--rate", type=float, default=None, metavar="PER_S", help="start so many a second"
    )
    parser.add_argument("--input-tokens", type=int, default=256, metavar="N", help="[256]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="[128]")
    parser.add_argument(
        "--shared-prefix",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of each prompt that is the same in all, 0 to 1 [0]",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=32_000,
        metavar="N",
        help="ids are drawn below this, for --prompt ids [32000]",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send ignore_eos, so that answers have the full length; "
        "switch off for servers that refuse the field [on]",
    )
    parser.add_argument("--seed", type=int, default=0, help="prompts and arrivals [0]")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write JSON")
    _finish(parser)


def _bench(arguments: argparse.Namespace) -> int:
    from headwater.app import bench, load

    options = load.LoadOptions(
        target=_client_target(arguments),
        endpoint=arguments.endpoint,
        prompt_kind=arguments.prompt,
        num_requests=arguments.requests,
        num_warmup=arguments.warmup,
        concurrency=arguments.concurrency,
        rate_per_s=arguments.rate,
        num_input_tokens=arguments.input_tokens,
        num_output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
        ignore_end=arguments.ignore_eos,
    )
    return bench.run(options, arguments.json)


def _add_recipe(commands: _Commands) -> None:
    summary = "Look at how a model is spoken to."
    parser = commands.add_parser("recipe", help=summary, description=summary, allow_abbrev=False)
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = _add_command(actions, "show", "Print the exact tokens of a conversation.", _recipe_show)
    show.usage = "headwater recipe show [options] [FILE]"
    show.add_argument(
        "file",
        nargs="?",
        default=None,
        metavar="FILE",
        help="JSON body of a chat call, or its messages; - is standard input [a demonstration]",
    )
    show.add_argument("--model", default="smollm2", metavar="NAME", help="as for serve [smollm2]")
    show.add_argument(
        "--naive",
        action="store_true",
        help="beside it, what a server makes of the text that trusts every control token in it",
    )
    _finish(show)


def _recipe_show(arguments: argparse.Namespace) -> int:
    from headwater.app import recipe_show

    return recipe_show.run(arguments.model, arguments.file, naive=arguments.naive)


if __name__ == "__main__":
    sys.exit(main())
