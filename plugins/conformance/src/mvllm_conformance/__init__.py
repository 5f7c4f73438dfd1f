"""The conformance suite: tests that a platform plugin satisfies the platform contract.

    mvllm conformance --platform acme --report report.json
    pytest -p mvllm.testing.plugin --pyargs mvllm.testing.suite --mvllm-platform acme

`clauses` lists the clauses of the contract, `suite` has their tests (a file for each family), and `plugin` is the
pytest plugin that selects and reports them. Its published name is `mvllm.testing`, under which the tests of platforms
import it.
"""
