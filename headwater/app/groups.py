"""The settings themselves: groups of names, types, defaults, bounds and help.

Values only: nothing here reads a flag, the environment or a file (``settings``
does) and nothing knows which room a value goes to (``launch`` does). To add a
setting, add a field: its flag, environment name, file key and line in
``docs/settings.md`` follow, and a test fails until that page is written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from headwater.app.options import Option

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The HTTP door."""

    host: Annotated[
        str, Option(help="Address to listen on. Anything but loopback needs an API key.")
    ] = "127.0.0.1"
    port: Annotated[int, Option(help="TCP port; 0 takes a free one.", low=0, high=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Option(
            help="Keys that callers may use (flag: repeat it; environment: comma-separated). "
            "Others can read flags in a process list: prefer api_key_file.",
            secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        Option(
            help="File with one API key a line, after it what it allows (name=, cache=, "
            "cache_max_days=); # starts a comment line."
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            help="Host names accepted in the Host header while no key is set, besides loopback "
            "names. Keeps web pages from reaching a local server by DNS rebinding."
        ),
    ] = ()
    max_body_bytes: Annotated[
        int, Option(help="Largest request body; over it: 413.", low=1024, high=2**31)
    ] = 32 * MIB
    strict: Annotated[
        bool,
        Option(
            help="Refuse request fields that Headwater does not know, instead of ignoring them."
        ),
    ] = False
    keepalive_s: Annotated[
        float,
        Option(
            help="A stream that has been silent this long sends a comment line, so that "
            "clients and proxies do not close it during a long prefill.",
            low=0.1,
            high=3600,
        ),
    ] = 3.0
    idle_connection_s: Annotated[
        int,
        Option(
            help="An HTTP connection without a request is closed after this.", low=1, high=86400
        ),
    ] = 75
    drain_s: Annotated[
        float,
        Option(help="At shutdown, running requests may go on this long.", low=0, high=86400),
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(help="Prompts, outputs and keys are in no log at any level."),
    ] = "info"
    access_log: Annotated[
        bool, Option(help="One line per HTTP request: method, path, status, seconds.")
    ] = True
    record_requests: Annotated[
        Path | None,
        Option(
            help="File that takes a line for each prompt: what it was made of as keyed digests, "
            "no text, for `headwater cache advise`. At most 128MiB with FILE.1; FILE.key is "
            "beside it.",
            none_means="nothing is recorded",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What is served, and in which number formats."""

    model: Annotated[
        str,
        Option(
            help="A catalogue name, a folder with safetensors, a .gguf file, or a hub id. "
            "headwater-mini is part of this package and smollm2 of an installed one: "
            "neither needs a download."
        ),
    ] = "headwater-mini"
    served_name: Annotated[
        str | None,
        Option(help="Name that callers use for the model.", none_means="the model's own name"),
    ] = None
    weights: Annotated[
        Literal["auto", "fp32", "bf16", "int8"],
        Option(
            help="How linear weights are kept in memory; auto: bf16, or fp32 with reference "
            "numerics. On a CPU, fp32 needs reference numerics."
        ),
    ] = "auto"
    kv: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option(help="How KV is kept in memory; auto: bf16, or fp32 with reference numerics."),
    ] = "auto"
    numerics: Annotated[
        Literal["fast", "reference"],
        Option(help="fast: the quickest kernels here. reference: plain fp32, to compare with."),
    ] = "fast"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Option(help="auto: a CUDA device if there is one.")
    ] = "auto"
    context_tokens: Annotated[
        int | None,
        Option(
            help="Longest prompt + output; may not exceed the model's own.",
            low=16,
            none_means="the model's own",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings:
    """What is made of a request's text before it becomes tokens."""

    recipe: Annotated[
        Literal["auto", "template", "deepseek-v4", "deepseek-v4.1"],
        Option(
            help="How the model is spoken to. auto: DeepSeek's format if the tokenizer declares "
            "its control tokens, else the model's own chat template."
        ),
    ] = "auto"
    normalise_agent_noise: Annotated[
        bool,
        Option(
            help="Leave out a first system block that is only a coding agent's billing line "
            "(x-...-billing: ...), so that a value that changes with each request does not cost "
            "the whole cached prefix. All other text is passed on byte for byte."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One worker's memory and step sizes."""

    threads: Annotated[
        int | None,
        Option(
            help="CPU threads of a worker.",
            low=1,
            high=1024,
            none_means="the usable cores, divided by the workers of the machine",
        ),
    ] = None
    block_tokens: Annotated[
        int, Option(help="Tokens in a KV block, a power of two.", low=8, high=512)
    ] = 32
    kv_bytes: Annotated[
        int | None,
        Option(
            help="Memory for KV, in bytes or as 2GiB. Not together with num_blocks.",
            low=MIB,
            none_means="planned from free memory",
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        Option(help="KV blocks. Not together with kv_bytes.", low=2, none_means="from kv_bytes"),
    ] = None
    max_running: Annotated[
        int, Option(help="Sequences that hold blocks at once.", low=1, high=65536)
    ] = 64
    max_step_tokens: Annotated[
        int, Option(help="Tokens computed in one step, prefill and decode.", low=16, high=2**20)
    ] = 2048
    step_budget_ms: Annotated[
        float | None,
        Option(
            help="Milliseconds that a step may take, so how long running streams wait for their "
            "next tokens: a step takes as many prompt tokens as are predicted to fit. A sequence "
            "that is alone on its worker has five times as long.",
            low=1,
            high=600_000,
            none_means="only the limits on tokens",
        ),
    ] = 150.0
    decoder_replay: Annotated[
        Literal["on", "off"],
        Option(
            help="For models with late layers (family ced). on: of a prompt they compute the last "
            "tokens only, a window and a little more, which nearly halves prefill; output is near "
            "that of off and not equal. Requests with prompt logprobs compute all of it."
        ),
    ] = "on"
    max_mixed_prefill_tokens: Annotated[
        int,
        Option(
            help="Prefill tokens in a step that also decodes, where there is no step budget: more "
            "speeds prefill up and slows the running streams.",
            low=1,
            high=2**20,
        ),
    ] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """KV kept beyond the device: on disk for days, and in host memory."""

    cache_dir: Annotated[
        Path | None,
        Option(
            help="Folder of the disk tier, made with mode 0700. Servers on one machine may share "
            "it; none keeps nothing on disk.",
            none_means="no disk tier",
        ),
    ] = Path("~/.cache/headwater/kv")
    cache_max_bytes: Annotated[
        int | None,
        Option(
            help="Hard cap on all files in cache_dir, of all servers that share it. Refused at "
            "the start where the disk has not so much to spare.",
            low=16 * MIB,
            none_means="16GiB, or half of what the disk has to spare where that is less",
        ),
    ] = None
    cache_reserve_bytes: Annotated[
        int,
        Option(help="Free space on that disk that is never used: writing stops there.", low=0),
    ] = GIB
    host_cache_bytes: Annotated[
        int | None,
        Option(
            help="Host memory for KV that the device has no room for; 0: none.",
            low=0,
            none_means="4GiB beside an accelerator, 0 where the device is the host",
        ),
    ] = None
    cache_agent_days: Annotated[
        float,
        Option(
            help="Days since its last use that KV of requests with tools is kept.",
            low=0,
            high=3650,
        ),
    ] = 3.0
    cache_chat_days: Annotated[
        float, Option(help="The same for all other requests.", low=0, high=3650)
    ] = 7.0
    window_kv: Annotated[
        Literal["checkpoint", "replay"],
        Option(
            help="What is kept of layers with a window. checkpoint: their last window at the end "
            "of each input and output, so that a hit gives the ids of a cold run. replay: nothing; "
            "the last window of a hit is computed again, which is near but not equal."
        ),
    ] = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Admission, and what counts as stuck."""

    max_waiting_requests: Annotated[
        int, Option(help="Requests in the queue; over it: 429.", low=1, high=2**20)
    ] = 256
    max_waiting_tokens: Annotated[
        int, Option(help="Prompt tokens in the queue; over it: 429.", low=1, high=2**31)
    ] = 2**20
    stuck_after_s: Annotated[
        float,
        Option(
            help="Work is there but no step has ended for this long: not ready.",
            low=0.1,
            high=86400,
        ),
    ] = 60.0
    lost_after_s: Annotated[
        float,
        Option(
            help="The same, and where others can go on with its requests the worker is replaced; "
            "never before stuck_after_s.",
            low=0.1,
            high=86400,
        ),
    ] = 60.0
    max_queue_s: Annotated[
        float | None,
        Option(
            help="Predicted seconds of the prompts in the queue, for each worker; over it: 429.",
            low=0.1,
            high=86400,
            none_means="no limit",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How worker processes are started and restarted."""

    start_timeout_s: Annotated[
        float, Option(help="A worker must have loaded its model by then.", low=1, high=86400)
    ] = 600.0
    restart_backoff_s: Annotated[
        float,
        Option(help="Pause before the first restart; doubles with each.", low=0.01, high=3600),
    ] = 0.5
    restart_backoff_max_s: Annotated[
        float, Option(help="The longest pause between restarts.", low=0.01, high=86400)
    ] = 30.0
    handoff_listen: Annotated[
        str | None,
        Option(
            help="HOST:PORT where a decode worker takes KV from prefill workers on other "
            "machines, as they reach it; port 0 takes a free one.",
            none_means="on loopback: from this machine only",
        ),
    ] = None
    prefill_weights: Annotated[
        Literal["auto", "all"],
        Option(
            help="What a prefill worker keeps of the model. auto: with decoder replay, only the "
            "part that writes a prompt's KV, about half where the model has late layers."
        ),
    ] = "auto"
    machine_workers: Annotated[
        int,
        Option(
            help="Workers on this machine that share its cores and memory: what is not set is "
            "divided by it. serve says it to those that it starts.",
            low=1,
            high=1024,
        ),
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Which workers there are, and who may join."""

    both: Annotated[
        int | None,
        Option(
            help="Workers that compute prompts and outputs, under one step budget.",
            low=0,
            high=1024,
            none_means="1, or 0 beside prefill and decode workers",
        ),
    ] = None
    prefill: Annotated[int, Option(help="Workers that only compute prompts.", low=0, high=1024)] = 0
    decode: Annotated[
        int,
        Option(help="Workers that take a prompt's KV and produce the output.", low=0, high=1024),
    ] = 0
    elastic: Annotated[
        bool,
        Option(help="Let idle workers that can do both act as one kind while the traffic asks."),
    ] = False
    control_listen: Annotated[
        str | None,
        Option(
            help="PORT (on loopback) or HOST:PORT where workers started with `headwater worker` "
            "may join. Needs secret_file.",
            none_means="nobody may join",
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        Option(
            help="File with a secret of at least 32 characters that the front and workers on "
            "other machines share; nobody else may be able to read it."
        ),
    ] = None
    joined_silent_s: Annotated[
        float,
        Option(
            help="A joined worker, or its front, that has been silent this long is lost.",
            low=2,
            high=3600,
        ),
    ] = 10.0
