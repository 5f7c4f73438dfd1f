"""The platform under test, as far as it can be had: a plugin that does not load still has clauses to fail."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, fields

from mvllm.errors import MvllmError
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.choose import choose_platform
from mvllm.platform.discovery import Candidate, discover
from mvllm.plugin_api import Capabilities, ContractError, Platform, PlatformError
from mvllm.testing import report


@dataclass
class PlatformUnderTest:
    """A platform, by name.

    Attributes:
        name: What users type.
        without_device: Only what needs no device is examined, whether the probe finds one or not.
        environment: This process' variables before it had probed anything.
    """

    name: str
    without_device: bool = False
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ), repr=False, compare=False)
    _cache: dict[str, Platform] = field(default_factory=dict)

    @functools.cached_property
    def candidate(self) -> Candidate | None:
        """What discovery found under the name; None when there is no such plugin."""
        found = discover(only=self.name)
        return found[0] if found else None

    @property
    def platform(self) -> Platform:
        """The platform object.

        Raises:
            PlatformError, ContractError: It cannot be had.
        """
        if self.name not in self._cache:
            chosen = choose_platform(self.name, available_only=not self.without_device)
            self._cache[self.name] = chosen.platform
        return self._cache[self.name]

    @functools.cached_property
    def error(self) -> str:
        """Why there is no platform object; empty when there is one."""
        try:
            call_checked(self.platform, "capabilities", returns=Capabilities)
        except (PlatformError, ContractError) as e:
            return str(e)
        return ""

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What the platform claims. One that cannot be had claims the least, and every test says why it fails."""
        if self.error:
            return Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
        return self.platform.capabilities

    @property
    def contract(self) -> tuple[int, int] | None:
        """The contract version that the plugin was written against, where that is known."""
        spec = self.candidate.spec if self.candidate else None
        return spec.contract if spec else None

    @property
    def num_devices(self) -> int:
        """Devices that the probe saw."""
        probe = self.candidate.probe if self.candidate else None
        return len(probe.devices) if probe else 0

    def describe(self) -> report.Subject:
        """For the report."""
        candidate = self.candidate
        if candidate is None:
            return report.Subject(self.name)
        devices = candidate.probe.devices if candidate.probe else ()
        shown = {} if self.error else {f.name: _text(getattr(self.capabilities, f.name)) for f in fields(Capabilities)}
        return report.Subject(
            platform=self.name,
            distribution=candidate.source.distribution,
            version=candidate.source.version,
            contract=".".join(map(str, candidate.spec.contract)) if candidate.spec else "",
            vendor=candidate.spec.vendor if candidate.spec else "",
            devices=tuple(
                f"{d.name}" + (f", {d.memory_bytes / 2**30:.1f} GiB" if d.memory_bytes else "") for d in devices
            ),
            capabilities=shown,
        )


def find_platform_under_test(name: str | None, without_device: bool = False) -> PlatformUnderTest:
    """The platform asked for, or the only one there is.

    Raises:
        MvllmError: Nobody said which, and it is not obvious.
    """
    if name is not None:
        return PlatformUnderTest(name, without_device)
    environment = dict(os.environ)
    try:
        return PlatformUnderTest(choose_platform().source.name, without_device, environment)
    except MvllmError as e:
        raise PlatformError(f"Say which platform to examine with --mvllm-platform NAME. {e}") from e


def _text(value: object) -> str:
    if isinstance(value, frozenset | tuple):
        return ", ".join(sorted(value) if isinstance(value, frozenset) else map(str, value)) or "none"
    return str(value)
