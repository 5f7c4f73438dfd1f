"""Asks a platform plugin for something, and holds it to what the contract says it returns.

A plugin is other people's code: whatever it raises, `SystemExit` included, is reported as an error of the platform, by
name, and an answer of the wrong kind is refused here rather than tripped over far away.
"""

from __future__ import annotations

from typing import Any

from mvllm.errors import MvllmError, PlatformError
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.interface import Platform


def call_checked(platform: Platform, what: str, *args: Any, returns: type | tuple[type, ...]) -> Any:
    """`platform.what(*args)`, or `platform.what` where it is no method.

    Args:
        what: Name of a method or property of Platform.
        returns: Permitted types of the answer.

    Raises:
        PlatformError: The platform raised something of its own, or answered something else.
        MvllmError: What the platform itself said in the contract's terms.
    """
    name = f"The platform {platform.spec.name!r}"
    try:
        answer = getattr(platform, what)
        if callable(answer):
            answer = answer(*args)
    except (MvllmError, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise PlatformError(f"{name} failed in {what}: {type(e).__name__}: {e}") from e
    if not isinstance(answer, returns):
        kinds = returns if isinstance(returns, tuple) else (returns,)
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise PlatformError(f"{name} answered {what} with a {type(answer).__name__}; the contract says {expected}.")
    return answer


def checked_attention_backend(platform: Platform, spec: AttentionSpec) -> AttentionBackend:
    """The platform's backend for `spec`. What the platform does not claim is refused here, whatever its backend takes.

    Raises:
        PlatformError: The platform does not claim what the spec needs, or has no backend for it.
    """
    claimed: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    wanted = {
        "sliding_window": spec.sliding_window is not None,
        "soft_cap": spec.soft_cap is not None,
        "sinks": spec.sinks,
        "mla": spec.values_in_keys or spec.value_size != spec.head_size,
    }
    missing = [name for name, needed in wanted.items() if needed and not getattr(claimed, name)]
    if missing:
        raise PlatformError(
            f"The model's attention needs {', '.join(missing)}, which the platform {platform.spec.name!r} does not "
            "claim. Choose another platform."
        )
    backend: AttentionBackend = call_checked(platform, "attention_backend", spec, returns=AttentionBackend)
    return backend
