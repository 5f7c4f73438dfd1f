"""The platform under test. If its plugin cannot be loaded, its tests fail with the reason."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, fields

from mvllm.extension_api.testing import Candidate, call_checked, choose_platform, discover, dotted
from mvllm.plugin_api import Capabilities, ContractError, MvllmError, Platform, PlatformError
from mvllm_conformance import report

START_TIMEOUT = 180.0
"""Default of `PlatformUnderTest.start_timeout`."""


@dataclass
class PlatformUnderTest:
    """A platform, by name.

    Attributes:
        name: The platform's name.
        without_device: Test only clauses that need no device, even if the probe finds one.
        environment: The environment variables of this process before the first probe.
        start_timeout: Seconds that `init_device`, `communicator` and each phase of an engine's start may take.
    """

    name: str
    without_device: bool = False
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ), repr=False, compare=False)
    start_timeout: float = START_TIMEOUT
    _cache: dict[str, Platform] = field(default_factory=dict)

    @functools.cached_property
    def candidate(self) -> Candidate | None:
        """The discovered plugin; None if there is none with the name."""
        found = discover(only=self.name)
        return found[0] if found else None

    @property
    def platform(self) -> Platform:
        """The platform object.

        Raises:
            PlatformError, ContractError: The platform cannot be loaded.
        """
        if self.name not in self._cache:
            chosen = choose_platform(self.name, available_only=not self.without_device)
            self._cache[self.name] = chosen.platform
        return self._cache[self.name]

    @functools.cached_property
    def error(self) -> str:
        """Why the platform cannot be loaded; empty if it can."""
        try:
            call_checked(self.platform, "capabilities", returns=Capabilities)
        except (PlatformError, ContractError) as e:
            return str(e)
        return ""

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The claimed capabilities; a minimal set if the platform cannot be loaded."""
        if self.error:
            return Capabilities(dtypes=("float32",), kv_dtypes=("float32",))
        return self.platform.capabilities

    @property
    def contract(self) -> tuple[int, int] | None:
        """The contract version of the plugin; None if it is unknown or no version."""
        spec = self.candidate.spec if self.candidate else None
        return spec.contract if spec and dotted(spec.contract) != repr(spec.contract) else None

    @property
    def num_devices(self) -> int:
        """Number of devices that the probe found."""
        probe = self.candidate.probe if self.candidate else None
        return len(probe.devices) if probe else 0

    def describe(self) -> report.Subject:
        """The platform's entry in the report."""
        candidate = self.candidate
        if candidate is None:
            return report.Subject(self.name)
        devices = candidate.probe.devices if candidate.probe else ()
        shown = {} if self.error else {f.name: _text(getattr(self.capabilities, f.name)) for f in fields(Capabilities)}
        return report.Subject(
            platform=self.name,
            distribution=candidate.source.distribution,
            version=candidate.source.version,
            contract=dotted(candidate.spec.contract) if candidate.spec else "",
            vendor=candidate.spec.vendor if candidate.spec else "",
            devices=tuple(
                f"{d.name}" + (f", {d.memory_bytes / 2**30:.1f} GiB" if d.memory_bytes else "") for d in devices
            ),
            capabilities=shown,
        )


def find_platform_under_test(
    name: str | None, without_device: bool = False, start_timeout: float = START_TIMEOUT
) -> PlatformUnderTest:
    """The platform with a name, or the only available one.

    Raises:
        PlatformError: No name is given, and there is not exactly one available platform.
    """
    if name is not None:
        return PlatformUnderTest(name, without_device, start_timeout=start_timeout)
    environment = dict(os.environ)
    try:
        return PlatformUnderTest(choose_platform().source.name, without_device, environment, start_timeout)
    except MvllmError as e:
        raise PlatformError(f"Name the platform to test with --mvllm-platform NAME. {e}") from e


def _text(value: object) -> str:
    if isinstance(value, frozenset | tuple):
        return ", ".join(sorted(value) if isinstance(value, frozenset) else map(str, value)) or "none"
    return str(value)
