"""The ``headwater`` command: serve, chat, doctor, pools, bench, recipe, cache, eval, worker.

Turns arguments into settings and calls one function; imports that function's
module only then, so ``--help`` and ``--version`` never load torch. An error
that Headwater raised on purpose becomes one line on stderr and exit code 2;
anything else keeps its traceback, because it is our bug.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headwater import __version__
from headwater.app import cache_commands
from headwater.app.arguments import (
    CommandParser,
    Commands,
    add_command,
    add_group,
    add_settings,
    finish,
    settings_from,
)
from headwater.app.arguments import parse_arguments as parse_arguments
from headwater.app.settings import WORKER_SETTINGS, read_environment
from headwater.app.target import Target
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.fleet import Role

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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headwater",
        description="Serve language models on the hardware you have.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headwater {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    _add_serve(commands)
    _add_chat(commands)
    _add_doctor(commands)
    _add_pools(commands)
    _add_bench(commands)
    _add_recipe(commands)
    cache_commands.add(commands)
    _add_eval(commands)
    _add_worker(commands)
    return parser


def _add_serve(commands: Commands) -> None:
    parser = add_command(commands, "serve", "Start the server.", _serve)
    add_settings(
        parser, ("server", "model", "recipe", "engine", "cache", "router", "worker", "fleet")
    )
    finish(parser)


def _serve(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import launch

    return launch.serve(settings)


def _add_worker(commands: Commands) -> None:
    parser = add_command(
        commands, "worker", "Join a front with one worker; `serve` starts its own.", _worker
    )
    parser.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="the front: tcp://HOST:PORT"
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.BOTH.value,
        help="which part of a request it computes [both]",
    )
    parser.add_argument(
        "--worker-id", default=None, metavar="ID", help="its name in logs [host and process]"
    )
    parser.add_argument(
        "--once", action="store_true", help="end with the front, or when standard input closes"
    )
    add_settings(parser, WORKER_SETTINGS)
    finish(parser)


def _worker(arguments: argparse.Namespace) -> int:
    settings, connect, role = settings_from(arguments), arguments.connect, Role(arguments.role)
    from headwater.app import joined_worker, worker_process

    if not connect.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"--connect must be like tcp://HOST:PORT, got {connect!r}")
    name = arguments.worker_id or joined_worker.default_name()
    by_hand = joined_worker.is_remote(connect) and not arguments.once
    run = joined_worker.keep if by_hand else worker_process.run
    return run(settings, connect=connect, worker_id=name, role=role)


def _add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", "Show what would run here, how, and what would not.", _doctor
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--measure", action="store_true", help="also measure memory and GEMM rates (3 s)"
    )
    add_settings(parser, ("server", "model", "engine", "cache", "worker", "fleet"))
    finish(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import doctor

    return doctor.run(settings, as_json=arguments.json, measure=arguments.measure)


def _add_server(parser: argparse.ArgumentParser, *, of: str = "a Headwater server") -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"base URL of {of} [{DEFAULT_URL}]")
    parser.add_argument(
        "--api-key", default=None, metavar="KEY", help=f"[{CLIENT_KEY_ENV}, its first key]"
    )
    parser.set_defaults(model=None, timeout=30.0)


def _add_client(parser: argparse.ArgumentParser) -> None:
    _add_server(parser, of="any OpenAI-compatible server")
    parser.add_argument("--model", default=None, help="model name [the first that is served]")
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


def _add_chat(commands: Commands) -> None:
    parser = add_command(
        commands,
        "chat",
        "Talk to a running server in the terminal.",
        _chat,
        usage="chat [options] [question]",
    )
    parser.add_argument("question", nargs="*", help="ask once and exit; else read a dialogue")
    _add_client(parser)
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--max-tokens", type=int, default=None, help="longest answer")
    parser.add_argument("--seed", type=int, default=None)
    finish(parser)


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


def _add_pools(commands: Commands) -> None:
    parser = add_command(commands, "pools", "Show how busy a running server's workers are.", _pools)
    _add_server(parser)
    parser.add_argument(
        "--over", type=float, default=1.0, metavar="SECONDS", help="0: since its start [1]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    finish(parser)


def _pools(arguments: argparse.Namespace) -> int:
    from headwater.app import pools

    if not 0 <= arguments.over <= 3600:
        raise ConfigError(f"--over must be from 0 to 3600 seconds, got {arguments.over:g}")
    return pools.run(_client_target(arguments), over_s=arguments.over, as_json=arguments.json)


def _add_bench(commands: Commands) -> None:
    parser = add_command(
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
    finish(parser)


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


def _add_recipe(commands: Commands) -> None:
    actions = add_group(commands, "recipe", "Look at how a model is spoken to.")
    show = add_command(
        actions,
        "show",
        "Print the exact tokens of a conversation.",
        _recipe_show,
        usage="recipe show [options] [FILE]",
    )
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
    finish(show)


def _recipe_show(arguments: argparse.Namespace) -> int:
    from headwater.app import recipe_show

    return recipe_show.run(arguments.model, arguments.file, naive=arguments.naive)


def _add_eval(commands: Commands) -> None:
    actions = add_group(commands, "eval", "Measure what a setting does to the output's quality.")
    replay = add_command(
        actions,
        "replay",
        "What computing windows again on a hit costs, by hit length.",
        _eval_replay,
        usage="eval replay [options]",
    )
    replay.late = _add_replay_arguments


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    from headwater.app import eval_replay

    eval_replay.add_arguments(parser)
    add_settings(parser, ("model", "engine.threads"))


def _eval_replay(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import eval_replay

    return eval_replay.run(settings, eval_replay.options_from(arguments))


if __name__ == "__main__":
    sys.exit(main())
