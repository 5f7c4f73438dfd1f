"""The capability flags of a platform, read by the engine and by the conformance suite."""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.contract import ANY, phase


@phase(ANY)
@dataclass(frozen=True)
class Capabilities:
    """Capability flags of a platform. Optional capabilities default to off; an unknown name is an error.

    Read once the platform object exists. Every read gives equal values.

    Attributes:
        dtypes: Compute dtypes by name, the preferred one first. `dtype=auto` selects it if the checkpoint's
            dtype is not among them.
        kv_dtypes: Storage dtypes of the KV cache by name.
        max_head_size: Largest attention head, or None for any.
        torch_device: Tensors are torch tensors on `DeviceRuntime.device`. A platform without it implements its own
            worker.
        lazy: Operations are recorded and run at `DeviceRuntime.step_mark`.
        static_shapes: Every new shape costs a compilation, so steps are padded to ShapePolicy's buckets.
        graphs: The platform's CompileBackend captures steps and replays them.
        compile: The platform has a CompileBackend.
        pinned_memory: Host buffers may be page-locked for copies.
        async_copies: `to_host` returns before the copy is done, and submitting work does not wait for earlier work.
            With asynchronous scheduling, sampled tokens then stay on the device until the next step has been submitted.
        fork_safe: A process that has probed this platform may still be forked.
        unified_memory: The device uses the host's memory. `memory_utilization` is then a share of the memory that other
            programs do not use.
        devices_per_process: Maximum number of devices per worker; None for any number.
        collectives: Names among `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `send_recv`, `gather`,
            `all_to_all`, `barrier` that its communicators implement.
        prefix_caching, chunked_prefill: Attention may read blocks that an earlier step computed.
        sliding_window, soft_cap, sinks: The attention backend supports this feature.
        deterministic: Equal inputs give bit-equal outputs, whatever else is in the batch.
        mla: The attention backend supports value heads of another size than key heads, and values that are a part of
            the keys.
        lazy_kernels: Since contract 1.1. Kernels are compiled when they are first called. Before the first request,
            core runs prompts of several lengths and common kinds of sampling.
        batch_invariant: Since contract 1.1. The engine setting `batch_invariant` is supported: attention backends
            accept specs with `AttentionSpec.batch_invariant`, and the providers with `OpProvider.batch_invariant`
            include the operations of its models, `logsumexp` and `filtered_draw`.
        state: Since contract 1.1. Models with sequence states (StateBackend) run: Mamba-2 and hybrid models.
        sparse_attention: Since contract 1.1. The attention backend implements `select` and `forward_selected`: models
            with sparse attention run with sequences longer than their selection. Needs `mla`.
        graph_compiler: Since contract 1.1. Models run as StepGraphs that the platform's GraphCompiler translates.
        stores_by_block_table: Since contract 1.1. Attention stores a step's keys and values by block table instead of
            by slot: token t of request r in block `block_table[r][t // block_size]`. It may also change the slots
            after a sequence's end in its last block. Core's slots are those that the block table gives, and no slot
            after a sequence's end is read before it is written. Warm-up, before the first request, has slots of -1 and
            block 0 in all tables, and may store in block 0.
        kv_transfer: Since contract 1.1. Blocks of the KV cache are copied to host memory and back: `export_blocks` and
            `import_blocks` of the attention backends, and with `state` the same for slots of sequence states. Without
            it, core keeps keys and values on the device only.
        non_causal_spans: Since contract 1.1. Attention backends accept specs with `AttentionSpec.non_causal_spans` and
            read `BatchLayout.visible_lens`. Without it, core refuses images for models whose images need it.
        weight_offloading: Since contract 1.1. Sleep level 1 moves the weights to host memory: storages of the device's
            tensors can be freed and allocated again (`UntypedStorage.resize_`), and no operation keeps the address of
            a weight. Without it, and with `unified_memory`, the weights stay.
        scaled_memory_profile: Since contract 1.1. At the start, core measures the memory of a small step and scales it
            to the largest one, which takes seconds on such a device: a host's processor. It does so with eager
            operations, whose memory grows with the tokens and requests of a step; do not claim it with `static_shapes`.
        drafts_by_default: Since contract 1.1. With few requests, a step that verifies some draft tokens takes little
            longer than one without. Where `speculative_config` is not set, core drafts with the multi-token-prediction
            module of a checkpoint that has one.
    """

    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    max_head_size: int | None = None
    torch_device: bool = True
    lazy: bool = False
    static_shapes: bool = False
    graphs: bool = False
    compile: bool = False
    pinned_memory: bool = False
    async_copies: bool = False
    fork_safe: bool = False
    unified_memory: bool = False
    devices_per_process: int | None = 1
    collectives: frozenset[str] = frozenset()
    prefix_caching: bool = False
    chunked_prefill: bool = False
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    deterministic: bool = False
    mla: bool = False
    lazy_kernels: bool = False
    batch_invariant: bool = False
    state: bool = False
    sparse_attention: bool = False
    graph_compiler: bool = False
    stores_by_block_table: bool = False
    kv_transfer: bool = False
    non_causal_spans: bool = False
    weight_offloading: bool = False
    scaled_memory_profile: bool = False
    drafts_by_default: bool = False

    @property
    def offloads_weights(self) -> bool:
        """Whether sleep level 1 moves the weights to host memory. Since contract 1.1."""
        return self.weight_offloading and not self.unified_memory
