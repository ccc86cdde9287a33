"""The arguments of ``headwater cache``; what the actions do is in ``cache_folder``,
``cache_explain`` and ``cache_advise``, imported when one of them is chosen.
"""

from __future__ import annotations

import argparse

from headwater.app.arguments import (
    CommandParser,
    Commands,
    Run,
    add_command,
    add_group,
    add_settings,
    finish,
    settings_from,
)


def add(commands: Commands) -> None:
    actions = add_group(
        commands, "cache", "Look at a folder of kept KV, or tidy it; servers may go on using it."
    )
    stats = _add(actions, "stats", "What is kept: by model, tenant, class and day.", _cache_stats)
    verify = _add(actions, "verify", "Read every record and check it.", _cache_verify)
    verify.add_argument("--drop-damaged", action="store_true", help="remove what is damaged")
    purge = _add(actions, "purge", "Remove what fits all that is given.", _cache_purge)
    purge.add_argument("--tenant", default=None, metavar="NAME", help="with all its salts")
    purge.add_argument(
        "--fingerprint",
        default=None,
        metavar="TEXT",
        help="of a model, whole, as stats --json has it",
    )
    purge.add_argument(
        "--unused-days", type=float, default=None, metavar="DAYS", help="not used for so long"
    )
    purge.add_argument("--all", action="store_true", help="everything; needs --yes")
    purge.add_argument("--yes", action="store_true", help="yes, really everything")
    top = _add(actions, "top", "The records that are used most.", _cache_top)
    top.add_argument("-n", type=int, default=20, metavar="N", help="how many [20]")
    for action in (stats, verify, purge, top):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")
        add_settings(action, ("cache.cache_dir",))
        finish(action)
    _add_explain(actions)
    advise = _add(actions, "advise", "Which habits of a client cost hits.", _cache_advise, " LOG")
    advise.late = _add_advise_arguments


def _add(
    actions: Commands, name: str, summary: str, run: Run, more_usage: str = ""
) -> CommandParser:
    usage = f"cache {name} [options]{more_usage}"
    return add_command(actions, name, summary, run, usage=usage)


def _add_explain(actions: Commands) -> None:
    summary = "How much of a request is kept, and why not more. For the operator."
    explain = _add(actions, "explain", summary, _cache_explain, " FILE")
    explain.add_argument(
        "file", metavar="FILE", help="JSON body of a call in any dialect; - is standard input"
    )
    explain.add_argument(
        "--dialect",
        choices=("chat", "responses", "messages", "completions"),
        default=None,
        help="of the body [told from its fields]",
    )
    explain.add_argument(
        "--tenant",
        default=None,
        metavar="NAME",
        help="only what a call of this key meets, with the body's cache_salt [all tenants]",
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_settings(explain, ("cache.cache_dir", "model.model", "recipe", "engine.block_tokens"))
    finish(explain)


def _cache_stats(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import cache_folder

    return cache_folder.run_stats(settings, as_json=arguments.json)


def _cache_verify(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import cache_folder

    return cache_folder.run_verify(
        settings, drop_damaged=arguments.drop_damaged, as_json=arguments.json
    )


def _cache_purge(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import cache_folder

    return cache_folder.run_purge(
        settings,
        tenant=arguments.tenant,
        fingerprint=arguments.fingerprint,
        unused_days=arguments.unused_days,
        everything=arguments.all,
        is_sure=arguments.yes,
        as_json=arguments.json,
    )


def _cache_top(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import cache_folder

    return cache_folder.run_top(settings, num_shown=arguments.n, as_json=arguments.json)


def _cache_explain(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments)
    from headwater.app import cache_explain

    return cache_explain.run(
        settings,
        arguments.file,
        dialect=arguments.dialect,
        tenant=arguments.tenant,
        as_json=arguments.json,
    )


def _add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    from headwater.app import cache_advise

    cache_advise.add_arguments(parser)


def _cache_advise(arguments: argparse.Namespace) -> int:
    from headwater.app import cache_advise

    return cache_advise.run(arguments)
