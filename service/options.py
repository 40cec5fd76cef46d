"""What `slipstream serve` can be told: one typed record, read once at start and passed down.

Each value comes from the first of: a flag, a SLIPSTREAM_* environment variable, a TOML file, the
default. Nothing reads the environment afterwards. Knows no process, no RPC and no engine.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

ENVIRONMENT_PREFIX = "SLIPSTREAM_"

EngineChoice = Literal["auto", "cuda", "reference", "simulated"]
PrefillPolicy = Literal["together", "alternating"]
"""As in the worker's scheduler, whose modules are slow to import; a test compares the two."""
PrecisionChoice = Literal["auto", "bf16", "q4", "fp8"]
KvDtypeChoice = Literal["auto", "bf16", "fp8"]
"""Both as in the engine's options; a test compares them."""
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class OptionsError(Exception):
    """A value that cannot be used; the message names the option, where it came from and what to do."""


@dataclass(frozen=True, slots=True)
class About:
    """What people are told of an option: part of its field's annotation."""

    group: str
    help: str


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every choice of `slipstream serve`. Fields are flags (`max_queued` is --max-queued), variables
    (SLIPSTREAM_MAX_QUEUED) and TOML keys (max_queued or max-queued)."""

    model: Annotated[
        str,
        About(
            "Model",
            "What to serve: a checkpoint folder, a .gguf file, a Hugging Face id such as "
            "Qwen/Qwen3-1.7B, or a demo model's name (smollm2-135m-instruct).",
        ),
    ] = ""
    served_name: Annotated[
        str | None, About("Model", "The name that requests use. Default: the last part of the model's name.")
    ] = None
    revision: Annotated[
        str | None, About("Model", "Branch, tag or commit of a Hugging Face model. Default: its main branch.")
    ] = None

    engine: Annotated[
        EngineChoice,
        About(
            "Engine",
            "cuda needs an NVIDIA GPU; reference runs on any machine; simulated answers at once with "
            "meaningless tokens, for load tests; auto takes cuda where it can.",
        ),
    ] = "auto"
    precision: Annotated[
        PrecisionChoice,
        About(
            "Engine",
            "How weights are held: bf16 as trained; q4 in under a third of the memory, fastest for few "
            "streams; fp8 in half, fastest for many streams and long prompts. auto keeps what the files "
            "have: q4 for GGUF Q4_0, fp8 for published FP8, else bf16.",
        ),
    ] = "auto"
    kv_dtype: Annotated[
        KvDtypeChoice,
        About("Engine", "How keys and values are cached; fp8 holds twice the tokens. auto is bf16."),
    ] = "auto"
    workers: Annotated[int, About("Engine", "Worker processes. With cuda, one for each GPU.")] = 1
    device: Annotated[
        int, About("Engine", "First GPU, among the visible ones; worker i takes the i-th after it.")
    ] = 0
    max_sequence_length: Annotated[
        int | None,
        About(
            "Engine",
            "Most tokens of prompt and answer together. Default: the model's own limit, as far as memory "
            "allows.",
        ),
    ] = None
    kv_pages: Annotated[
        int | None, About("Engine", "Pages of 64 tokens for keys and values. Default: what memory allows.")
    ] = None
    memory_fraction: Annotated[
        float, About("Engine", "Share of the device's memory to use, above 0 up to 1.")
    ] = 0.9
    threads: Annotated[
        int | None, About("Engine", "CPU threads of the reference engine. Default: all cores.")
    ] = None
    simulated_step_us: Annotated[
        float, About("Engine", "Time that a step of the simulated engine takes, in microseconds.")
    ] = 0.0

    max_sequences: Annotated[
        int | None,
        About(
            "Scheduling",
            "Requests that run at once, per worker. Default: what suits the engine (reference 16, others "
            "64).",
        ),
    ] = None
    max_step_tokens: Annotated[
        int | None,
        About(
            "Scheduling",
            "Most tokens in one step, at least --max-sequences. Lower: less memory; higher: faster prompts. "
            "Default: what suits the engine (cuda 8192, others 2048).",
        ),
    ] = None
    prefix_caching: Annotated[
        bool, About("Scheduling", "Share keys and values between prompts that begin alike.")
    ] = True
    prefill_policy: Annotated[
        PrefillPolicy,
        About("Scheduling", "Whether prompts and running streams share steps, or steps take turns."),
    ] = "together"
    prefill_tokens_beside_decodes: Annotated[
        int | None,
        About(
            "Scheduling",
            "Most prompt tokens in a step that also feeds running streams, to keep them steady. Default: "
            "what suits the engine (reference 32, cuda 256).",
        ),
    ] = None
    max_queued: Annotated[
        int, About("Scheduling", "Requests that may wait, per worker, before RESOURCE_EXHAUSTED.")
    ] = 1024

    host: Annotated[
        str, About("Network", "Address to listen on. 0.0.0.0 or :: listens on every interface.")
    ] = "127.0.0.1"
    port: Annotated[int, About("Network", "gRPC port. 0 picks a free one and prints it.")] = 50051
    metrics_port: Annotated[
        int,
        About(
            "Network", "HTTP port for /metrics, /healthz and /readyz, on the same address. 0 turns it off."
        ),
    ] = 9400
    fronts: Annotated[
        int,
        About(
            "Network",
            "Processes that answer gRPC on the one port. More move more streams, if cores are free.",
        ),
    ] = 1
    reflection: Annotated[
        bool, About("Network", "Let tools such as grpcurl list services without .proto files.")
    ] = True
    drain_timeout: Annotated[
        float | None,
        About(
            "Network",
            "Seconds that running requests get to finish at shutdown. Default: as long as they need.",
        ),
    ] = None

    tls_cert: Annotated[
        Path | None, About("Security", "PEM file with the server's certificate chain. Needs --tls-key.")
    ] = None
    tls_key: Annotated[Path | None, About("Security", "PEM file with the certificate's private key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        About(
            "Security", "PEM file with the authority that client certificates must come from (mutual TLS)."
        ),
    ] = None
    auth_token_file: Annotated[
        Path | None,
        About(
            "Security",
            "File with one bearer token a line; calls must then send 'authorization: Bearer TOKEN'. "
            "Health checks stay open.",
        ),
    ] = None

    log_format: Annotated[
        LogFormat, About("Logs", "text for people, json for machines. Logs go to stderr.")
    ] = "text"
    log_level: Annotated[LogLevel, About("Logs", "Least severe events to log.")] = "info"


@dataclass(frozen=True, slots=True)
class LoadedOptions:
    """The options, and where each value came from, by field name."""

    options: ServeOptions
    sources: dict[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionField:
    """One field of ServeOptions."""

    name: str
    kind: Any
    """Its type, such as int, Literal[...] or Path | None."""
    about: About
    default: Any


def option_fields() -> Iterator[OptionField]:
    """Every option, in the order in which help shows them."""
    hints = get_type_hints(ServeOptions, include_extras=True)
    for item in fields(ServeOptions):
        kind, about = get_args(hints[item.name])
        yield OptionField(item.name, kind, about, item.default)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def load_options(
    flags: Mapping[str, Any], environment: Mapping[str, str], config: Path | None = None
) -> LoadedOptions:
    """Merges the sources. `flags` holds only what was given on the command line, by field name.

    Raises OptionsError for an unreadable file, an unknown key, or a value that cannot be used.
    """
    config = config or _path_or_none(environment.get(f"{ENVIRONMENT_PREFIX}CONFIG"))
    from_file = _read_file(config) if config else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    warnings: list[str] = []
    for item in option_fields():
        name, kind, variable = item.name, item.kind, ENVIRONMENT_PREFIX + item.name.upper()
        text = environment.get(variable)
        if text is not None and _is_service_link(text):
            warnings.append(f"{variable}={text} is a Kubernetes service link, not an option; ignored")
            text = None
        if name in flags:
            values[name], sources[name] = _convert(flags[name], kind, flag_name(name)), flag_name(name)
        elif text is not None:
            values[name], sources[name] = _convert(text, kind, variable), variable
        elif name in from_file:
            origin = f"{config}: {name}"
            values[name], sources[name] = _convert(from_file[name], kind, origin), str(config)
        else:
            sources[name] = "default"
    options = ServeOptions(**values)
    _validate(options, sources)
    return LoadedOptions(options, sources, tuple(warnings))


def _path_or_none(text: str | None) -> Path | None:
    return Path(text) if text else None


def _is_service_link(text: str) -> bool:
    """Kubernetes sets SLIPSTREAM_PORT=tcp://10.0.0.7:50051 in every pod if a Service is called slipstream."""
    return text.startswith(("tcp://", "udp://"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionsError(f"{path} is not valid TOML: {error}") from error
    known = [item.name for item in fields(ServeOptions)]
    result = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OptionsError(f"{path}: unknown option {key!r}{hint}")
        result[name] = value
    return result


_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def _convert(value: Any, kind: Any, origin: str) -> Any:
    """`value`, from a flag, a variable's text or TOML, as type `kind`. Raises OptionsError."""
    if get_origin(kind) in (Union, types.UnionType):
        if value is None or value == "":
            return None
        kind = next(choice for choice in get_args(kind) if choice is not type(None))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise OptionsError(f"{origin}: {value!r} is not one of {', '.join(get_args(kind))}")
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        raise OptionsError(f"{origin}: {value!r} is not true or false")
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise OptionsError(f"{origin}: {value!r} is not {_noun(kind)}")
    if kind is str and not isinstance(value, str):
        raise OptionsError(f"{origin}: {value!r} is not {_noun(kind)}")
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise OptionsError(f"{origin}: {value!r} is not {_noun(kind)}") from error


def _noun(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a text", Path: "a path"}.get(kind, str(kind))


_MOST = {
    "workers": 256,
    "fronts": 256,
    "max_sequences": 65_536,
    "max_step_tokens": 2**20,
    "max_queued": 2**24,
    "max_sequence_length": 2**24,
    "kv_pages": 2**24,
    "threads": 4096,
    "prefill_tokens_beside_decodes": 2**20,
}
"""Beyond these a number is a slip, and would take the machine's memory or its processes before it failed."""
_MOST_NAME_CHARACTERS = 256


def _validate(options: ServeOptions, sources: Mapping[str, str]) -> None:
    """Raises OptionsError for the first value out of range or pair that does not go together."""

    def require(holds: bool, name: str, complaint: str) -> None:
        if not holds:
            flag = flag_name(name)
            origin = "" if sources[name] in (flag, "default") else f" (from {sources[name]})"
            raise OptionsError(f"{flag} {complaint}{origin}")

    for name in ("port", "metrics_port"):
        require(0 <= getattr(options, name) <= 65535, name, "must be from 0 to 65535")
    same_port = options.port != 0 and options.port == options.metrics_port
    require(not same_port, "metrics_port", "must differ from --port")
    for name, most in _MOST.items():
        value = getattr(options, name)
        require(value is None or value >= 1, name, "must be at least 1")
        require(value is None or value <= most, name, f"must be at most {most}")
    sequences, tokens = options.max_sequences, options.max_step_tokens
    has_room = sequences is None or tokens is None or tokens >= sequences
    require(has_room, "max_step_tokens", f"must be at least --max-sequences, {sequences}")
    require(options.device >= 0, "device", "must not be negative")
    require(0 < options.memory_fraction <= 1, "memory_fraction", "must be above 0 and at most 1")
    step_us = options.simulated_step_us
    require(step_us >= 0, "simulated_step_us", "must not be negative")
    require(step_us < math.inf, "simulated_step_us", "must be finite")
    served = options.served_name
    is_name = served is None or (served.isprintable() and len(served) <= _MOST_NAME_CHARACTERS)
    require(is_name, "served_name", f"must be at most {_MOST_NAME_CHARACTERS} printable characters")
    timeout = options.drain_timeout
    require(timeout is None or timeout >= 0, "drain_timeout", "must not be negative")
    require((options.tls_cert is None) == (options.tls_key is None), "tls_cert", "and --tls-key go together")
    require(
        options.tls_client_ca is None or options.tls_cert is not None, "tls_client_ca", "needs --tls-cert"
    )
    for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
        path = getattr(options, name)
        require(path is None or path.is_file(), name, f"names {path}, which is not a file")
