"""The identity card of the platform that runs models as graphs."""

from mvllm.plugin_api import PlatformSpec, hookimpl


@hookimpl
def mvllm_platform():
    return PlatformSpec(
        name="frost-graphs",
        vendor="Frozen Hardware Ltd.",
        contract=(1, 1),
        probe="mvllm_frost.plugin:probe",
        factory="mvllm_frost.graph_platform:make_platform",
        by_name_only=True,
    )
