"""The clauses of the platform contract, with the ids and sentences of docs/reference/contract.md.

Used by the suite (which clauses a test covers, and whether it applies), by the report and by
`mvllm conformance --clauses`. Imports neither torch nor pytest.
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
    "STA": "Sequence states",
    "KVT": "Copies of blocks and states",
    "COM": "Communication",
    "SMP": "Sampling",
    "SHP": "Shapes",
    "GRF": "Graphs and compilers",
    "GRA": "Models as graphs",
    "RUN": "Running a model",
    "E2E": "The whole engine",
    "LIF": "Lifecycle",
}


@dataclass(frozen=True)
class Clause:
    """One rule of the contract.

    Attributes:
        id: Family and number, for instance `ATT-03`.
        sentence: The rule, with the wording of docs/reference/contract.md.
        needs: The field of `Capabilities` without which the clause does not apply, or None. `name:part` is a member of
            a set, for instance `collectives:all_reduce`.
        since: First contract version with the clause. It does not apply to plugins for older versions.
    """

    id: str
    sentence: str
    needs: str | None = None
    since: tuple[int, int] = (1, 0)

    @property
    def family(self) -> str:
        """The first three letters of the id."""
        return self.id[:3]


_ALL = (
    Clause("PLG-01", "Importing the entry point's module loads neither torch nor a device library."),
    Clause("PLG-02", "The spec's name equals the entry point's name."),
    Clause("PLG-03", "Plugins import only `mvllm.plugin_api` from mvllm."),
    Clause(
        "PLG-04",
        "Exactly one installed distribution has the name, and core supports its contract version.",
    ),
    Clause(
        "PRB-01",
        "A probe returns within a second, raises nothing, and gives a reason if the platform is not available.",
    ),
    Clause("PRB-02", "A process that has probed can be forked."),
    Clause(
        "PRB-03",
        "A probe does not import torch and leaves no thread, process or changed environment variable behind; two "
        "probes in a row return equal results.",
    ),
    Clause(
        "CFG-01",
        "`plan` is pure: it changes nothing, opens no device, and returns equal results for equal configurations.",
    ),
    Clause(
        "CFG-02",
        "`plan` returns changes with reasons, or refusals with reasons and remedies; it does not mutate the "
        "configuration.",
    ),
    Clause(
        "CFG-03",
        "`capabilities` and `topology` are pure. An unknown capability is an error; an unclaimed one is disabled.",
    ),
    Clause(
        "CFG-04",
        "If `prefix_caching` or `chunked_prefill` is not claimed, core disables it and logs that. Core refuses "
        "models that need an unclaimed `sliding_window` or a head larger than `max_head_size`, and KV cache dtypes"
        " that are not in `kv_dtypes`. Without `torch_device`, `worker_class` must name a class.",
    ),
    Clause(
        "CFG-05",
        "`topology` is defined for every number of ranks: at least one executor, devices for all ranks, and "
        "environment variables for every worker or for none.",
    ),
    Clause(
        "CFG-06",
        "`doctor` opens no device. Its checks have ids with the platform's prefix, a finding, and a remedy if they"
        " are not OK.",
    ),
    Clause(
        "DEV-01", "`init_device` binds the process to the device with the index `ctx.local_rank`, once.", "torch_device"
    ),
    Clause(
        "DEV-02",
        "`to_device` and `to_host(...).wait()` return the same values, ordered after earlier work.",
        "torch_device",
    ),
    Clause("DEV-03", "`shutdown` may be called twice.", "torch_device"),
    Clause(
        "DEV-04",
        "`empty` returns a tensor on the device and `host_buffer` one on the host, with the requested shape and dtype.",
        "torch_device",
    ),
    Clause(
        "DEV-05",
        "Events and streams order work, or are null objects if the device runs calls in order.",
        "torch_device",
    ),
    Clause("DEV-06", "`health` and `step_mark` raise nothing on a working device.", "torch_device"),
    Clause(
        "DEV-07",
        "The caller may drop the tensor given to `to_host` at once; the copy still has its values.",
        "torch_device",
    ),
    Clause(
        "DEV-08",
        "In `inference_mode`, tensors that were created outside of it can be viewed and written, and no gradients "
        "are recorded.",
        "torch_device",
    ),
    Clause(
        "DEV-09",
        "If a worker drives several devices, `place` gives each an equal part of a tensor along a dimension, in "
        "order, or the whole tensor; `parts` returns the part of each device.",
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
        "`peak_by_me` includes allocations that have been freed; `reset_peak_memory` resets it.",
        "torch_device",
    ),
    Clause(
        "MEM-04",
        "`is_out_of_memory` is true for the error that torch raises if the device has no memory for a tensor, and "
        "false for all other errors.",
        "torch_device",
    ),
    Clause(
        "MEM-05",
        "If a worker drives several devices, `memory()` is the sum over all of them; unified host memory counts once.",
        "devices_per_process",
    ),
    Clause(
        "MEM-06",
        "`memory().free` does not include memory that this process holds.",
        "torch_device",
        since=(1, 1),
    ),
    Clause(
        "KVL-01",
        "`kv_layout` returns at least one block size, and the bytes of one token in one layer.",
        "torch_device",
    ),
    Clause(
        "KVL-02",
        "`allocate(n, ...)` uses as many bytes as `kv_layout` gives, and its contents are finite.",
        "torch_device",
    ),
    Clause(
        "KVL-03",
        "`write_kv` stores nothing for slots of -1, and changes only the slots that it is given; with "
        "`stores_by_block_table` also those after a sequence's end in its last block.",
        "torch_device",
    ),
    Clause("KVL-04", "`copy_blocks` copies whole blocks of one layer.", "torch_device"),
    Clause(
        "KVL-05",
        "`forward` reads what `write_kv` has stored, rounded to the storage dtype (in 8 bits: with a scale for "
        "each token and head): a query with one visible key gets that key's value.",
        "torch_device",
    ),
    Clause(
        "KVL-06",
        "If a worker drives several devices whose number divides the number of key/value heads, the heads are "
        "distributed over the devices: a token takes no more bytes on all of them than on one.",
        "devices_per_process",
    ),
    Clause(
        "ATT-01",
        "`forward` reads everything that `write_kv` has stored in the step, for every request.",
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
        "A step may contain prefills, chunked prefills and decodes in any combination and order.",
        "torch_device",
    ),
    Clause(
        "ATT-04",
        "Several query heads may share a key/value head; the number of query heads is a multiple of the number of "
        "key/value heads.",
        "torch_device",
    ),
    Clause(
        "ATT-05",
        "`validate` returns the reasons why a spec is not supported; `attention_backend` refuses it with those "
        "reasons.",
        "torch_device",
    ),
    Clause("ATT-06", "Output rows of padding are finite.", "torch_device"),
    Clause(
        "ATT-07",
        "For every dtype of `dtypes`, every head size of models up to `max_head_size` and every block size of "
        "`kv_layout`, results equal exact attention within the suite's tolerance for the dtype.",
        "torch_device",
    ),
    Clause("ATT-08", "With `soft_cap`, scores become soft_cap · tanh(score / soft_cap).", "soft_cap"),
    Clause("ATT-09", "With `sinks`, each head's extra logit takes part in the softmax and has no value.", "sinks"),
    Clause("ATT-10", "Earlier contents of a block, NaN included, do not affect results.", "torch_device"),
    Clause(
        "ATT-11",
        "With `deterministic`, a request's result is bit-identical whatever else is in the step.",
        "deterministic",
    ),
    Clause(
        "ATT-12",
        "With `mla`, value heads may differ in size from key heads, and values may be the first elements of the "
        "keys, which are then stored once.",
        "mla",
    ),
    Clause(
        "ATT-13",
        "The function that `rotary_writer` returns gives queries, stored keys and stored values as `rms_norm`, "
        "`rotary_embedding` and `write_kv` give them, and stores nothing for padding.",
        "torch_device",
        since=(1, 1),
    ),
    Clause(
        "ATT-14",
        "With `batch_invariant` and a spec that asks for it, a token's result is bit-identical whatever else is in the "
        "step, and however its request was cut into steps.",
        "batch_invariant",
        since=(1, 1),
    ),
    Clause(
        "ATT-15",
        "With `sparse_attention`, `select` gives for each query the `index_topk` visible positions with the highest "
        "index scores, of equal scores the earlier ones; with fewer visible positions all of them, then -1.",
        "sparse_attention",
        since=(1, 1),
    ),
    Clause(
        "ATT-16",
        "With `sparse_attention`, `forward_selected` attends to the given positions and to no others, in every kind of "
        "step, and what else is in the cache does not affect results.",
        "sparse_attention",
        since=(1, 1),
    ),
    Clause(
        "ATT-17",
        "With `non_causal_spans`, a token sees the first `visible_lens` positions of its sequence, of which a sliding "
        "window hides those that it hides elsewhere, in every kind of step; steps without `visible_lens` are causal.",
        "non_causal_spans",
        since=(1, 1),
    ),
    Clause(
        "OPS-01",
        "A provider's function has the parameters and the result of the reference with the same name; its `lookup`"
        " has those of `embedding`.",
        "torch_device",
    ),
    Clause(
        "OPS-02",
        "`supports` returns the reasons why a case is not supported; core then runs the reference.",
        "torch_device",
    ),
    Clause(
        "OPS-03",
        "A provider does not change its arguments, except those that the operation's schema allows it to overwrite.",
        "torch_device",
    ),
    Clause(
        "OPS-04",
        "A provider that declares `batch_invariant` gives a row the same bits alone, among other rows and at every "
        "place among them, and the result of the reference within the suite's tolerance. An operation on states gives "
        "a request the same bits also however its tokens are cut into steps; `encoder_attention` gives each packed "
        "sequence the bits that it has alone.",
        "batch_invariant",
        since=(1, 1),
    ),
    Clause(
        "OPS-05",
        "A provider of `rotary_embedding` computes in float32 and rounds once: with inputs of 16 bits, a result is off "
        "by at most 0.6 units in the last place of the length of its pair.",
        "torch_device",
        since=(1, 1),
    ),
    Clause(
        "STA-01",
        "`StateBackend.allocate` returns zeros of [num_slots + 1, *shape] for each tensor of the spec, which take the "
        "bytes that `bytes_per_sequence` gives; core refuses models with states if `state` is not claimed.",
        "state",
        since=(1, 1),
    ),
    Clause(
        "STA-02",
        "`StateBackend.build_metadata` returns StateArguments with the slots and `query_start_loc` of the layout on "
        "the device.",
        "state",
        since=(1, 1),
    ),
    Clause(
        "STA-03",
        "An operation on states reads zeros for a request with read slot -1; earlier contents of its slots, NaN "
        "included, do not affect results.",
        "state",
        since=(1, 1),
    ),
    Clause(
        "STA-04",
        "An operation on states writes to the write slots of requests with tokens, and to no other slot; padding "
        "writes to none, and its results are finite.",
        "state",
        since=(1, 1),
    ),
    Clause(
        "STA-05",
        "The results of a sequence and its last state do not depend on how it is cut into steps, on other requests of "
        "the steps, or on its slots, within the suite's tolerance for the dtype.",
        "state",
        since=(1, 1),
    ),
    Clause("STA-06", "`copy_slots` copies whole slots, and `fill` sets every element.", "state", since=(1, 1)),
    Clause(
        "STA-07",
        "An engine generates the oracle's tokens with a model of attention and state layers: in a batch, from states "
        "that are kept, for several samples of a prompt, and with prompts that are computed in chunks.",
        "state",
        since=(1, 1),
    ),
    Clause(
        "KVT-01",
        "A block that `export_blocks` has copied to host memory and `import_blocks` copies to the same or another "
        "block, also of another cache of the same spec and block size, has equal contents and equal bytes.",
        "kv_transfer",
        since=(1, 1),
    ),
    Clause(
        "KVT-02",
        "`export_blocks` changes no block, and `import_blocks` only the given ones; it does not change its argument.",
        "kv_transfer",
        since=(1, 1),
    ),
    Clause(
        "KVT-03",
        "`export_blocks` and `import_blocks` are in the order of the calls of `write_kv` and `forward`, without a wait "
        "between them. Exports of several steps may be open at once, each with its own array, and are waited for in "
        "any order.",
        "kv_transfer",
        since=(1, 1),
    ),
    Clause(
        "KVT-04",
        "`block_format` differs for other storage dtypes, numbers of heads, head sizes and block sizes, and for values "
        "that are a part of the keys; it does not depend on the number of blocks.",
        "kv_transfer",
        since=(1, 1),
    ),
    Clause(
        "KVT-05",
        "KVT-01 to KVT-04 hold for `export_slots`, `import_slots` and `slot_format` of states, if `state` is claimed.",
        "kv_transfer",
        since=(1, 1),
    ),
    Clause("COM-01", "Every rank makes the same calls in the same order.", "torch_device"),
    Clause(
        "COM-02", "If an operation has the same result on all ranks, the results are bit-identical.", "torch_device"
    ),
    Clause(
        "COM-03",
        "`all_reduce` sums over ranks; `all_reduce_add_rms_norm`, if it returns a result, gives that of `all_reduce` "
        "and `fused_add_rms_norm`.",
        "collectives:all_reduce",
    ),
    Clause("COM-04", "`all_gather` concatenates along any dimension, in rank order.", "collectives:all_gather"),
    Clause("COM-05", "`reduce_scatter` gives each rank its share of the sum.", "collectives:reduce_scatter"),
    Clause("COM-06", "`broadcast` gives every rank the values of the source.", "collectives:broadcast"),
    Clause(
        "COM-07",
        "`send` does not wait for the receiver, and tensors between two ranks arrive in the order of sending.",
        "collectives:send_recv",
    ),
    Clause(
        "COM-08", "`gather` concatenates on the destination, and returns None on other ranks.", "collectives:gather"
    ),
    Clause("COM-09", "`all_to_all` gives rank i the i-th tensor of every rank.", "collectives:all_to_all"),
    Clause("COM-10", "`barrier` returns when every rank has called it.", "collectives:barrier"),
    Clause("COM-11", "`close` may be called twice.", "torch_device"),
    Clause("SMP-01", "The greedy token of the device's logits is a token with the largest logit.", "torch_device"),
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
        "Equal seeds give equal tokens whatever else is in the batch; NaN in a row is an error of that row alone.",
        "torch_device",
    ),
    Clause("SHP-01", "`shapes` is pure; where `static_shapes` is claimed, it has buckets for every dimension.", None),
    Clause(
        "SHP-02",
        "After `warm_up`, every step has sizes among the buckets, and the compiler is not called again.",
    ),
    Clause(
        "SHP-03",
        "If the device counts compilations (`num_compilations`), the count does not change after the warm-up, for "
        "any temperature, top-k, top-p and min-p of requests.",
        "static_shapes",
    ),
    Clause(
        "SHP-04",
        "In every step the requests with one token that is not a draft token come first, and `BatchLayout.kind` and "
        "`num_decodes` say what the step contains.",
        "torch_device",
    ),
    Clause(
        "SHP-05",
        "A step that fits a shape of `ShapePolicy.capture` has that shape and is marked by `BatchLayout.capture`; its "
        "`max_query_len` depends on its kind and shape alone.",
        "torch_device",
    ),
    Clause(
        "GRF-01",
        "A function that `CompileBackend.compile_head` returned computes with the current values of its input "
        "tensors, also when its step was captured, and beside captures of other functions and shapes.",
        "graphs",
    ),
    Clause("GRF-02", "`DeviceRuntime.memory` counts the memory that captured graphs use.", "graphs"),
    Clause(
        "GRF-03",
        "A compiled function returns the results of the original function; `cache_key` is constant in a process.",
        "compile",
    ),
    Clause(
        "GRA-01",
        "A graph program gives the logits of the definitions of its operations, for models of each family, for steps "
        "of any sizes; padding changes nothing.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause(
        "GRA-02",
        "A program takes each weight and constant once, in any order, does not read the array after `set_weight` "
        "unless `keeps_arrays` is set, and uses a weight that is set again between runs.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause("GRA-03", "`run` does not change its inputs, nor results of earlier runs.", "graph_compiler", since=(1, 1)),
    Clause(
        "GRA-04",
        "After `free_caches`, caches and states may be allocated again, with another number of blocks; `close` may be "
        "called twice.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause(
        "GRA-05",
        "`operations` returns names of operations of graphs; `unsupported` returns sentences, and one for a graph with "
        "an operation that is not among them.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause(
        "GRA-06",
        "The parts of a tensor-parallel rank's graphs, with the collectives between them computed by core, give the "
        "logits of the whole model: a value that crosses a cut is a result of one part, complete and unchanged, and a "
        "step input of later ones.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause(
        "GRA-07",
        "A graph of a model that takes images, audio or embeddings gives the logits of the definitions: for tokens "
        "that take a row of `item_embeds`, for steps without rows, and for three rotary positions of each token.",
        "graph_compiler",
        since=(1, 1),
    ),
    Clause(
        "RUN-01",
        "A model of each family gives the log-probabilities of the oracle, within the suite's tolerance for the dtype.",
        "torch_device",
    ),
    Clause(
        "RUN-02",
        "The worker supports the methods of `WorkerProtocol` in their order; the memory for the KV cache that it "
        "reports after profiling does not exceed the device's, and can be allocated.",
    ),
    Clause(
        "RUN-03",
        "If a worker drives several devices, each stores a part of the weights.",
        "devices_per_process",
    ),
    Clause(
        "E2E-01",
        "An engine with one worker generates the oracle's tokens: exactly in float32, and in any other dtype up to "
        "ties.",
    ),
    Clause(
        "E2E-02",
        "An engine with two tensor-parallel workers, or with one worker that drives two devices, generates the "
        "oracle's tokens.",
    ),
    Clause("E2E-03", "An engine with two pipeline stages generates the oracle's tokens."),
    Clause("E2E-04", "A prompt whose prefix is cached gives the same tokens.", "prefix_caching"),
    Clause("E2E-05", "A prompt that is computed in chunks gives the same tokens.", "chunked_prefill"),
    Clause("E2E-06", "A request that was preempted and recomputed gives the same tokens."),
    Clause(
        "E2E-07",
        "An engine with `batch_invariant` gives the log-probabilities of a request the same bits alone, in a batch, "
        "with a prompt that is cut or cached, and when its tokens are the end of a prompt.",
        "batch_invariant",
        since=(1, 1),
    ),
    Clause(
        "LIF-01",
        "When a worker process is killed, the engine raises an error that names it, and leaves no process and no "
        "shared memory.",
    ),
    Clause(
        "LIF-02", "When a step takes longer than `step_timeout`, the engine ends with an error that names the worker."
    ),
    Clause(
        "LIF-03", "When a step raises, the engine ends with that error, and a new engine in the same process works."
    ),
    Clause("LIF-04", "A KV cache that does not fit is refused, and a new engine in the same process works."),
    Clause("LIF-05", "An engine may be closed twice, and leaves no process and no shared memory."),
    Clause("LIF-06", "When the engine's process is killed, its workers end."),
    Clause(
        "LIF-07",
        "A worker that supports sleep generates the same tokens after every `wake_up`, at either level.",
    ),
)

CLAUSES: dict[str, Clause] = {clause.id: clause for clause in _ALL}

DEVICE_FREE = frozenset(i for i in CLAUSES if i[:3] in ("PLG", "PRB", "CFG")) | {"SHP-01"}
"""Clauses whose tests need no device."""


def claims(capabilities: Capabilities, needs: str | None) -> bool:
    """Whether `capabilities` claim what a clause or a test needs."""
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
    {
        *("soft_cap", "sinks", "mla", "deterministic", "batch_invariant", "state", "sparse_attention", "kv_transfer"),
        "non_causal_spans",
        *("graphs", "compile", "graph_compiler", "collectives", "static_shapes"),
    }
)
"""Capabilities that only core's worker uses. Without `torch_device` they have no effect outside of the platform."""
