"""Install Claude Code, Codex CLI and OpenCode, and run each, unmodified, against Headwater.

    python tests/clients/run_clients.py [--into DIR] [--client NAME]

Needs Linux, npm, unshare (root, or user namespaces) and about 1.2 GB. Packages
are installed first; then everything runs in a network namespace that has only
loopback. Not part of the test suite. Exit code 1 when any client met trouble.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clients_model import Played, num_common_tokens
from clients_namespace import command_inside, enter, name_server
from clients_programs import CLIENTS, FILE, RIGHT, WRONG, Client, Scenario
from clients_server import Exchange, Served, serving

RUN_TIMEOUT_S: Final = 120.0
INSTALL_TIMEOUT_S: Final = 900.0
GENERATING: Final = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
REPOSITORY: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run showed; it went well when ``faults`` is empty."""

    title: str
    faults: tuple[str, ...]
    num_requests: int
    num_hit_tokens: int
    num_prompt_tokens: int
    prefix_breaks: tuple[str, ...]
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, help="scratch folder (default: a temporary one)")
    parser.add_argument("--client", action="append", choices=[c.name for c in CLIENTS])
    parser.add_argument("--latest", action="store_true", help="install the newest versions")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    clients = [c for c in CLIENTS if not options.client or c.name in options.client]
    if options.inside:
        return run_inside(options.into, clients)
    with contextlib.ExitStack() as stack:
        scratch = options.into or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch = scratch.resolve()
        if scratch.is_relative_to(REPOSITORY):
            parser.error("--into must be outside the repository")
        install(scratch, clients, latest=options.latest)
        names = [word for client in clients for word in ("--client", client.name)]
        command = [sys.executable, __file__, "--inside", "--into", str(scratch), *names]
        code = subprocess.run(command_inside(command), check=False).returncode
        if options.into:
            print(f"requests, answers and outputs are in {scratch / 'runs'}")
        return code


def install(scratch: Path, clients: Sequence[Client], *, latest: bool) -> None:
    """Through npm, without running any package's install script."""
    packages = scratch / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "package.json").write_text('{"private": true}', encoding="utf-8")
    wanted = [f"{c.package}@{'latest' if latest else c.version}" for c in clients]
    subprocess.run(
        ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save", *wanted],
        cwd=packages,
        check=True,
        timeout=INSTALL_TIMEOUT_S,
    )


def run_inside(scratch: Path, clients: Sequence[Client]) -> int:
    """All scenarios of ``clients``, in the namespace; prints the outcomes."""
    enter()
    failed = False
    with name_server() as names, serving() as served:
        for client in clients:
            version = installed_version(scratch, client)
            for number in range(len(client.scenarios(scratch))):
                folder = scratch / "runs" / f"{client.name}-{number}-{time.time_ns()}"
                outcome = run_scenario(served, client, number, scratch, folder)
                failed = failed or bool(outcome.faults)
                report(outcome, version)
            print(f"  names it asked for: {', '.join(sorted(set(names))) or 'none'}")
            names.clear()
    return int(failed)


def installed_version(scratch: Path, client: Client) -> str:
    manifest = scratch / "packages" / "node_modules" / client.package / "package.json"
    return str(json.loads(manifest.read_text(encoding="utf-8"))["version"])


def run_scenario(
    served: Served, client: Client, number: int, scratch: Path, folder: Path
) -> Outcome:
    """One client process from start to end, in a home and a project of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / FILE).write_text(WRONG, encoding="utf-8")
    scenario = client.scenarios(work)[number]
    served.tap.exchanges.clear()
    served.model.played.clear()
    served.model.scripts = scenario.scripts
    environment = {
        "HOME": str(home),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin")),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **client.configure(home, served.port),
    }
    binary = client.binary(scratch / "packages" / "node_modules")
    start_s = time.monotonic()
    code, out, err = run_bounded(
        [str(binary), *client.arguments(scenario.prompt)], work, environment
    )
    seconds = time.monotonic() - start_s
    (folder / "stdout").write_text(out, encoding="utf-8")
    (folder / "stderr").write_text(err, encoding="utf-8")
    exchanges = list(served.tap.exchanges)
    for index, exchange in enumerate(exchanges):
        exchange.save(folder / f"{index:03d}.json")
    faults = [] if code == 0 else [f"exit code {code}"]
    faults += client.complaints(out, err)
    faults += exchange_faults(exchanges)
    faults += scenario_faults(served, scenario, out, work)
    played = served.model.played
    return Outcome(
        title=f"{client.name} {scenario.name}",
        faults=tuple(faults),
        num_requests=len(exchanges),
        num_hit_tokens=sum(one.num_hit_tokens for one in played),
        num_prompt_tokens=sum(len(one.prompt_tokens) for one in played),
        prefix_breaks=tuple(prefix_breaks(served, played)),
        seconds=seconds,
    )


def run_bounded(command: list[str], work: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. After the time limit the client and its children are ended."""
    with subprocess.Popen(
        command,
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own, to be ended as one
    ) as process:
        try:
            out, err = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return -1, out, err + f"\nstopped after {RUN_TIMEOUT_S:.0f} s"
        return process.returncode, out, err


def exchange_faults(exchanges: Sequence[Exchange]) -> list[str]:
    """Refusals, broken answers and repeated requests."""
    faults = []
    seen: dict[bytes, int] = {}
    for index, exchange in enumerate(exchanges):
        title = f"request {index} {exchange.method} {exchange.target}"
        if exchange.status != 200 and exchange.method == "POST":
            faults.append(f"{title}: status {exchange.status} {exchange.answer[:300]!r}")
        elif not exchange.complete:
            faults.append(f"{title}: the answer was cut off")
        retries = dict(exchange.headers).get("x-stainless-retry-count", "0")
        if retries != "0":
            faults.append(f"{title}: retry number {retries}")
        if exchange.path in GENERATING:
            first = seen.setdefault(exchange.body, index)
            if first != index:
                faults.append(f"{title}: the same body as request {first}")
    return faults


def scenario_faults(served: Served, scenario: Scenario, out: str, work: Path) -> list[str]:
    """What should have happened and did not."""
    faults = []
    for script in scenario.scripts:
        turns = [p.turn_index for p in served.model.played if p.opening == script.opening]
        # More turns than the script has: a client told the model of something later.
        if turns != list(range(max(len(turns), len(script.turns)))):
            faults.append(f"turns asked for after {script.opening!r}: {turns}")
    if scenario.answer not in out:
        faults.append(f"its output lacks {scenario.answer!r}")
    if scenario.fixes_file and (work / FILE).read_text(encoding="utf-8") != RIGHT:
        faults.append(f"{FILE} was not fixed")
    prompts = [served.model.recipe.decode(p.prompt_tokens) for p in served.model.played]
    last = max(prompts, key=len, default="")
    faults += [f"no prompt holds the result {r!r}" for r in scenario.results if r not in last]
    return faults


def prefix_breaks(served: Served, played: Sequence[Played]) -> list[str]:
    """Where turn n+1 does not begin with turn n and its answer. Not a fault: clients do that."""
    breaks = []
    conversations = itertools.groupby(
        sorted(played, key=lambda one: (one.opening, one.turn_index)), lambda one: one.opening
    )
    pairs = (
        pair for opening, turns in conversations if opening for pair in itertools.pairwise(turns)
    )
    for earlier, later in pairs:
        whole = earlier.prompt_tokens + earlier.output_tokens
        num_common = num_common_tokens(whole, later.prompt_tokens)
        if num_common < len(whole):
            decode = served.model.recipe.decode
            was = decode(whole[max(0, num_common - 8) : num_common + 8], keep_control=True)
            now = decode(
                later.prompt_tokens[max(0, num_common - 8) : num_common + 8], keep_control=True
            )
            breaks.append(
                f"turn {later.turn_index} shares {num_common} of {len(whole)} tokens: "
                f"{was!r} became {now!r}"
            )
    return breaks


def report(outcome: Outcome, version: str) -> None:
    verdict = "TROUBLE" if outcome.faults else "ok"
    print(
        f"{outcome.title} ({version}): {verdict}; {outcome.num_requests} requests, "
        f"{outcome.num_hit_tokens} of {outcome.num_prompt_tokens} prompt tokens cached, "
        f"{outcome.seconds:.1f} s"
    )
    for fault in outcome.faults:
        print(f"  fault: {fault}")
    for line in outcome.prefix_breaks:
        print(f"  prefix: {line}")


if __name__ == "__main__":
    sys.exit(main())
