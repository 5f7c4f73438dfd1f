"""Calls platform plugins and checks their exceptions and return types.

Any exception of a plugin, `SystemExit` included, becomes a PlatformError that names the platform. A result of the wrong
type is an error here, where the caller is known.
"""

from __future__ import annotations

from typing import Any

from mvllm.errors import ConfigError, MvllmError, PlatformError
from mvllm.platform.attention import AttentionBackend, AttentionSpec
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.discovery import find_sources, needs_another_contract
from mvllm.platform.interface import Platform
from mvllm.platform.state import StateBackend, StateSpec


def call_checked(platform: Platform, what: str, *args: Any, returns: type | tuple[type, ...]) -> Any:
    """`platform.what(*args)`, or `platform.what` for a property.

    Args:
        what: Name of a method or property of Platform.
        returns: Permitted types of the result.

    Raises:
        ContractError: The platform uses something that the contract does not have.
        PlatformError: The platform raised another exception, or returned another type.
        MvllmError: The platform raised it.
    """
    name = f"The platform {platform.spec.name!r}"
    try:
        result = getattr(platform, what)
        if callable(result):
            result = result(*args)
    except (MvllmError, KeyboardInterrupt):
        raise
    except BaseException as e:
        for source in find_sources():
            if source.name == platform.spec.name and (contract_error := needs_another_contract(e, source)) is not None:
                raise contract_error from e
        raise PlatformError(f"{name} failed in {what}: {type(e).__name__}: {e}") from e
    if not isinstance(result, returns):
        kinds = returns if isinstance(returns, tuple) else (returns,)
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise PlatformError(f"{name} returned a {type(result).__name__} from {what}; it must return {expected}.")
    return result


def check_attention_capabilities(platform: Platform, spec: AttentionSpec) -> None:
    """Raises PlatformError if the platform does not declare a capability that the spec needs."""
    claimed: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    required = {
        "sliding_window": spec.sliding_window is not None,
        "soft_cap": spec.soft_cap is not None,
        "sinks": spec.sinks,
        "mla": spec.values_in_keys or spec.value_size != spec.head_size,
        "non_causal_spans": spec.non_causal_spans,
    }
    if spec.index_topk is not None and not claimed.sparse_attention:
        raise PlatformError(
            f"The model attends to {spec.index_topk} selected tokens of longer sequences (sparse_attention), which the "
            f"platform {platform.spec.name!r} does not support. Set max_model_len to at most {spec.index_topk}, or "
            "choose another platform."
        )
    missing = [name for name, needed in required.items() if needed and not getattr(claimed, name)]
    if missing:
        raise PlatformError(
            f"The model's attention needs {', '.join(missing)}, which the platform {platform.spec.name!r} does not "
            "support. Choose another platform."
        )


def check_kv_transfer(platform: Platform) -> None:
    """Raises ConfigError if the platform does not claim that blocks can be copied to host memory."""
    claimed: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    if not claimed.kv_transfer:
        raise ConfigError(
            f"Keys and values were to be copied to host memory, but the platform {platform.spec.name!r} does not claim "
            "Capabilities.kv_transfer. Leave out the settings that store them outside of the device, or choose another "
            "platform."
        )


def checked_attention_backend(platform: Platform, spec: AttentionSpec) -> AttentionBackend:
    """The platform's backend for `spec`, after a check of the capabilities that the spec needs.

    Raises:
        PlatformError: The platform does not declare a capability that the spec needs, or has no backend for it.
    """
    check_attention_capabilities(platform, spec)
    backend: AttentionBackend = call_checked(platform, "attention_backend", spec, returns=AttentionBackend)
    return backend


def checked_state_backend(platform: Platform, spec: StateSpec) -> StateBackend:
    """The platform's backend for `spec`.

    Raises:
        ConfigError: The platform does not claim `Capabilities.state`.
        PlatformError: The platform has no backend for it.
    """
    claimed: Capabilities = call_checked(platform, "capabilities", returns=Capabilities)
    if not claimed.state:
        raise ConfigError(
            f"The model has layers with a sequence state ({spec.bytes_per_sequence:,} bytes per sequence and layer), "
            f"but the platform {platform.spec.name!r} does not claim Capabilities.state. Choose another platform, or a "
            "model with attention only."
        )
    backend: StateBackend = call_checked(platform, "state_backend", spec, returns=StateBackend)
    return backend
