"""The identity card and the probe."""

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl


@hookimpl
def mvllm_platform():
    return PlatformSpec(
        name="frozen",
        vendor="Frozen Hardware Ltd.",
        contract=(1, 0),
        probe="mvllm_frozen.plugin:probe",
        factory="mvllm_frozen.platform:make_platform",
        torch_floor="2.6",
    )


def probe():
    return ProbeResult(True, "two imaginary devices", (DeviceInfo(0, "Ice One", 2**30), DeviceInfo(1, "Ice Two")))
