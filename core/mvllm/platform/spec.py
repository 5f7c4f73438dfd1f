"""Types that a plugin returns before its device code is imported: spec, probe result, plan and diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from mvllm.contract import ANY_PROCESS, Phase, phase

CONTRACT: tuple[int, int] = (1, 1)
"""Contract version of this core. A plugin is compatible if its major is equal and its minor is not greater."""

ENTRY_POINT_GROUP = "mvllm.platforms"
"""Entry points of this group are platform plugins: users type the name; the value is a light hook module."""


@phase(ANY_PROCESS)
@dataclass(frozen=True)
class PlatformSpec:
    """Name, versions and entry functions of a plugin, returned by its `mvllm_platform` hook.

    Made at discovery. Building it must import neither torch nor a device library.

    Attributes:
        name: The name that users type, equal to the entry point's name.
        vendor: Vendor of the hardware or software, for listings.
        contract: The contract version the plugin was written against, as (major, minor).
        probe: `package.module:function` returning a ProbeResult.
        factory: `package.module:function` returning a Platform.
        torch_floor: Lowest supported torch version, or None if the plugin needs no torch.
        priority: Order in listings, higher first. It does not affect the choice.
        by_name_only: The platform is never chosen automatically, only by name (for instance a device for tests that is
            installed beside real ones).
        torch_backend: The name under which its device library registers in PrivateUse1, torch's only slot for an
            out-of-tree device; None if it does not. Core reports two libraries that use the slot.
        probe_in_process: Since contract 1.1. The probe loads no library that could end the process, so core runs it
            where it needs the result. Otherwise core runs it in a child process, which takes 0.2 s of a start.
        is_host: Since contract 1.1. The platform computes on the processors of the host and has no device of its own,
            so that a single available platform with a device is chosen before it. By default it has a device.
    """

    name: str
    vendor: str
    contract: tuple[int, int]
    probe: str
    factory: str
    torch_floor: str | None = None
    priority: int = 0
    by_name_only: bool = False
    torch_backend: str | None = None
    probe_in_process: bool = False
    is_host: bool = False


@phase(Phase.PROBE)
@dataclass(frozen=True)
class DeviceInfo:
    """One device that a probe found. Part of a ProbeResult.

    Attributes:
        index: Position in the platform's order.
        name: Product name.
        memory_bytes: Total memory, or None if the probe does not know it.
    """

    index: int
    name: str
    memory_bytes: int | None = None


@phase(ANY_PROCESS)
@dataclass(frozen=True)
class ProbeResult:
    """Whether a platform can be used on this machine.

    Also made before a fork. A probe takes under a second, imports no torch, and does not initialise
    a driver in a way that breaks a later fork.

    Attributes:
        available: Whether it can be used.
        reason: Why it is not available, or what was found.
        devices: The devices found.
        remedy: What the user can do when it is not available.
    """

    available: bool
    reason: str
    devices: tuple[DeviceInfo, ...] = ()
    remedy: str | None = None


@phase(Phase.FRONTEND)
class CheckStatus(Enum):
    """Outcome of one diagnostic."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@phase(Phase.FRONTEND)
@dataclass(frozen=True)
class Check:
    """One line of `mvllm doctor`. Returned by `Platform.doctor`.

    Attributes:
        id: Stable identifier, `area.subject` in lower case.
        status: OK, WARNING (works, but slower or at risk) or BROKEN.
        found: What was found.
        remedy: How to fix it, when not OK.
    """

    id: str
    status: CheckStatus
    found: str
    remedy: str | None = None


@phase(Phase.FRONTEND)
@dataclass(frozen=True)
class ConfigChange:
    """A changed setting. Part of a Plan.

    Attributes:
        field: Dotted name as in EngineConfig, for instance `cache.block_size`; an unknown one is a ConfigError.
        value: The new value, of the field's type.
        reason: Why, for the log.
    """

    field: str
    value: object
    reason: str


@phase(Phase.FRONTEND)
@dataclass(frozen=True)
class Plan:
    """A platform accepts a configuration. Returned by `Platform.plan`.

    Attributes:
        changes: Changes that core applies, in this order, and logs with the reasons.
    """

    changes: tuple[ConfigChange, ...] = ()


@phase(Phase.FRONTEND)
@dataclass(frozen=True)
class Refusal:
    """Why a configuration is not supported, and what to set instead. Part of Refusals.

    Attributes:
        field: Dotted name in EngineConfig of the unsupported setting.
        reason: What is not supported, as a sentence.
        remedy: What the user can set instead, as a sentence.
    """

    field: str
    reason: str
    remedy: str


@phase(Phase.FRONTEND)
@dataclass(frozen=True)
class Refusals:
    """A platform refuses a configuration. Returned by `Platform.plan`; core raises a ConfigError.

    Attributes:
        reasons: At least one.
    """

    reasons: Sequence[Refusal] = field(default_factory=tuple)
