"""The conformance suite: a vendor proves with it that a platform plugin keeps the contract.

    mvllm conformance --platform acme --report report.json
    pytest -p mvllm.testing.plugin --pyargs mvllm.testing.suite --mvllm-platform acme

`clauses` is the list of what is checked, `suite` the checks (a file for each family of clauses), `plugin` what makes
pytest understand them. Needs `mvllm[testing]`; nothing of it is loaded unless somebody asks.
"""
