"""Mutants of the example device with faults in sequence states: the fields of `mutants.Mutant`."""

from __future__ import annotations

_BEFORE = "    def doctor(self)"


def _backend(code: str) -> tuple[str, str, str]:
    """Lets the platform return a state backend with these methods; `code` is indented like a module's."""
    indented = "".join(f"            {line}\n" for line in code.splitlines())
    added = (
        "    def state_backend(self, spec):\n        import dataclasses\n\n        import torch\n\n"
        f"        class Faulty(api.StateBackend):\n{indented}\n        return Faulty(spec)\n\n"
    )
    return "platform.py", _BEFORE, added + _BEFORE


def _metadata(code: str) -> tuple[str, str, str]:
    """Lets the state backend return `code`, an expression of `found`, its metadata, and of the `layout`."""
    return _backend(
        "def build_metadata(self, layout):\n"
        f"    found = super().build_metadata(layout)\n    return dataclasses.replace(found, {code})\n"
    )


def _operation(op: str, code: str) -> tuple[str, str, str]:
    """Replaces an operation by a function of `a`, its arguments, that may call the reference `exact`."""
    before = '    return [\n        api.OpProvider("rms_norm"'
    indented = "".join(f"        {line}\n" for line in code.splitlines())
    added = (
        f"    from mvllm.ops.all_schemas import SCHEMAS\n\n    exact = SCHEMAS[{op!r}].reference\n\n"
        f"    def faulty(*given):\n        a = list(given)\n{indented}\n"
        f'    return [\n        api.OpProvider({op!r}, "faulty", faulty, _supports),\n        api.OpProvider("rms_norm"'
    )
    return "attention.py", before, added


_STATE_BEFORE_THE_LAST_TOKEN = """\
before = a[7].clone()
result = exact(*a)
for i, (start, stop) in enumerate(zip(a[8].tolist(), a[8].tolist()[1:])):
    if stop - start > 1:
        row, count = slice(i, i + 1), stop - start - 1
        x, dt, b, c = (part[start : stop - 1] for part in (a[0], a[1], a[3], a[4]))
        bounds = torch.tensor([0, count], dtype=torch.int32).to(x.device)
        exact(x, dt, a[2], b, c, *a[5:7], before, bounds, a[9][row], a[10][row], count, *a[12:])
        a[7][a[10][row].long()] = before[a[10][row].long()]
return result
"""
_CHUNKS_FROM_ZEROS = """\
result = exact(*a)
for start, stop in zip(a[6].tolist(), a[6].tolist()[1:]):
    if stop - start > 64:
        rest, count = [part[start + 64 : stop] for part in a[:5]], stop - start - 64
        bounds, none = (torch.tensor(x, dtype=torch.int32).to(result.device) for x in ([0, count], [-1]))
        result[start + 64 : stop] = exact(*rest, a[5], bounds, none, none, count, *a[10:])
return result
"""
_ONE_DECAY_PER_HEAD = """\
a[3] = a[3].mean(-1, keepdim=True).expand_as(a[3]).contiguous()
return exact(*a)
"""
_OVERWRITES_WHAT_IT_READS = """\
result, state, read, write = exact(*a), a[3], a[5].long(), a[6].long()
state[read.where(read >= 0, write)] = state[write]
return result
"""
_TAIL_ONE_OFF = """\
result, state, write = exact(*a), a[3], a[6].long()
state[write] = state[write].roll(1, -1)
return result
"""
_HALF_A_COPY = """\
def copy_slots(self, state, source, destination):
    for tensor in state:
        half = tensor.shape[1] // 2
        tensor[destination, :half] = tensor[source, :half]
"""
_NO_SCRATCH_MEMORY = """\
def allocate(self, num_slots, device):
    return super().allocate(num_slots - 1, device)
"""
_NOT_ZEROS = """\
def allocate(self, num_slots, device):
    return tuple(tensor + 0.5 for tensor in super().allocate(num_slots, device))
"""

STATE_MUTANTS = (
    ("there is no scratch memory", "STA-01", *_backend(_NO_SCRATCH_MEMORY)),
    ("new states are not zeros", "STA-01", *_backend(_NOT_ZEROS)),
    ("requests read each other's states", "STA-02", *_metadata("read_slots=found.read_slots.roll(1)")),
    (
        "the state of a new sequence is not reset",
        "STA-03",
        *_operation("ssd", "a[9] = a[9].clamp(min=0)\nreturn exact(*a)"),
    ),
    ("padding writes to slot 0", "STA-04", *_operation("ssd", "a[10] = a[10].clamp(min=0)\nreturn exact(*a)")),
    (
        "a state that others still read is overwritten",
        "STA-04",
        *_operation("causal_conv1d", _OVERWRITES_WHAT_IT_READS),
    ),
    ("the last inputs of a convolution are one off", "STA-05", *_operation("causal_conv1d", _TAIL_ONE_OFF)),
    (
        "the state after a prompt is that before its last token",
        "STA-05",
        *_operation("ssd", _STATE_BEFORE_THE_LAST_TOKEN),
    ),
    ("each chunk of a prompt starts from zeros", "STA-05", *_operation("gated_delta_rule", _CHUNKS_FROM_ZEROS)),
    ("the channels of a head decay alike", "OPS-01", *_operation("kda", _ONE_DECAY_PER_HEAD)),
    ("a prompt of kda starts each chunk from zeros", "STA-05", *_operation("kda", _CHUNKS_FROM_ZEROS)),
    (
        "the gate is left out of the norm",
        "OPS-01",
        *_operation("gated_rms_norm", "a[1] = None\nreturn exact(*a)"),
    ),
    ("half of a state is copied", "STA-06", *_backend(_HALF_A_COPY)),
    (
        "requests of larger steps read each other's states",
        "STA-07",
        *_metadata("read_slots=found.read_slots.roll(int(layout.num_requests > 5))"),
    ),
)
