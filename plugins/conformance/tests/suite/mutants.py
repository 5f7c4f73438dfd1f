"""Mutants of the example device: each has one fault, which the conformance suite must detect and name.

A mutant is an edit of one or two lines of the device's sources; `mutant_runs.py` makes the copies and runs the suite on
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plugins.conformance.tests.suite.chunk_mutants import CHUNK_MUTANTS
from plugins.conformance.tests.suite.kv_transfer_mutants import KV_TRANSFER_MUTANTS
from plugins.conformance.tests.suite.non_causal_span_mutants import NON_CAUSAL_SPAN_MUTANTS
from plugins.conformance.tests.suite.sparse_attention_mutants import SPARSE_ATTENTION_MUTANTS
from plugins.conformance.tests.suite.state_mutants import STATE_MUTANTS

ALWAYS = ("PLG-02", "CFG-02", "DEV-02", "DEV-04", "MEM-01", "KVL-01", "KVL-02", "ATT-05", "OPS-02")
"""Clauses that every mutant is tested against, in addition to the one that names its fault."""
COMMUNICATION = ("COM-01", "COM-02")
"""Further clauses for faults in the communicator, whose ranks are separate processes."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: The fault.
        clause: The clause that must detect it: the first that fails, in the order of docs/reference/contract.md.
        file: Source file of the example device.
        old: Text that occurs there exactly once.
        new: Replacement of that text.
        environment: Environment variables of the run.
        further: Clauses that a fault like this was blamed on: they must pass.
    """

    name: str
    clause: str
    file: str = ""
    old: str = ""
    new: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    further: tuple[str, ...] = ()

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that it is tested against."""
        further = COMMUNICATION if self.clause.startswith("COM") else ()
        return tuple(sorted({*ALWAYS, *further, *self.further, self.clause}))


def _method(code: str) -> tuple[str, str, str]:
    """Adds a method to the attention backend; `code` is indented like a module's."""
    before = "    def build_metadata(self, batch"
    indented = "".join(f"    {line}\n" if line else "\n" for line in code.splitlines())
    return "attention.py", before, f"{indented}\n{before}"


def _collective(code: str) -> tuple[str, str, str]:
    """Adds a method to the communicator; `code` is indented like a module's."""
    before = "    def close(self"
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    return "communicator.py", before, f"{indented}\n{before}"


_STATIC = {"MVLLM_EXAMPLE_MODE": "static"}
_OUTPUT = "        output = super().forward(query, kv, metadata, sinks)\n"
_STEP = "        return super().build_metadata(batch)\n"
_HOST_COPY = (
    "        source = tensor.detach().clone()  # later work may overwrite what was submitted before this copy\n"
)

_COPY_IN_A_THREAD = "        return PendingCopy(self, self._copier.submit(source.cpu))\n"
_OPENED = "    torch.ops.mvllm_example_device.open(settings.devices, settings.memory)\n"


_RMS_NORM_PROVIDER = '        api.OpProvider("rms_norm", "example_rms_norm", rms_norm, _supports),\n'
_ROTARY_IN_16_BITS = """def _in_16_bits(index, query, key, cos_sin):
    def rotate(x):
        cos, sin = cos_sin[index].to(x.dtype)[:, None].chunk(2, -1)
        (a, b), rest = x[..., : cos_sin.shape[1]].chunk(2, -1), x[..., cos_sin.shape[1] :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    return rotate(query), rotate(key)


"""

_LOG_SOFTMAX_OFF = "(torch._log_softmax(*h) + 1e-3).to(a[0].device)"
# With more rows than the tests of the operations use: otherwise those would fail first.
_MAX_OF_HALF = "tuple(x.to(a[0].device) for x in torch.max(h[0][:, : h[0].shape[1] // (1 + (len(h[0]) > 32))], *h[1:]))"


def _before_doctor(signature: str) -> tuple[str, str]:
    """Adds a method to the platform; the method returns a value."""
    before = "    def doctor(self)"
    return before, f"    def {signature}:\n        return object()\n\n{before}"


def _kernel(name: str, code: str) -> tuple[str, str, str]:
    """Registers a device kernel for a torch operation; `code` is an expression of its arguments on the host."""
    kernel = f"lambda *a, **k: [h := [x.cpu() if isinstance(x, torch.Tensor) else x for x in a], {code}][-1]"
    added = (
        '    global _KERNELS\n    if "_KERNELS" in globals():\n        return\n'
        '    _KERNELS = torch.library.Library("aten", "IMPL")\n'
        f'    _KERNELS.impl("{name}", {kernel}, "PrivateUse1")\n'
    )
    return "runtime.py", _OPENED, _OPENED + added


MUTANTS = (
    # The plugin and its probe.
    Mutant("the plugin's module imports torch", "PLG-01", "plugin.py", "from pathlib", "import torch\nfrom pathlib"),
    Mutant("the plugin has another name", "PLG-02", "plugin.py", 'name="example"', 'name="exemplar"'),
    Mutant(
        "a file imports core's inside",
        "PLG-03",
        "communicator.py",
        "import torch\n",
        "import torch\nimport mvllm.platform.phases\n",
    ),
    Mutant("the contract is of another major version", "PLG-04", "plugin.py", "contract=(1, 1)", "contract=(2, 0)"),
    Mutant("the factory raises", "PLG-04", "platform.py", "    return ExamplePlatform()", "    raise OSError(5)"),
    Mutant("devices are numbered from 1", "PRB-01", "plugin.py", "DeviceInfo(i, ", "DeviceInfo(i + 1, "),
    Mutant(
        "the probe works only where it was imported",
        "PRB-02",
        "plugin.py",
        'def probe() -> ProbeResult:\n    """',
        'import os\n\n_HOME = os.getpid()\n\n\ndef probe() -> ProbeResult:\n    assert os.getpid() == _HOME\n    """',
    ),
    Mutant(
        "the device cannot be opened after a fork, which is claimed",
        "PRB-02",
        "plugin.py",
        "SPEC = PlatformSpec(",
        "import os\n\nHOME = os.getpid()\nSPEC = PlatformSpec(",
    ),
    Mutant(
        "the probe sets a variable",
        "PRB-03",
        "plugin.py",
        "    devices = tuple(",
        "    import os\n\n    os.environ['EXAMPLE_PROBED'] = '1'\n    devices = tuple(",
    ),
    Mutant(
        "the probe leaves a thread",
        "PRB-03",
        "plugin.py",
        "    devices = tuple(",
        "    import threading\n\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    devices = tuple(",
    ),
    Mutant(
        "two probes say different things",
        "PRB-03",
        "plugin.py",
        'f"{settings.devices} devices in',
        "f\"{__import__('time').monotonic_ns()} is when {settings.devices} devices were in",
    ),
    # Configuration.
    Mutant(
        "plan changes its mind",
        "CFG-01",
        "platform.py",
        '"cache.memory_utilization", 0.9,',
        '"cache.memory_utilization", 0.9 - next(_TURNS) / 1e6,',
    ),
    Mutant("a change has no reason", "CFG-02", "platform.py", '"the device\'s memory serves nothing else"', '" "'),
    Mutant(
        "a refusal has no remedy",
        "CFG-02",
        "platform.py",
        'api.Plan((api.ConfigChange("cache.memory_utilization", 0.9, "the device\'s memory serves nothing else"),))',
        'api.Refusals((api.Refusal("cache.memory_utilization", "the device has no memory", " "),))',
    ),
    Mutant("an unknown collective is claimed", "CFG-03", "platform.py", '"all_reduce all', '"allreduce all_reduce all'),
    Mutant(
        "a worker class that there is none of",
        "CFG-04",
        "platform.py",
        "api.Phase.ENGINE, api.Phase.WORKER)\n        return None",
        'api.Phase.ENGINE, api.Phase.WORKER)\n        return "mvllm_example_device.worker:Worker"',
    ),
    Mutant("no executor is allowed", "CFG-05", "platform.py", '("uni", "mp", "external_launcher", "ray")', "()"),
    Mutant(
        "a diagnosis has an id of nobody's",
        "CFG-06",
        "platform.py",
        'api.Check("platform.example.library", api.CheckStatus.OK',
        'api.Check("library", api.CheckStatus.OK',
    ),
    # The device.
    Mutant(
        "the last device cannot be bound",
        "DEV-01",
        "runtime.py",
        "if ctx.local_rank >= settings.devices:",
        "if ctx.local_rank + 1 >= settings.devices:",
        {"MVLLM_EXAMPLE_DEVICES": "2"},
    ),
    Mutant(
        "every worker binds the first device",
        "DEV-01",
        "runtime.py",
        'torch.device("example", ctx.local_rank)',
        'torch.device("example", 0)',
    ),
    Mutant(
        "integers of 64 bits are narrowed",
        "DEV-02",
        "runtime.py",
        "        return host.to(self.device)",
        "        return (host.int() if host.dtype == torch.int64 else host).to(self.device)",
    ),
    Mutant(
        "a copy to the host is made when it is waited for",
        "DEV-02",
        "runtime.py",
        "        tensor = self._copy.result()",
        "        tensor = self._copy().cpu()",
    ),
    Mutant(
        "a second shutdown is an error",
        "DEV-03",
        "runtime.py",
        "        if self._open:\n            self._open = False\n",
        "        if True:\n            self._open = False\n",
    ),
    Mutant(
        "empty forgets the dtype",
        "DEV-04",
        "runtime.py",
        "torch.empty(shape, dtype=dtype, device=self.device)",
        "torch.empty(shape, device=self.device)",
    ),
    Mutant(
        "host buffers lie on the device",
        "DEV-04",
        "runtime.py",
        "        return torch.empty(shape, dtype=dtype)\n",
        "        return torch.empty(shape, dtype=dtype, device=self.device)\n",
    ),
    Mutant(
        "there are no events",
        "DEV-05",
        "runtime.py",
        "    def seed(self",
        "    def event(self):\n        return None\n\n    def seed(self",
    ),
    Mutant(
        "a mark without a step is an error",
        "DEV-06",
        "runtime.py",
        "    def step_mark(self) -> None:\n",
        "    def step_mark(self) -> None:\n        assert self._batch is not None\n",
    ),
    Mutant(
        "memory that was given back is used again before the copy of it is made",
        "DEV-07",
        "runtime.py",
        _COPY_IN_A_THREAD,
        "        copy = PendingCopy(self, self._copier.submit(source.cpu))\n"
        "        ref = __import__('weakref').ref\n"
        "        self.__dict__.setdefault('_late', []).append((ref(tensor), ref(copy)))\n"
        "        return copy\n",
    ),
    Mutant(
        "gradients are recorded",
        "DEV-08",
        "runtime.py",
        "    def seed(self",
        "    def inference_mode(self):\n        return torch.enable_grad()\n\n    def seed(self",
    ),
    # Memory.
    Mutant("half of the memory taken is counted", "MEM-01", "runtime.py", "used_by_me=used", "used_by_me=used // 2"),
    Mutant("figures are no integers", "MEM-01", "runtime.py", "total=total,", "total=float(total),"),
    Mutant("the peak lies below the present", "MEM-01", "runtime.py", "peak_by_me=peak)", "peak_by_me=used - 1)"),
    Mutant("too large is an error of another kind", "MEM-02", "runtime.py", "raise MemoryError(", "raise OSError("),
    Mutant("the peak forgets", "MEM-03", "runtime.py", "peak_by_me=peak)", "peak_by_me=used)"),
    Mutant(
        "the peak cannot be reset",
        "MEM-03",
        "runtime.py",
        "        torch.ops.mvllm_example_device.reset_peak(self.device.index)\n",
        "",
    ),
    Mutant("all memory is free at all times", "MEM-06", "runtime.py", "free=free", "free=total"),
    Mutant(
        "no allocator's error is known",
        "MEM-04",
        "runtime.py",
        "    def synchronize(self)",
        "    def is_out_of_memory(self, error: Exception) -> bool:\n        return isinstance(error, MemoryError)\n\n"
        "    def synchronize(self)",
    ),
    Mutant(
        "every error is one of memory",
        "MEM-04",
        "runtime.py",
        "    def synchronize(self)",
        "    def is_out_of_memory(self, error: Exception) -> bool:\n        return True\n\n    def synchronize(self)",
    ),
    # The KV cache.
    Mutant(
        "a block size is named twice",
        "KVL-01",
        *_method(
            "def kv_layout(self):\n    layout = super().kv_layout()\n"
            "    return api.KVLayout((16, *layout.block_sizes), layout.bytes_per_token)"
        ),
    ),
    Mutant(
        "a cache takes twice of what it says",
        "KVL-02",
        "attention.py",
        "shape = (2, num_blocks,",
        "shape = (2, 2 * num_blocks,",
    ),
    Mutant("a new cache holds NaN", "KVL-02", "attention.py", ".zero_()", ".fill_(torch.nan)"),
    Mutant(
        "slots of -1 are slot 0",
        "KVL-03",
        "attention.py",
        _STEP,
        "        import dataclasses\n\n"
        "        batch = dataclasses.replace(batch, slot_mapping=batch.slot_mapping.clip(0), "
        "slot_mapping_device=batch.slot_mapping_device.clamp(min=0))\n" + _STEP,
    ),
    Mutant(
        "only keys are copied",
        "KVL-04",
        *_method(
            "def copy_blocks(self, kv, source, destination):\n    kv[0].index_copy_(0, destination, kv[0][source])"
        ),
    ),
    Mutant(
        "values stored in another dtype are scaled",
        "KVL-05",
        *_method(
            "def write_kv(self, kv, key, value, metadata):\n"
            "    super().write_kv(kv, key, value if kv.dtype == value.dtype else value / 2, metadata)"
        ),
    ),
    # Attention.
    Mutant(
        "the scale is a tenth too large",
        "ATT-01",
        "attention.py",
        _OUTPUT,
        _OUTPUT.replace("(query,", "(query * 1.1,"),
        further=("KVL-03", "KVL-04", "KVL-05"),
    ),
    Mutant(
        "what other requests write in the same step is not there yet",
        "ATT-01",
        "attention.py",
        _OUTPUT,
        "        parts = []\n"
        "        for mine in metadata.sequences:\n"
        "            seen = kv.clone()\n"
        "            slots = seen.flatten(1, 2)\n"
        "            for other in metadata.sequences:\n"
        "                if other is not mine:\n"
        "                    slots[:, metadata.slots[other.tokens]] = 0\n"
        "            slots[:, metadata.slots[mine.tokens]] = kv.flatten(1, 2)[:, metadata.slots[mine.tokens]]\n"
        "            only = type(metadata)((mine,), metadata.slots, metadata.rows)\n"
        "            parts.append(super().forward(query, seen, only, sinks))\n"
        "        output = sum(parts)\n",
    ),
    Mutant(
        "a window is wider by one",
        "ATT-02",
        "attention.py",
        "        super().__init__(spec)\n",
        "        import dataclasses\n\n"
        "        wider = spec.sliding_window and spec.sliding_window + 1\n"
        "        super().__init__(dataclasses.replace(spec, sliding_window=wider))\n",
    ),
    *(Mutant(*fields) for fields in CHUNK_MUTANTS),
    Mutant(
        "three heads that share a key are mixed up",
        "ATT-04",
        "attention.py",
        _OUTPUT,
        "        if self.spec.num_heads == 3 * self.spec.num_kv_heads:\n            query = query.flip(1)\n" + _OUTPUT,
    ),
    Mutant(
        "key/value heads are dealt out to query heads in turn",
        "ATT-04",
        "attention.py",
        _OUTPUT,
        "        kv_heads, group = self.spec.num_kv_heads, self.spec.num_heads // self.spec.num_kv_heads\n"
        "        query = query.unflatten(1, (group, kv_heads)).transpose(1, 2).flatten(1, 2).contiguous()\n"
        + _OUTPUT
        + "        output = output.view(-1, kv_heads, group, self.spec.value_size).transpose(1, 2).flatten(1)\n",
    ),
    Mutant(
        "a refusal does not say why",
        "ATT-05",
        "platform.py",
        "for this model: {'; '.join(problems)}.",
        "for this model.",
    ),
    Mutant("everything is valid", "ATT-05", "attention.py", "        return reasons\n", "        return []\n"),
    Mutant(
        "rows of padding are not finite",
        "ATT-06",
        "attention.py",
        _OUTPUT,
        _OUTPUT + "        output[metadata.sequences[-1].tokens.stop :] = torch.nan\n",
    ),
    Mutant(
        "heads of more than 128 elements are a percent off",
        "ATT-07",
        "attention.py",
        _OUTPUT,
        _OUTPUT + "        output = output * (1.01 if self.spec.head_size > 128 else 1)\n",
    ),
    Mutant(
        "scores are not capped",
        "ATT-08",
        "attention.py",
        "        super().__init__(spec)\n",
        "        import dataclasses\n\n        super().__init__(dataclasses.replace(spec, soft_cap=None))\n",
    ),
    Mutant("sinks are left out", "ATT-09", "attention.py", "metadata, sinks)\n", "metadata, None)\n"),
    Mutant(
        "what is past a sequence's end in its last block has a weight of nothing, and is added up",
        "ATT-10",
        "attention.py",
        _OUTPUT,
        _OUTPUT + "        for sequence in metadata.sequences:\n"
        "            rest = kv[1].index_select(0, sequence.blocks[-1:]).float().sum()\n"
        "            output[sequence.tokens] += (0 * rest).to(output.dtype)\n",
    ),
    *(Mutant(*fields) for fields in SPARSE_ATTENTION_MUTANTS),
    *(Mutant(*fields) for fields in NON_CAUSAL_SPAN_MUTANTS),
    # Operations, and sequence states.
    *(Mutant(*fields) for fields in STATE_MUTANTS),
    *(Mutant(*fields) for fields in KV_TRANSFER_MUTANTS),
    Mutant(
        "the norm has an epsilon of its own",
        "OPS-01",
        "attention.py",
        "rms_norm(x, weight, eps)",
        "rms_norm(x, weight, 0.1)",
    ),
    Mutant("the bias is forgotten", "OPS-01", "attention.py", "weight.t(), bias)", "weight.t())"),
    Mutant(
        "supports answers with a text",
        "OPS-02",
        "attention.py",
        "else [f\"dtype {case.dtype} is not among {', '.join(DTYPES)}\"]",
        "else f\"dtype {case.dtype} is not among {', '.join(DTYPES)}\"",
    ),
    Mutant(
        "a linear layer overwrites its input",
        "OPS-03",
        "attention.py",
        "        return F.linear(x, weight.t(), bias)",
        "        result = F.linear(x, weight.t(), bias)\n        x.mul_(2)\n        return result",
    ),
    Mutant(
        "rotary embedding takes its angles in 16 bits",
        "OPS-05",
        "attention.py",
        _RMS_NORM_PROVIDER,
        _RMS_NORM_PROVIDER + '        api.OpProvider("rotary_embedding", "example_rotary", _in_16_bits, _supports),\n',
    ),
    # Between ranks.
    Mutant("ranks disagree who is who", "COM-01", "communicator.py", "self._host.rank, self", "0, self"),
    Mutant(
        "each rank puts its own part first",
        "COM-02",
        "communicator.py",
        "        return self._host.all_gather(self._out(tensor), dim).to(self._device)",
        "        parts = list(self._host.all_gather(self._out(tensor)[None], 0))\n"
        "        parts.insert(0, parts.pop(self.rank))\n"
        "        return torch.cat(parts, dim).to(self._device)",
    ),
    Mutant(
        "all_reduce gives the mean",
        "COM-03",
        "communicator.py",
        "self._host.all_reduce(self._out(tensor)).to",
        "(self._host.all_reduce(self._out(tensor)) / self.world_size).to",
    ),
    Mutant(
        "all_gather knows the last dimension only",
        "COM-04",
        "communicator.py",
        "self._host.all_gather(self._out(tensor), dim)",
        "self._host.all_gather(self._out(tensor), -1)",
    ),
    Mutant(
        "a tensor is given to ranks other than the destination",
        "COM-08",
        *_collective(
            "def gather(self, tensor, destination=0, dim=-1):\n"
            "    gathered = super().gather(tensor, destination, dim)\n"
            "    return tensor if gathered is None else gathered"
        ),
    ),
    Mutant(
        "what ranks give each other is in the wrong order",
        "COM-09",
        *_collective("def all_to_all(self, tensors):\n    return super().all_to_all(tensors)[::-1]"),
    ),
    # Sampling.
    Mutant(
        "of many rows the largest logit is looked for in the first half", "SMP-01", *_kernel("max.dim", _MAX_OF_HALF)
    ),
    Mutant(
        "log-probabilities are a thousandth off",
        "SMP-03",
        *_kernel("_log_softmax", _LOG_SOFTMAX_OFF),
    ),
    # Shapes.
    Mutant("there are no buckets of pages", "SHP-01", "platform.py", ", pages=(4, 16, 64, 256, 1024))", ")", _STATIC),
    Mutant(
        "the warm-up is forgotten",
        "SHP-02",
        "runtime.py",
        "        self._warm = True\n",
        "        self._warm = True\n        self._compiled.clear()\n",
        _STATIC,
    ),
    Mutant(
        "something is compiled whenever somebody asks",
        "SHP-03",
        "runtime.py",
        "    def seed(self",
        "    def num_compilations(self):\n        self._warm += 1\n        return self._warm\n\n    def seed(self",
        _STATIC,
    ),
    # Graphs.
    Mutant("there is a compiler that nobody claims", "GRF-03", "platform.py", *_before_doctor("compiler(self)")),
    # Models, engines and their shutdown.
    Mutant(
        "weights that are square are not transposed, in one place of two",
        "RUN-01",
        "attention.py",
        "prepare=lambda weight: weight.t().contiguous()",
        "prepare=lambda weight: (weight if weight.shape[0] == weight.shape[1] else weight.t()).contiguous()",
    ),
    Mutant(
        "attention gives no numbers from the tenth step on",
        "E2E-01",
        "runtime.py",
        "            self._faults.begin_step()\n",
        "            self._faults.begin_step()\n            self._faults.poisoned |= self._faults._next_step > 9\n",
    ),
    Mutant(
        "a piece of shared memory is left",
        "LIF-05",
        "runtime.py",
        "            self._copier.shutdown()\n",
        "            self._copier.shutdown()\n"
        "            open(f'/dev/shm/mvllm-example-{os.getpid()}-{id(self)}', 'w').close()\n",
    ),
)

FURTHER_EDITS = {
    "rotary embedding takes its angles in 16 bits": (
        "attention.py",
        "def providers(compiled",
        _ROTARY_IN_16_BITS + "def providers(compiled",
    ),
    "memory that was given back is used again before the copy of it is made": (
        "runtime.py",
        "        try:\n            return torch.empty(shape, dtype",
        "        for source, copy in self.__dict__.get('_late', ()):\n"
        "            if source() is None and copy() is not None:\n"
        "                copy()._copy.result().zero_()\n"
        "        try:\n            return torch.empty(shape, dtype",
    ),
    "the device cannot be opened after a fork, which is claimed": (
        "platform.py",
        "        self._faults.rank = ctx.rank\n",
        "        import os\n\n        from mvllm_example_device.plugin import HOME\n\n"
        "        assert os.getpid() == HOME or not ctx.in_engine_process\n        self._faults.rank = ctx.rank\n",
    ),
    "plan changes its mind": (
        "platform.py",
        "COLLECTIVES = ",
        "import itertools\n\n_TURNS = itertools.count()\nCOLLECTIVES = ",
    ),
    "a copy to the host is made when it is waited for": (
        "runtime.py",
        _HOST_COPY + "        return PendingCopy(self, self._copier.submit(source.cpu))\n",
        "        return PendingCopy(self, lambda: tensor)\n",
    ),
}
"""Mutants whose fault needs a second edit."""
