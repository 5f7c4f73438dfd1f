"""Checks that torch's PrivateUse1 device, of which there is one per process, is free for the platform.

A library may register itself as PrivateUse1 as early as the import of torch, which loads the entry points of
`torch.backends`. The platform's own registration would then fail with an unclear error; this check raises a clear one.
"""

from __future__ import annotations

import torch

from mvllm.errors import PlatformError
from mvllm.platform.interface import Platform


def check_torch_backend(platform: Platform) -> None:
    """Fails if the platform needs PrivateUse1 and another library is registered.

    Raises:
        PlatformError: Names both, and says how to keep the other library from loading.
    """
    wanted = platform.spec.torch_backend
    if wanted is None:
        return
    owner = torch._C._get_privateuse1_backend_name()
    # torch's own default name begins with "private".
    if owner == wanted or owner.startswith("private"):
        return
    raise PlatformError(
        f"The platform {platform.spec.name!r} registers itself with torch as {wanted!r}, but torch's only custom "
        f"device (PrivateUse1) is registered as {owner!r} already. Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 so that torch "
        "does not load that library, or uninstall its package; `mvllm doctor` names it."
    )
