"""Writes ``docs/settings.md`` from the table of settings.

    python -m headwater.app.settings_page > docs/settings.md

A test compares the page with this output, so a setting without documentation
does not pass. Knows only the table.
"""

from __future__ import annotations

from headwater.app.options import Setting
from headwater.app.settings import CONFIG_ENV, GROUPS, SETTINGS

_HEAD = f"""# Settings

*Written by `python -m headwater.app.settings_page > docs/settings.md`.*

Each setting can be given in three places. The first of these that has it wins:

1. a flag: `--port 9000`
2. an environment variable: `HEADWATER_PORT=9000`
3. a TOML file: `port = 9000` under `[server]`
4. otherwise its default

A file is read only when it is named, with `--config FILE` or `{CONFIG_ENV}`; a file that happens
to lie in the current folder changes nothing. `headwater serve` prints every value and where it
came from. An unknown key in the file, an unknown `HEADWATER_*` variable and an unknown flag are
errors that name the nearest known one.

```toml
# headwater.toml
[server]
port = 9000
api_key_file = "keys.txt"

[model]
model = "smollm2"
weights = "int8"

[engine]
kv_bytes = "2GiB"
```

Sizes take a number of bytes or `KiB`, `MiB`, `GiB`, `TiB`. `none` unsets a value that may be unset.
Keys are never printed.
"""


def settings_page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    for group, group_type in GROUPS:
        parts.append(f"## [{group}]\n\n{group_type.__doc__}\n")
        rows = [_row(setting) for setting in SETTINGS if setting.group == group]
        parts.append(
            "\n".join(
                ["| key | flag | values | default | meaning |", "|---|---|---|---|---|", *rows]
            )
            + "\n"
        )
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    flag = f"`{setting.flag}`"
    if setting.kind is bool:
        flag += f", `--no-{setting.flag.removeprefix('--')}`"
    cells = (
        f"`{setting.field}`",
        flag,
        _values(setting),
        setting.show(setting.default),
        setting.option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    words = {bool: "true, false", int: "whole number", float: "number", str: "text", tuple: "texts"}
    kind = "bytes" if setting.is_bytes else words.get(setting.kind, "path")
    low, high = setting.option.low, setting.option.high
    if low is None:
        return kind
    bounds = [
        f"{int(bound)}" if float(bound).is_integer() else f"{bound:g}"
        for bound in (low, high)
        if bound is not None
    ]
    return (
        f"{kind}, {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else f"{kind}, from {bounds[0]}"
    )


if __name__ == "__main__":
    print(settings_page(), end="")
