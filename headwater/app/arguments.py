"""How commands take their arguments: settings as flags, and the nearest flag for a misspelt one.

Imports nothing heavy, so that ``--help`` is quick. Used by ``cli`` and ``cache_commands``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headwater.app.options import Setting, nearest
from headwater.app.settings import (
    SETTINGS,
    Settings,
    chosen_settings,
    load_settings,
    read_environment,
)
from headwater.core.errors import ConfigError

Run = Callable[[argparse.Namespace], int]
AddArguments = Callable[[argparse.ArgumentParser], None]


class CommandParser(argparse.ArgumentParser):
    """``late`` adds its arguments when the command is chosen: their module loads much."""

    late: AddArguments | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        late, self.late = self.late, None
        if late is not None:
            late(self)
            finish(self)
        return super().parse_known_args(args, namespace)


# argparse keeps this class private; only its name is needed here.
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def add_command(
    commands: Commands, name: str, summary: str, run: Run, *, usage: str | None = None
) -> CommandParser:
    """``usage`` is what follows ``headwater``; without it ``NAME [options]``."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        allow_abbrev=False,
        # The generated line would name every setting before the help explains one.
        usage=f"headwater {usage or f'{name} [options]'}",
    )
    parser.set_defaults(command=run)
    return parser


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """A command that only holds others: ``headwater NAME ACTION``."""
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    return parser.add_subparsers(
        title="actions", required=True, metavar="ACTION", parser_class=CommandParser
    )


def finish(parser: argparse.ArgumentParser) -> None:
    """Remember the command's flags, to name the nearest one of a misspelt flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(known_flags=flags)


def add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
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


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Like ``parse_args``, but an unknown flag names the nearest known one."""
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        word = rest[0].partition("=")[0]
        raise ConfigError(f"unknown argument {word}{nearest(word, arguments.known_flags)}")
    return arguments
