"""``headwater cache stats | verify | purge | top``: a cache folder as its operator sees it.

Prints what ``disk.inspect`` finds: sizes, ages, tenants and counts, never content. Works
while servers use the folder. Knows no request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.api.caching import SALT_MARK
from headwater.app.settings import Settings, cache_folder
from headwater.core.blocks import CacheIdentity
from headwater.core.cache import KVPart
from headwater.core.errors import ConfigError
from headwater.disk.inspect import (
    FolderSummary,
    PurgeCounts,
    purge,
    summarise,
    top,
    verify,
)

EXIT_OK = 0
EXIT_DAMAGED = 1
DAY_S = 86400.0
SHOWN_DIGITS = 8  # of a fingerprint; JSON has all of it

_AGES = ((DAY_S, "d"), (3600.0, "h"), (60.0, "min"))


def folder_of(settings: Settings) -> Path:
    """The folder that ``cache.cache_dir`` names. Raises ConfigError if it names none."""
    folder = cache_folder(settings)
    if folder is None:
        raise ConfigError(
            "cache.cache_dir is none, so there is no folder to look at; name one with --cache-dir"
        )
    return folder


def run_stats(settings: Settings, *, as_json: bool, console: Console | None = None) -> int:
    """What is in the folder."""
    folder, now_s = folder_of(settings), time.time()
    found = summarise(folder, now_s=now_s)
    if as_json:
        print_json({"folder": str(folder), **asdict(found)})
        return EXIT_OK
    console = console or Console(highlight=False)
    console.print(_facts(folder, found))
    if found.by_identity:
        console.print(Text(), _identities(found, now_s), Text(), _expiry(found), sep="\n")
    return EXIT_OK


def run_verify(
    settings: Settings, *, drop_damaged: bool, as_json: bool, console: Console | None = None
) -> int:
    """Read every record; exit code 1 if one is damaged."""
    found = verify(folder_of(settings), drop_damaged=drop_damaged, now_s=time.time())
    if as_json:
        print_json(asdict(found))
    else:
        console = console or Console(highlight=False)
        console.print(
            Text(
                f"{found.num_records} records, {size(found.num_bytes)}: {found.num_damaged} "
                f"damaged, {found.num_dropped} of them dropped, {found.num_orphaned} without "
                "their other half"
            )
        )
        if found.num_damaged > found.num_dropped:
            console.print(Text("a damaged record is never used; remove them with --drop-damaged"))
    return EXIT_DAMAGED if found.num_damaged else EXIT_OK


def run_purge(
    settings: Settings,
    *,
    tenant: str | None,
    fingerprint: str | None,
    unused_days: float | None,
    everything: bool,
    is_sure: bool,
    as_json: bool,
    console: Console | None = None,
) -> int:
    """Remove what fits all that is given; a tenant with everything kept under its salts."""
    given = (tenant, fingerprint, unused_days)
    if everything and any(value is not None for value in given):
        raise ConfigError("--all goes with none of --tenant, --fingerprint and --unused-days")
    if not everything and all(value is None for value in given):
        raise ConfigError("say what to remove: --tenant, --fingerprint, --unused-days or --all")
    if everything and not is_sure:
        raise ConfigError("--all removes everything that is kept; add --yes if that is meant")
    if unused_days is not None and not unused_days >= 0:
        raise ConfigError(f"--unused-days must be at least 0, got {unused_days:g}")
    folder, now_s = folder_of(settings), time.time()
    found = PurgeCounts(num_records=0, num_bytes=0, num_files=0)
    for one in _with_salts(folder, tenant, now_s):
        more = purge(
            folder,
            now_s=now_s,
            tenant=one,
            fingerprint=fingerprint,
            unused_for_s=None if unused_days is None else unused_days * DAY_S,
            everything=everything,
        )
        found = PurgeCounts(
            num_records=found.num_records + more.num_records,
            num_bytes=found.num_bytes + more.num_bytes,
            num_files=found.num_files + more.num_files,
        )
    if as_json:
        print_json(asdict(found))
    else:
        text = (
            f"removed {found.num_records} records, {size(found.num_bytes)}, "
            f"and {found.num_files} files"
        )
        (console or Console(highlight=False)).print(Text(text))
    return EXIT_OK


def run_top(
    settings: Settings, *, num_shown: int, as_json: bool, console: Console | None = None
) -> int:
    """The most used records."""
    if num_shown < 1:
        raise ConfigError(f"-n must be at least 1, got {num_shown}")
    now_s = time.time()
    found = top(folder_of(settings), num_shown, now_s=now_s)
    if as_json:
        print_json([asdict(record) for record in found])
        return EXIT_OK
    identities = [record.identity for record in found]
    rows = [
        (
            record.name,
            shown_model(record.identity, identities),
            shown_tenant(record.identity.tenant),
            record.kind.value if record.part is KVPart.GLOBAL else f"{record.kind} {record.part}",
            f"{record.end - record.num_tokens}-{record.end}",
            size(record.num_bytes),
            str(record.num_uses),
            age(now_s - record.last_used_s),
            age(record.expires_s - now_s),
        )
        for record in found
    ]
    columns = (
        "record", "model", "tenant", "class", "tokens", "size", "uses", "unused", "expires"
    )  # fmt: skip
    (console or Console(highlight=False)).print(table("", columns, rows))
    return EXIT_OK


def size(num_bytes: int) -> str:
    """
    >>> size(999), size(3 * 2**20), size(5 * 2**30 // 2)
    ('999 B', '3.0 MiB', '2.5 GiB')
    """
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """
    >>> age(30), age(7200), age(260000), age(-5)
    ('0 min', '2 h', '3 d', '0 min')
    """
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return "0 min"


def shown_tenant(tenant: str) -> str:
    """As a person reads it: a server without keys has one tenant, without a name.

    >>> shown_tenant(""), shown_tenant("a~0123456789abcdef")
    ('(no key)', 'a~01234567')
    """
    name, mark, salt = tenant.partition(SALT_MARK)
    return f"{name}{mark}{salt[:SHOWN_DIGITS]}" or "(no key)"


def shown_model(identity: CacheIdentity, identities: Collection[CacheIdentity]) -> str:
    """The start of its fingerprint; with the layout where ``identities`` have several."""
    name = identity.model_fingerprint[:SHOWN_DIGITS]
    return name if len({one.layout for one in identities}) < 2 else f"{name} {identity.layout}"


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, header: bool = True
) -> Table:
    """Plain cells: nothing in them is taken for markup."""
    found = Table(
        title=title or None,
        title_justify="left",
        show_header=header,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        found.add_column(column, overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell) for cell in row))
    return found


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    print(json.dumps(value, indent=2))


def _facts(folder: Path, found: FolderSummary) -> Table:
    cap = "no server has opened it yet"
    if found.max_bytes is not None:
        share = found.num_bytes / found.max_bytes if found.max_bytes else 1.0
        cap = f"{size(found.max_bytes)} ({share:.0%} used)"
    rows = (
        ("folder", str(folder)),
        ("records", f"{found.num_records} of {found.num_tokens} tokens"),
        ("on disk", f"{size(found.num_bytes)} in {len(found.files)} files"),
        ("cap", cap),
        ("remembered misses", f"{found.num_tombstones} names of records that are gone"),
    )
    return table("", ("", ""), rows, header=False)


def _identities(found: FolderSummary, now_s: float) -> Table:
    identities = [use.identity for use in found.by_identity]
    rows = [
        (
            shown_model(use.identity, identities),
            shown_tenant(use.identity.tenant),
            str(use.num_records),
            str(use.num_tokens),
            size(use.num_bytes),
            f"{age(now_s - use.last_used_s)} ago",
        )
        for use in found.by_identity
    ]
    columns = ("model", "tenant", "records", "tokens", "size", "last used")
    return table("by model and tenant", columns, rows)


def _expiry(found: FolderSummary) -> Table:
    classes = [
        (f"class {use.kind.value}", str(use.num_records), size(use.num_bytes))
        for use in found.by_class
    ]
    days = [
        (f"expires {use.day}", str(use.num_records), size(use.num_bytes)) for use in found.by_day
    ]
    return table("by class and last day", ("", "records", "size"), classes + days)


def _with_salts(folder: Path, tenant: str | None, now_s: float) -> list[str | None]:
    """The tenant's namespaces: its own and those that its requests' salts made."""
    if tenant is None:
        return [None]
    kept = {use.identity.tenant for use in summarise(folder, now_s=now_s).by_identity}
    return [tenant, *sorted(name for name in kept if name.startswith(tenant + SALT_MARK))]
