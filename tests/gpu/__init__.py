"""Everything that a machine with a device is needed for, in one command and one table: docs/how-to/gpu-runs.md.

python -m tests.gpu [environment|conformance|parity|graphs|oom|bench ...] [--platform NAME] [--quick]
                    [--out FOLDER] [--budget SECONDS]
"""
