"""For packages that choose a platform and call its methods themselves, as a command that shows what it can do."""

from mvllm.platform.choose import choose_platform as choose_platform
from mvllm.platform.phases import enter_phase as enter_phase

__all__ = ["choose_platform", "enter_phase"]
