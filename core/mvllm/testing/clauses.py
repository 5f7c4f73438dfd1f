"""The clauses of the contract, as docs/reference/contract.md numbers and words them.

One list, read by the suite (which clause does a test stand for, and is it due?), by the report and by
`mvllm conformance --clauses`. Loads neither torch nor pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.plugin_api import Capabilities

FAMILIES = {
    "PLG": "Plugin",
    "PRB": "Probe",
    "CFG": "Configuration",
    "DEV": "Device",
    "MEM": "Memory",
    "KVL": "KV layout",
    "ATT": "Attention",
    "OPS": "Operations",
    "COM": "Communication",
    "SMP": "Sampling",
    "SHP": "Shapes",
    "GRF": "Graphs and compilers",
    "RUN": "Running a model",
    "E2E": "The whole engine",
    "LIF": "Life and death",
}


@dataclass(frozen=True)
class Clause:
    """One rule that a platform keeps.

    Attributes:
        id: Family and number, for instance `ATT-03`.
        sentence: The rule, word for word as on the page.
        needs: The field of `Capabilities` without which the clause asks for nothing, or None. `name:part`
            is a member of a set, for instance `collectives:all_reduce`.
        since: Version of the contract that brought it. A plugin written against an older one is not held to it.
    """

    id: str
    sentence: str
    needs: str | None = None
    since: tuple[int, int] = (1, 0)

    @property
    def family(self) -> str:
        """The three letters."""
        return self.id[:3]


_ALL = (
    Clause("PLG-01", "Importing the entry point's module loads neither torch nor a device library."),
    Clause("PLG-02", "The spec's name equals the entry point's name."),
    Clause("PLG-03", "Plugins import nothing of mvllm but `mvllm.plugin_api`."),
    Clause(
        "PLG-04",
        "One installed distribution claims the name, and its contract version is one that this core speaks.",
    ),
    Clause("PRB-01", "A probe returns in under a second, raises nothing, and says why it is not available."),
    Clause("PRB-02", "It leaves the process able to fork."),
    Clause(
        "PRB-03",
        "It loads no torch, and leaves no thread, no process and no changed environment variable behind; two probes in "
        "a row answer the same.",
    ),
    Clause("CFG-01", "`plan` is pure: it changes nothing, opens nothing, and answers equal questions equally."),
    Clause(
        "CFG-02",
        "It returns changes with reasons, or refusals with reasons and remedies; nobody mutates the configuration.",
    ),
    Clause(
        "CFG-03",
        "`capabilities` and `topology` are pure. An unknown capability is an error, an unclaimed one is off.",
    ),
    Clause(
        "CFG-04",
        "Where `prefix_caching` or `chunked_prefill` is not claimed, core switches it off and logs that. A model that "
        "needs `sliding_window` or a head larger than `max_head_size`, and a KV cache dtype that is not among "
        "`kv_dtypes`, are refused; without `torch_device`, `worker_class` must name a class.",
    ),
    Clause(
        "CFG-05",
        "`topology` answers for every number of ranks: at least one executor, devices for all ranks, and variables for "
        "every worker or for none.",
    ),
    Clause(
        "CFG-06",
        "`doctor` opens no device, and its checks have ids of the platform's own, what was found, and a remedy where "
        "not all is well.",
    ),
    Clause("DEV-01", "`init_device` binds the process to the device that `ctx.local_rank` says, once.", "torch_device"),
    Clause(
        "DEV-02",
        "`to_device` and `to_host(...).wait()` return the same values, ordered after earlier work.",
        "torch_device",
    ),
    Clause("DEV-03", "`shutdown` may be called twice.", "torch_device"),
    Clause(
        "DEV-04",
        "`empty` and `host_buffer` give tensors of the shape and dtype asked for, on the device and on the host.",
        "torch_device",
    ),
    Clause(
        "DEV-05", "Events and streams order work, or are null objects where the order of calls does.", "torch_device"
    ),
    Clause("DEV-06", "`health` and `step_mark` are silent on a device that answers.", "torch_device"),
    Clause(
        "DEV-07",
        "What `to_host` was given may be dropped by the caller at once; its copy holds the values all the same.",
        "torch_device",
    ),
    Clause(
        "DEV-08",
        "Within `inference_mode`, tensors that were made outside of it are viewed and written, and nothing is recorded "
        "for gradients.",
        "torch_device",
    ),
    Clause(
        "DEV-09",
        "Where a worker drives several devices, `place` gives each an equal part of a tensor along a dimension, in "
        "order, or all of it; `parts` says what each has.",
        "devices_per_process",
    ),
    Clause(
        "MEM-01",
        "`memory()` gives `total`, `free`, `used_by_me` and `peak_by_me` in bytes; `peak_by_me` never falls below "
        "`used_by_me` at the time of the call.",
        "torch_device",
    ),
    Clause("MEM-02", "An allocation that does not fit raises `MemoryError`.", "torch_device"),
    Clause(
        "MEM-03",
        "`peak_by_me` follows an allocation that is gone again, and `reset_peak_memory` lets it begin anew.",
        "torch_device",
    ),
    Clause(
        "MEM-04",
        "`is_out_of_memory` knows the error of a tensor that torch cannot make on the device for want of memory, and "
        "no other.",
        "torch_device",
    ),
    Clause(
        "MEM-05",
        "Where a worker drives several devices, `memory()` counts all of them; memory that is the host's, once.",
        "devices_per_process",
    ),
    Clause(
        "KVL-01",
        "`kv_layout` names at least one block size, and the bytes one token takes in one layer.",
        "torch_device",
    ),
    Clause(
        "KVL-02",
        "`allocate(n, ...)` takes the bytes that `kv_layout` says, and its contents are finite.",
        "torch_device",
    ),
    Clause(
        "KVL-03",
        "`write_kv` stores nothing for slots of -1, and touches no slot that it was not given.",
        "torch_device",
    ),
    Clause("KVL-04", "`copy_blocks` copies whole blocks of one layer.", "torch_device"),
    Clause(
        "KVL-05",
        "What `write_kv` stores is what `forward` reads, rounded to the storage dtype (in 8 bits: with a scale for "
        "each token and head): a query with one visible key gets that key's value.",
        "torch_device",
    ),
    Clause(
        "KVL-06",
        "Where a worker drives several devices, these share the key/value heads, if their number divides them: a token "
        "takes no more bytes on all of them than it would on one.",
        "devices_per_process",
    ),
    Clause(
        "ATT-01",
        "`forward` sees everything that `write_kv` stored for the whole step, whichever request wrote it.",
        "torch_device",
    ),
    Clause(
        "ATT-02",
        "A query at position p of a sequence sees keys at positions (p - sliding_window, p], or [0, p] without a "
        "window.",
        "torch_device",
    ),
    Clause(
        "ATT-03",
        "Prefill, chunked prefill, decode and any mix of them may stand in one step, in any order.",
        "torch_device",
    ),
    Clause(
        "ATT-04",
        "Several query heads may share a key/value head; the number of query heads is a multiple.",
        "torch_device",
    ),
    Clause(
        "ATT-05",
        "`validate` returns the reasons why a spec is not supported; `attention_backend` refuses it with those "
        "reasons.",
        "torch_device",
    ),
    Clause("ATT-06", "Rows of padding are finite.", "torch_device"),
    Clause(
        "ATT-07",
        "Every dtype of `dtypes`, every head size up to `max_head_size` that a model may have, and every block size of "
        "`kv_layout` gives what exact attention gives, within the suite's tolerance for the dtype.",
        "torch_device",
    ),
    Clause("ATT-08", "With `soft_cap`, scores become soft_cap · tanh(score / soft_cap).", "soft_cap"),
    Clause("ATT-09", "With `sinks`, each head's extra logit takes part in the softmax and has no value.", "sinks"),
    Clause("ATT-10", "What an earlier tenant left in a block, NaN included, is not seen.", "torch_device"),
    Clause(
        "ATT-11",
        "Where `deterministic` is claimed, a request's result is the same, bit for bit, whatever else is in the step.",
        "deterministic",
    ),
    Clause(
        "ATT-12",
        "With `mla`, value heads may have another size than the keys', and values may be the first elements of the "
        "keys: these are stored once.",
        "mla",
    ),
    Clause(
        "OPS-01",
        "A provider's function has the parameters and the result of the reference of the same name; its `lookup` has "
        "those of `embedding`.",
        "torch_device",
    ),
    Clause("OPS-02", "`supports` says why a case is not supported; the reference runs then.", "torch_device"),
    Clause(
        "OPS-03",
        "A provider leaves its arguments as they were, but for those that the operation's schema lets it overwrite.",
        "torch_device",
    ),
    Clause("COM-01", "Every rank makes the same calls in the same order.", "torch_device"),
    Clause("COM-02", "Results are equal on all ranks where the operation says so.", "torch_device"),
    Clause("COM-03", "`all_reduce` sums over ranks.", "collectives:all_reduce"),
    Clause("COM-04", "`all_gather` concatenates along any dimension, in rank order.", "collectives:all_gather"),
    Clause("COM-05", "`reduce_scatter` gives each rank its share of the sum.", "collectives:reduce_scatter"),
    Clause("COM-06", "`broadcast` gives every rank the values of the source.", "collectives:broadcast"),
    Clause(
        "COM-07",
        "`send` does not wait for the receiver, and what two ranks send each other arrives in order.",
        "collectives:send_recv",
    ),
    Clause("COM-08", "`gather` concatenates on the destination, and gives None elsewhere.", "collectives:gather"),
    Clause("COM-09", "`all_to_all` gives rank i the i-th tensor of every rank.", "collectives:all_to_all"),
    Clause("COM-10", "`barrier` returns when every rank has called it.", "collectives:barrier"),
    Clause("COM-11", "`close` may be called twice.", "torch_device"),
    Clause("SMP-01", "The greedy token of the device's logits is one of largest logit.", "torch_device"),
    Clause(
        "SMP-02",
        "Tokens sampled from the device's logits follow softmax(logits / temperature), within top-k, top-p and min-p.",
        "torch_device",
    ),
    Clause(
        "SMP-03",
        "Log-probabilities of the device's logits are those of an exact log-softmax, within the tolerance of float32.",
        "torch_device",
    ),
    Clause(
        "SMP-04",
        "A seed gives the same tokens whatever else is in the batch, and one row's NaN is that row's error alone.",
        "torch_device",
    ),
    Clause("SHP-01", "`shapes` is pure; where `static_shapes` is claimed, it has buckets for every dimension.", None),
    Clause(
        "SHP-02",
        "After `warm_up`, every step has sizes among the buckets, and the compiler is not called again.",
    ),
    Clause(
        "SHP-03",
        "Where the device counts compilations (`num_compilations`), none comes after the warm-up, whatever requests "
        "ask of temperature, top-k, top-p and min-p.",
        "static_shapes",
    ),
    Clause(
        "GRF-01",
        "A replay computes what the captured step computes, from what its input tensors hold by then.",
        "graphs",
    ),
    Clause("GRF-02", "`memory_bytes` counts what captured graphs hold.", "graphs"),
    Clause(
        "GRF-03",
        "A compiled function gives what the function gives; `cache_key` stays the same in a process.",
        "compile",
    ),
    Clause(
        "RUN-01",
        "A model of each family gives the log-probabilities of the oracle, within the suite's tolerance for the dtype.",
        "torch_device",
    ),
    Clause(
        "RUN-02",
        "The worker goes through the methods of `WorkerProtocol` in their order; what a profiling step leaves for the "
        "KV cache is no more than the device has, and can be allocated.",
    ),
    Clause(
        "RUN-03",
        "Where a worker drives several devices, each holds a share of the weights.",
        "devices_per_process",
    ),
    Clause(
        "E2E-01",
        "An engine with one worker generates the oracle's tokens: exactly in float32, and in any other dtype up to "
        "ties.",
    ),
    Clause("E2E-02", "So does one with two tensor-parallel workers, or with one that drives two devices."),
    Clause("E2E-03", "So does one with two pipeline stages."),
    Clause("E2E-04", "A prompt whose prefix is cached gives the same tokens.", "prefix_caching"),
    Clause("E2E-05", "A prompt that is computed in chunks gives the same tokens.", "chunked_prefill"),
    Clause("E2E-06", "A request that was preempted and recomputed gives the same tokens."),
    Clause("LIF-01", "When a worker process is killed, the caller is told which, and nothing is left behind."),
    Clause("LIF-02", "When a step hangs, the engine ends after `step_timeout` with the name of the worker."),
    Clause(
        "LIF-03", "When a step raises, the engine ends with that error, and a new engine in the same process works."
    ),
    Clause("LIF-04", "A KV cache that does not fit is refused, and a new engine in the same process works."),
    Clause("LIF-05", "An engine may be closed twice, and leaves no process and no shared memory."),
    Clause("LIF-06", "When the caller is killed, its workers end."),
    Clause(
        "LIF-07",
        "A worker that can sleep gives the same tokens when it is awake again, after either level and as often as it "
        "is asked.",
    ),
)

CLAUSES: dict[str, Clause] = {clause.id: clause for clause in _ALL}

DEVICE_FREE = frozenset(i for i in CLAUSES if i[:3] in ("PLG", "PRB", "CFG")) | {"SHP-01"}
"""What can be examined where no device is: nothing that these clauses are about opens one."""


def claims(capabilities: Capabilities, needs: str | None) -> bool:
    """Whether `capabilities` (a Capabilities) claim what a clause or a test needs."""
    if needs is None:
        return True
    name, _, part = needs.partition(":")
    if name in _OF_TORCH and not capabilities.torch_device:
        return False
    value = getattr(capabilities, name)
    if name == "devices_per_process":
        return capabilities.torch_device and (value is None or value > 1)
    return part in value if part else bool(value)


_OF_TORCH = frozenset(
    {"soft_cap", "sinks", "mla", "deterministic", "graphs", "compile", "collectives", "static_shapes"}
)
"""Capabilities that only core's worker uses: without torch tensors nobody outside the platform could see them."""
