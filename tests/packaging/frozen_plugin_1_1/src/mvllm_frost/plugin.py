"""The identity card and the probe."""

from mvllm.plugin_api import DeviceInfo, PlatformSpec, ProbeResult, hookimpl


@hookimpl
def mvllm_platform():
    return PlatformSpec(
        name="frost",
        vendor="Frozen Hardware Ltd.",
        contract=(1, 1),
        probe="mvllm_frost.plugin:probe",
        factory="mvllm_frost.platform:make_platform",
        torch_floor="2.6",
        probe_in_process=True,
    )


def probe():
    return ProbeResult(True, "an imaginary device", (DeviceInfo(0, "Frost One", 2**30),))
