"""Runs everything that needs a device with one command and writes one table: docs/how-to/gpu-runs.md.

python -m tests.gpu [environment|conformance|parity|graphs|oom|bench ...] [--platform NAME] [--quick]
                    [--out FOLDER] [--budget SECONDS]
"""
