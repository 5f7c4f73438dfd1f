"""Mutants of the example device with faults in copies of blocks and states: the fields of `mutants.Mutant`."""

from __future__ import annotations

_BEFORE = "    def build_metadata(self, batch"


def _method(code: str) -> tuple[str, str, str]:
    """Adds a method to the attention backend; `code` is indented like a module's."""
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    return "attention.py", _BEFORE, f"{indented}\n{_BEFORE}"


def _state_method(code: str) -> tuple[str, str, str]:
    """Lets the platform return a state backend with this method."""
    indented = "".join(f"            {line}\n" for line in code.splitlines())
    before = "    def doctor(self)"
    added = (
        "    def state_backend(self, spec):\n"
        f"        class Faulty(api.StateBackend):\n{indented}\n        return Faulty(spec)\n\n"
    )
    return "platform.py", before, added + before


_WITHOUT_VALUES = """\
def export_blocks(self, kv, blocks, out):
    super().export_blocks(kv, blocks, out).wait()
    out[:, out.shape[1] // 2 :] = 0
"""
_ONE_BLOCK_MORE = """\
def import_blocks(self, kv, blocks, data):
    super().import_blocks(kv, blocks, data)
    super().import_blocks(kv, (blocks[:1] * 0 + blocks.max() + 1) % 6, data[:1])
"""
_LATE = """\
def {name}(self, kv, blocks, data):
    import types

    return types.SimpleNamespace(wait=lambda: api.AttentionBackend.{name}(self, kv, blocks, data))
"""
_ONE_BUFFER = """\
def export_blocks(self, kv, blocks, out):
    import types

    import numpy as np

    found = np.empty_like(out)
    api.AttentionBackend.export_blocks(self, kv, blocks, found)
    type(self).buffer = found

    def wait():
        out[:] = type(self).buffer[: len(out)]

    return types.SimpleNamespace(wait=wait)
"""
_FORMAT_WITHOUT_BLOCK_SIZE = """\
def block_format(self, kv, block_size):
    return str(self.spec)
"""
_FORMAT_WITH_NUMBER_OF_BLOCKS = """\
def block_format(self, kv, block_size):
    return f"{super().block_format(kv, block_size)} of {self.kv_bytes(kv)}"
"""
_NEXT_SLOT = """\
def import_slots(self, state, slots, data):
    return super().import_slots(state, (slots + 1) % (len(state[0]) - 1), data)
"""
_ONE_FORMAT = """\
def slot_format(self):
    return "states"
"""

KV_TRANSFER_MUTANTS = (
    ("half of a block is exported", "KVT-01", *_method(_WITHOUT_VALUES)),
    ("an import writes to one block more", "KVT-02", *_method(_ONE_BLOCK_MORE)),
    ("an export reads blocks when it is waited for", "KVT-03", *_method(_LATE.format(name="export_blocks"))),
    ("an import writes blocks when it is waited for", "KVT-03", *_method(_LATE.format(name="import_blocks"))),
    ("all exports have one buffer", "KVT-03", *_method(_ONE_BUFFER)),
    ("the format of blocks lacks the block size", "KVT-04", *_method(_FORMAT_WITHOUT_BLOCK_SIZE)),
    ("the format of blocks depends on their number", "KVT-04", *_method(_FORMAT_WITH_NUMBER_OF_BLOCKS)),
    ("a state is imported to the next slot", "KVT-05", *_state_method(_NEXT_SLOT)),
    ("all states have one format", "KVT-05", *_state_method(_ONE_FORMAT)),
)
