"""Every setting of the server, in one frozen object that is read once, at the edge.

Three sources, the later one wins: a YAML file, the environment (``DFLASH_`` and the name in capitals,
for plain fields), flags. No setting is read from the environment anywhere else.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.addresses import Address

EMBEDDED = "embedded"
ENVIRONMENT_PREFIX = "DFLASH_"

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Transport = Literal["ref", "value", "auto"]


class SettingsError(ValueError):
    """Settings that cannot be used; the message has one line per fault."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Strict):
    """Where the replicas of one deployment run, and how many."""

    replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)  # set: Serve scales between replicas and this
    downscale_delay_s: float = Field(default=600.0, ge=0)  # fewer must have done for so long before one stops
    num_cpus: float = Field(default=1.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)  # custom ones, such as apple_silicon

    @model_validator(mode="after")
    def _order(self) -> "Place":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas})")
        return self


class Placement(_Strict):
    """One ``Place`` per deployment. The defaults fit a machine of two cores."""

    router: Place = Place(num_cpus=0.5)
    target: Place = Place(num_cpus=1.0)
    drafter: Place = Place(num_cpus=0.5)


class Settings(_Strict):
    """What a person may choose. Names are YAML keys and environment variables; ``up`` has flags for some."""

    # What is served.
    target: str = EMBEDDED  # "embedded", a path or a hub id
    drafter: str | None = EMBEDDED  # likewise; None: no drafter, every round is classic
    served_model_names: tuple[str, ...] = (
        "dflash-embedded",
        "demo",
    )  # the first is the name, the rest aliases
    max_context: int | None = Field(default=None, ge=16)  # None: the model's own

    # Where it listens.
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 9000
    address: str | None = None  # a running Ray cluster to join; None: start one here
    api_keys_file: Path | None = None
    api_keys: tuple[SecretStr, ...] = ()  # from DFLASH_API_KEYS, with commas; a flag would show in ps
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)

    # Windows and queue.
    max_rows: int = Field(default=16, ge=1, le=256)  # rows of a window
    max_windows: int = Field(default=2, ge=1, le=8)  # windows that one target replica holds
    windows_per_router: int = Field(default=1, ge=1, le=64)  # windows a router fills on each lane
    max_queue: int = Field(default=64, ge=0)  # waiting requests per router; beyond: 429
    request_timeout_s: Seconds = 300.0
    window_max_age_s: Seconds = 30.0
    block_width: int | None = Field(default=None, ge=1, le=64)  # None: chosen per round from measured costs
    calibration_s: float = Field(
        default=10.0, ge=0
    )  # time to measure those costs at start; 0: the full block
    probe_s: float = Field(default=10.0, ge=0)  # time to probe at start which shapes of rounds change bits
    strict: bool = False  # rounds use only shapes that change no bit; where no block does, no drafts
    # Keeps measured costs and the probe's findings from one start to the next; none: nothing is kept.
    # ``load_settings`` fills in the user's cache directory.
    cache_dir: Path | None = None

    # Lanes elsewhere: clusters that serve the same model, by their gRPC addresses (host:port, or
    # grpcs://host:port under TLS; with commas).
    remote_lanes: tuple[str, ...] = ()
    remote_ca_file: Path | None = None  # PEM, whom to trust under TLS; None: the authorities that gRPC ships
    remote_key_file: Path | None = None  # the key that they ask for
    remote_key: SecretStr | None = None  # likewise, from DFLASH_REMOTE_KEY; a flag would show in ps
    local_lanes: bool = True  # False: no target here, every row goes to a remote lane

    # Exchange between target and drafter.
    transport: Transport = "auto"
    ref_threshold_bytes: int = Field(default=2**20, ge=0)  # auto: arrays from here on go as refs
    # A draft that takes three times the median of its shape (at least 50 ms) is abandoned, and the round is
    # classic. So long is waited while that median is not known, and never longer.
    draft_timeout_s: Seconds = 2.0
    feature_bytes: int | None = Field(default=None, ge=2**20)  # features kept per target replica, in case
    # the drafter loses them (retention.py tells what happens beyond); None: 10 % of the object store
    session_ttl_s: Seconds = 60.0  # idle drafter state is dropped after this

    # Saved states of chats per target replica. None: 5 % of memory, at most 2 GiB; 0 or strict: none is kept.
    prefix_bytes: int | None = Field(default=None, ge=0)

    # Visibility.
    log_format: Literal["text", "json"] = "text"
    log_dir: Path | None = None  # a file for each replica; None: standard error, which Ray keeps
    trace_endpoint: str | None = None  # an OTLP collector's address; None: nothing is sent
    trace_round_every: int = Field(default=16, ge=0)  # which rounds of a traced request are told; 0: none

    # Machines.
    blas_threads: int | None = Field(default=None, ge=1)  # None: cores shared out over the MLX replicas
    placement: Placement = Placement()

    @field_validator("served_model_names", "api_keys", "remote_lanes", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("served_model_names")
    @classmethod
    def _has_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or not all(names):
            raise ValueError("at least one name, none of them empty")
        return names

    @field_validator("drafter", "cache_dir", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value in ("", "none") else value

    @model_validator(mode="before")
    @classmethod
    def _named_after_target(cls, values: Any) -> Any:
        """Without a name of its own, a model that is not the embedded one is called after its target."""
        if not isinstance(values, Mapping) or values.get("served_model_names") is not None:
            return values
        target = values.get("target", EMBEDDED)
        if not isinstance(target, str) or target == EMBEDDED:
            return values
        return {**values, "served_model_names": (model_name(target),)}

    @field_validator("remote_lanes")
    @classmethod
    def _are_addresses(cls, lanes: tuple[str, ...]) -> tuple[str, ...]:
        targets = [Address.parse(lane).target for lane in lanes]
        if len(set(targets)) < len(targets):
            raise ValueError("an address is named twice")
        return lanes

    @model_validator(mode="after")
    def _has_lanes(self) -> "Settings":
        if not self.local_lanes and not self.remote_lanes:
            raise ValueError("local_lanes is off and remote_lanes names none: there is nowhere to play")
        return self

    @model_validator(mode="after")
    def _trusts_somebody(self) -> "Settings":
        if self.remote_ca_file and not any(Address.parse(lane).is_secure for lane in self.remote_lanes):
            raise ValueError(
                "remote_ca_file is set, but no remote lane is called under TLS (grpcs://host:port)"
            )
        return self

    @property
    def grace_s(self) -> float:
        """How long a replica may drain: the oldest window's joins, and the longest row after them."""
        return self.window_max_age_s + self.request_timeout_s + 10.0

    @property
    def places(self) -> Mapping[str, Place]:
        """Where each deployment runs, of those that there are."""
        places = self.placement
        found = {"Router": places.router}
        if self.local_lanes:
            found["Target"] = places.target
            if self.drafter is not None:
                found["Drafter"] = places.drafter
        return found

    @property
    def wanted_prefix_bytes(self) -> int | None:
        """Room for saved states as asked for; None leaves it to the machine.

        ``strict`` has no use for them: a state that was made in other chunks may differ in its last bits.
        """
        return 0 if self.strict else self.prefix_bytes

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @classmethod
    def of(cls, value: "Settings | Mapping[str, Any]") -> "Settings":
        """Validate what an application builder was given; a plain mapping reads the environment too."""
        return value if isinstance(value, Settings) else load_settings(flags=value)


def load_settings(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Merge file, environment and flags. Flags that are None do not count.

    Raises SettingsError with one readable line per fault.
    """
    environment = os.environ if environment is None else environment
    merged: dict[str, Any] = {"cache_dir": find_cache_dir(environment)}
    merged |= _read_file(file) if file is not None else {}
    merged |= _read_environment(environment)
    for name, instead in (("api_keys", "api_keys_file"), ("remote_key", "remote_key_file")):
        if flags and flags.get(name) is not None:
            variable = ENVIRONMENT_PREFIX + name.upper()
            raise SettingsError(f"{name}: never a flag; use the variable {variable}, or {instead}")
    merged |= {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from None


def find_cache_dir(environment: Mapping[str, str]) -> Path | None:
    """Where results that cost time are kept: ``DFLASH_CACHE_DIR``, else in the user's cache directory."""
    own = environment.get(f"{ENVIRONMENT_PREFIX}CACHE_DIR")
    if own is not None:
        return None if own in ("", "none") else Path(own)
    try:
        users = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return users / "dflash-serve" if users.is_absolute() else None


def model_name(model: str) -> str:
    """The name that a target or a drafter goes by: its hub id, or its directory's name."""
    path = Path(model).expanduser()
    is_hub_id = not path.exists() and not path.is_absolute() and model.count("/") == 1
    return model.partition("@")[0] if is_hub_id else path.resolve().name


def _read_file(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not YAML ({error})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"{file}: expected a mapping of setting names to values")
    return content


def _read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    plain = {name for name in Settings.model_fields if name != "placement"}
    found = {name: environment.get(ENVIRONMENT_PREFIX + name.upper()) for name in plain}
    return {name: value for name, value in found.items() if value is not None}


def _explain(error: ValidationError) -> str:
    lines: list[str] = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"]) or "settings"
        if fault["type"] == "extra_forbidden":
            known = ", ".join(sorted(Settings.model_fields))
            lines.append(f"{where}: there is no such setting (known: {known})")
        else:
            # What was meant as a key is not shown, however wrong it is.
            is_secret = fault["loc"][:1] in (("api_keys",), ("remote_key",))
            got = "" if is_secret else f", got {fault['input']!r}"
            lines.append(f"{where}: {fault['msg']}{got}")
    return "\n".join(lines)
