"""The conformance suite: tests that a platform plugin satisfies the platform contract.

    mvllm conformance --platform acme --report report.json
    pytest -p mvllm.testing.plugin --pyargs mvllm.testing.suite --mvllm-platform acme

The package mvllm-conformance has it (docs/how-to/install.md#parts): `mvllm.testing.plugin` is the module `plugin` of
the package that the entry point `testing` of the group `mvllm.aliases` names.
"""

from mvllm.platform.module_aliases import alias_module

__path__: list[str] = []
__getattr__ = alias_module(__name__, part="conformance")
