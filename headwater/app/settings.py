"""All settings, checked once, whole: flag > environment > file > default.

The only file of the package that reads the environment. ``SETTINGS`` is the one
table, read off ``groups``, from which flags, ``HEADWATER_*`` names, file keys
and the page ``docs/settings.md`` follow. Knows no room but ``core``: ``launch``
turns these values into parts. A file is read only when named (``--config FILE`` or
``HEADWATER_CONFIG``), so a start never depends on the folder it happens in.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from headwater.app.fleet_plan import (
    plan_endpoint,
    plan_handoff_endpoint,
    plan_roles,
    share_threads,
)
from headwater.app.groups import (
    CacheSettings,
    EngineSettings,
    FleetSettings,
    ModelSettings,
    RecipeSettings,
    RouterSettings,
    ServerSettings,
    WorkerSettings,
)
from headwater.app.key_file import read_keys
from headwater.app.machine import usable_cores as usable_cores  # the launchers' source of it
from headwater.app.options import (
    ENV_PREFIX,
    Setting,
    Value,
    nearest,
    parse_value,
    settings_of,
)
from headwater.core.errors import ConfigError
from headwater.core.fleet import Role

CONFIG_ENV = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from, and its name there."""

    source: Literal["flag", "environment", "file", "default"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of one process. ``Settings()`` is all defaults, as tests use it."""

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    recipe: RecipeSettings = field(default_factory=RecipeSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    # By setting name; a name that is absent has its default.
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def value(self, setting: Setting) -> Value:
        found: Value = getattr(getattr(self, setting.group), setting.field)
        return found

    def origin(self, setting: Setting) -> Origin:
        return self.origins.get(setting.name, Origin("default"))


GROUPS: tuple[tuple[str, type], ...] = (
    ("server", ServerSettings),
    ("model", ModelSettings),
    ("recipe", RecipeSettings),
    ("engine", EngineSettings),
    ("cache", CacheSettings),
    ("router", RouterSettings),
    ("worker", WorkerSettings),
    ("fleet", FleetSettings),
)
SETTINGS: tuple[Setting, ...] = tuple(
    setting for group, group_type in GROUPS for setting in settings_of(group, group_type)
)


# What a worker process is given: whole groups, and some settings of others.
WORKER_SETTINGS = (
    "model", "engine", "cache", "worker", "fleet.elastic", "fleet.secret_file",
    "fleet.joined_silent_s", "server.log_level",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Given:
    value: Value
    origin: Origin


def read_environment() -> dict[str, str]:
    """The ``HEADWATER_*`` variables of this process: the package's one look at the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}


def _thread_variables(num_threads: int) -> dict[str, str]:
    # Spinning threads slow small operations many times when cores are shared: let them sleep.
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(num_threads),
        "NUMBA_THREADING_LAYER": "omp",
    }


def cache_folder(settings: Settings) -> Path | None:
    """Where the disk tier is; None: nowhere. The default is in the user's cache folder, which
    ``XDG_CACHE_HOME`` may have moved. A worker process has the same environment, so the same."""
    folder = settings.cache.cache_dir
    if folder is None or folder != CacheSettings().cache_dir:
        return folder
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base, *folder.parts[2:])  # less ~/.cache
    return folder.expanduser()


def is_default_cache(settings: Settings) -> bool:
    """Whether nobody chose where the disk tier is or how large: then it may be left out."""
    cache, default = settings.cache, CacheSettings()
    return (cache.cache_dir, cache.cache_max_bytes) == (default.cache_dir, default.cache_max_bytes)


def set_thread_environment(num_threads: int) -> None:
    """Set up OpenMP threads of this process; call it before torch is imported, which reads it.

    Values that the environment already has are kept.
    """
    for name, value in _thread_variables(num_threads).items():
        os.environ.setdefault(name, value)


def local_roles(settings: Settings) -> tuple[Role, ...]:
    """Of the workers that ``serve`` starts. Raises ConfigError for a fleet that cannot serve."""
    fleet = settings.fleet
    may_join = fleet.control_listen is not None
    return plan_roles(fleet.both, fleet.prefill, fleet.decode, may_join=may_join)


def worker_settings(settings: Settings) -> Settings:
    """Settings of each worker that ``serve`` starts: it shares the machine with the others."""
    num_workers = max(len(local_roles(settings)), settings.worker.machine_workers)
    return replace(settings, worker=replace(settings.worker, machine_workers=num_workers))


def worker_threads(settings: Settings) -> int:
    """CPU threads of one worker."""
    chosen = settings.engine.threads
    return chosen or share_threads(usable_cores(), settings.worker.machine_workers)


def worker_environment(num_threads: int) -> dict[str, str]:
    """The environment of a worker process with ``num_threads``.

    Holds none of our ``HEADWATER_*``: a worker gets its settings as flags, checked
    once, here. Values that this process's environment has are kept.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {**_thread_variables(num_threads), **kept}


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str], config_file: Path | None = None
) -> Settings:
    """Settings from ``flags`` (by setting name), ``environment`` (``HEADWATER_*``) and a TOML file.

    ``config_file`` wins over ``HEADWATER_CONFIG``. Raises ConfigError for an
    unknown key, a bad value, or values that contradict each other.
    """
    if config_file is None and environment.get(CONFIG_ENV):
        config_file = Path(environment[CONFIG_ENV])
    given: dict[str, _Given] = {}
    if config_file is not None:
        given.update(_from_file(config_file))
    given.update(_from_environment(environment))
    given.update(_from_flags(flags))
    settings = Settings(
        server=_build(ServerSettings(), "server", given),
        model=_build(ModelSettings(), "model", given),
        recipe=_build(RecipeSettings(), "recipe", given),
        engine=_build(EngineSettings(), "engine", given),
        cache=_build(CacheSettings(), "cache", given),
        router=_build(RouterSettings(), "router", given),
        worker=_build(WorkerSettings(), "worker", given),
        fleet=_build(FleetSettings(), "fleet", given),
        origins={name: item.origin for name, item in given.items()},
    )
    check_settings(settings)
    return settings


_Group = TypeVar(
    "_Group",
    ServerSettings,
    ModelSettings,
    EngineSettings,
    CacheSettings,
    RecipeSettings,
    RouterSettings,
    WorkerSettings,
    FleetSettings,
)


def _build(defaults: _Group, group: str, given: Mapping[str, _Given]) -> _Group:
    values = {
        name.partition(".")[2]: item.value
        for name, item in given.items()
        if name.startswith(f"{group}.")
    }
    # parse_value gave each value the type of its field.
    return replace(defaults, **values)  # type: ignore[arg-type]


def _from_file(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} is not valid TOML: {error}") from None
    known = {setting.name: setting for setting in SETTINGS}
    groups = {setting.group for setting in SETTINGS}
    for group, body in tree.items():
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {group} stands outside a section{_owner_hint(group)}")
        if group not in groups:
            raise ConfigError(f"{path}: unknown section [{group}]{nearest(group, groups)}")
        for key, raw in body.items():
            name = f"{group}.{key}"
            if name not in known:
                raise ConfigError(f"{path}: unknown setting {name}{nearest(name, known)}")
            origin = Origin("file", str(path))
            yield name, _Given(parse_value(known[name], raw, str(origin)), origin)


def _owner_hint(key: str) -> str:
    owners = [setting.name for setting in SETTINGS if setting.field == key]
    return f"; did you mean {owners[0]}?" if owners else ""


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    known = {setting.env: setting for setting in SETTINGS}
    for variable, raw in environment.items():
        if variable == CONFIG_ENV or not variable.startswith(ENV_PREFIX):
            continue
        if variable not in known:
            raise ConfigError(f"unknown environment variable {variable}{nearest(variable, known)}")
        setting, origin = known[variable], Origin("environment", variable)
        yield setting.name, _Given(parse_value(setting, raw, str(origin)), origin)


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[str, _Given]]:
    known = {setting.name: setting for setting in SETTINGS}
    for name, raw in flags.items():
        setting = known[name]
        origin = Origin("flag", setting.flag)
        yield name, _Given(parse_value(setting, raw, str(origin)), origin)


def check_settings(settings: Settings) -> None:
    """Raise ConfigError where values contradict each other."""
    server, engine, worker = settings.server, settings.engine, settings.worker
    if not is_loopback(server.host) and not read_keys(server):
        raise ConfigError(
            f"server.host {server.host} can be reached by others, but no API key is set; "
            "set one with --api-key-file FILE (or --api-key), or listen on 127.0.0.1"
        )
    if engine.block_tokens & (engine.block_tokens - 1):
        raise ConfigError(f"engine.block_tokens must be a power of two, got {engine.block_tokens}")
    if engine.kv_bytes is not None and engine.num_blocks is not None:
        raise ConfigError("engine.kv_bytes and engine.num_blocks are both set; set one of them")
    if engine.max_mixed_prefill_tokens > engine.max_step_tokens:
        raise ConfigError(
            f"engine.max_mixed_prefill_tokens ({engine.max_mixed_prefill_tokens}) must not be "
            f"more than engine.max_step_tokens ({engine.max_step_tokens})"
        )
    if engine.max_running > engine.max_step_tokens:
        raise ConfigError(
            f"engine.max_running ({engine.max_running}) must not be more than "
            f"engine.max_step_tokens ({engine.max_step_tokens}): each running sequence "
            "needs a token in a step"
        )
    if worker.restart_backoff_s > worker.restart_backoff_max_s:
        raise ConfigError(
            f"worker.restart_backoff_s ({worker.restart_backoff_s:g}) must not be more than "
            f"worker.restart_backoff_max_s ({worker.restart_backoff_max_s:g})"
        )

    _check_fleet(settings)


def _check_fleet(settings: Settings) -> None:
    local_roles(settings)
    plan_handoff_endpoint(settings.worker.handoff_listen)
    fleet = settings.fleet
    if fleet.control_listen is not None:
        plan_endpoint(fleet.control_listen, "fleet.control_listen")
        if fleet.secret_file is None:
            raise ConfigError(
                "fleet.control_listen lets workers join, but nothing tells them from strangers; "
                "name a file with --secret-file"
            )


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and localhost; any other name counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def describe_settings(settings: Settings) -> list[str]:
    """``setting value (origin)`` lines, one per setting, for the start of a log."""
    return [
        f"{setting.name} {setting.show(settings.value(setting))} ({settings.origin(setting)})"
        for setting in SETTINGS
    ]


def chosen_settings(names: Sequence[str]) -> tuple[Setting, ...]:
    """Settings by group (``engine``) or by full name (``server.log_level``)."""
    return tuple(setting for setting in SETTINGS if setting.group in names or setting.name in names)


def as_flags(settings: Settings, names: Sequence[str] = WORKER_SETTINGS) -> list[str]:
    """Flags that give another process the same values for ``names``; secrets are left out.

    ``names`` is as for ``chosen_settings``.
    """
    flags: list[str] = []
    for setting in chosen_settings(names):
        value = settings.value(setting)
        if setting.option.secret or value == setting.default:
            continue
        if isinstance(value, bool):
            flags.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [f"{setting.flag}={item}" for item in value]
        else:
            # One word, since a value may begin with a dash.
            flags.append(f"{setting.flag}={'none' if value is None else value}")
    return flags
