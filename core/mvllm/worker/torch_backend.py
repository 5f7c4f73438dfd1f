"""Torch has one place for a device that it does not know itself, PrivateUse1, and whoever takes it keeps it.

A library may take it as early as the import of torch, which loads what is registered in the group `torch.backends`. The
platform that comes second would fail with whatever its library makes of that; here it is told beforehand.
"""

from __future__ import annotations

import torch

from mvllm.errors import PlatformError
from mvllm.platform.interface import Platform


def check_torch_backend(platform: Platform) -> None:
    """Fails if the platform wants PrivateUse1 and another library has it.

    Raises:
        PlatformError: Names both, and says how to keep the other one away.
    """
    wanted = platform.spec.torch_backend
    if wanted is None:
        return
    owner = torch._C._get_privateuse1_backend_name()
    # Nobody's, it bears a name of torch's own that begins like this.
    if owner == wanted or owner.startswith("private"):
        return
    raise PlatformError(
        f"The platform {platform.spec.name!r} registers itself with torch as {wanted!r}, but torch's one place for a "
        f"foreign device (PrivateUse1) has been taken by {owner!r} already. Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 so "
        "that torch does not load that one by itself, or uninstall its package; `mvllm doctor` names it."
    )
