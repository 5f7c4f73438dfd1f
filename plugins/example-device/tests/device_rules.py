"""Tests of the example device, run in a separate process, because a process has one PrivateUse1 backend.

Each `rule_` function is a test. Prints one JSON object: for each name the traceback of its failure, or null.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from mvllm.attention.reference import ReferenceAttention
from mvllm.config.engine_args import EngineArgs
from mvllm.errors import ContractError, PlatformError
from mvllm.ops.norm import rms_norm
from mvllm.platform.attention import AttentionSpec, BatchLayout
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.topology import WorkerContext
from mvllm_example_device.platform import ExamplePlatform

LIMIT = 1 << 20
os.environ["MVLLM_EXAMPLE_MEMORY"] = str(LIMIT)
SPEC = AttentionSpec(4, 2, 16, "float32", "float32", 0.25)


@contextmanager
def open_device(mode="eager", faults="none", **context):
    """A platform and the runtime of its device, which is shut down at the end."""
    os.environ.update(MVLLM_EXAMPLE_MODE=mode, FAULT_INJECTION=faults)
    platform = ExamplePlatform()
    with enter_phase(Phase.WORKER):
        runtime = platform.init_device(WorkerContext(**context))
        try:
            yield platform, runtime
        finally:
            runtime.shutdown()


def check_raises(action, kind, text):
    try:
        action()
    except kind as e:
        assert text in str(e), f"{e} does not say {text!r}"
    else:
        raise AssertionError(f"was not refused with {kind.__name__}")


def layout(runtime, tokens=4, pages=2):
    starts, lens = np.array([0, tokens], dtype=np.int32), np.array([tokens], dtype=np.int32)
    table, slots = np.arange(pages, dtype=np.int32)[None], np.arange(tokens, dtype=np.int32)
    device = [runtime.from_numpy(array.copy()) for array in (starts, lens, table, slots)]
    return BatchLayout(1, tokens, tokens, tokens, 16, starts, lens, table, slots, *device)


# ---------------------------------------------------------------------------------------------------- phase and process


def rule_methods_raise_in_other_phases():
    platform = ExamplePlatform()
    config = EngineArgs.from_kwargs(model="demo").create_engine_config()
    with enter_phase(Phase.ENGINE):
        check_raises(
            lambda: platform.init_device(WorkerContext()), ContractError, "phase worker was called in phase engine"
        )
        check_raises(lambda: platform.plan(config), ContractError, "phase frontend was called in phase engine")
        check_raises(platform.ops, ContractError, "phase worker")
        check_raises(platform.doctor, ContractError, "phase frontend")
    with enter_phase(Phase.WORKER):
        check_raises(lambda: platform.topology(config.parallel), ContractError, "phase frontend, engine")
        check_raises(lambda: platform.attention_backend(SPEC), PlatformError, "call init_device first")


def rule_attributes_outside_the_contract_raise():
    with open_device() as (platform, runtime):
        for thing in (
            platform,
            runtime,
            platform.attention_backend(SPEC),
            runtime.to_host(runtime.empty((1,), torch.int32)),
        ):
            check_raises(lambda thing=thing: getattr(thing, "is_cuda_alike", None), ContractError, "is_cuda_alike")
            assert not hasattr(thing, "__deepcopy__")


def rule_a_device_is_opened_once_and_again_after_shutdown():
    with open_device() as (platform, _):
        check_raises(lambda: platform.init_device(WorkerContext()), PlatformError, "binds one device, once")
    with open_device() as (_, runtime):
        assert runtime.device == torch.device("example", 0)
        runtime.shutdown()
        runtime.shutdown()
        check_raises(runtime.memory, ContractError, "after shutdown")


def rule_local_rank_selects_the_device():
    with open_device(rank=5, local_rank=3) as (_, runtime):
        tensor = runtime.to_device(torch.ones(3))
        assert tensor.device == runtime.device == torch.device("example", 3)
        assert (tensor + 1).cumsum(0).device == torch.arange(2, device=runtime.device).view(2).device == tensor.device
    check_raises(lambda: open_device(local_rank=8).__enter__(), PlatformError, "has 8 devices")


def rule_use_from_another_process_or_thread_raises():
    with open_device(in_engine_process=False) as (_, runtime):
        found = []
        thread = threading.Thread(target=lambda: found.append(message_of(runtime.memory)))
        thread.start()
        thread.join()
        assert "another thread" in found[0]
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, message_of(runtime.memory).encode())
            os._exit(0)
        assert "was opened by process" in os.read(read, 1000).decode()
        os.wait()


def message_of(action):
    try:
        action()
    except ContractError as e:
        return str(e)
    return "nothing"


# --------------------------------------------------------------------------------------------------------------- memory


def rule_memory_is_counted_and_limited():
    with open_device() as (_, runtime):
        before = runtime.memory()
        assert before.total == LIMIT and before.used_by_me == 0
        tensor = runtime.empty((1000,), torch.float32)
        assert runtime.memory().used_by_me == 4000 and runtime.memory().free == LIMIT - 4000
        del tensor
        after = runtime.memory()
        assert after.used_by_me == 0 and after.peak_by_me >= 4000
        runtime.reset_peak_memory()
        assert runtime.memory().peak_by_me == 0
        check_raises(lambda: runtime.empty((LIMIT,), torch.float32), MemoryError, f"{LIMIT} are free")
        check_raises(lambda: torch.zeros(LIMIT, device=runtime.device), RuntimeError, "out of memory on example:0")
        assert runtime.memory().used_by_me == 0


def rule_a_cache_that_does_not_fit_is_a_memory_error():
    with open_device() as (platform, runtime):
        backend = platform.attention_backend(SPEC)
        check_raises(lambda: backend.allocate(10**6, 16, runtime.device), MemoryError, "out of memory")
        cache = backend.allocate(3, 16, runtime.device)
        assert runtime.memory().used_by_me == 3 * 16 * backend.kv_layout().bytes_per_token
        assert not cache.any().item()


# -------------------------------------------------------------------------------------------------------------- tensors


def rule_tensors_of_different_devices_cannot_be_mixed():
    with open_device():
        here, there = torch.ones(4, device="example:0"), torch.ones(4, device="example:1")
        check_raises(lambda: here + torch.ones(4), RuntimeError, "same device")
        check_raises(lambda: here + there, RuntimeError, "same device")
        check_raises(lambda: here.index_select(0, torch.tensor([1])), RuntimeError, "")
        check_raises(lambda: torch.cat([here, torch.ones(4)]), RuntimeError, "")
        check_raises(here.numpy, TypeError, "host memory first")
        assert (here * torch.tensor(2.0)).sum().item() == 8.0, "a number of the host is none of its tensors"


def rule_operations_equal_those_of_the_host():
    torch.manual_seed(0)
    x, index = torch.randn(6, 8), torch.tensor([4, 0, 4])
    with open_device() as (_, runtime):
        d, i = runtime.to_device(x), runtime.to_device(index)

        def written(a, at):
            a = a.clone()
            a.view(3, 2, 8)[1:, :, 2:4] = 7.0
            a[at] += 1
            a.t().index_copy_(0, at, a.t()[:3] * 2)
            return a.masked_fill_(a > 1, 0.5)

        cases = {
            "matmul": lambda a, at: a @ a.t(),
            "view": lambda a, at: a.unflatten(0, (2, 3)).transpose(0, 1).flatten(0, 1).contiguous(),
            "reduce": lambda a, at: torch.stack([a.sum(0), a.amax(0), a.mean(0)]),
            "order": lambda a, at: torch.cat([a.sort(dim=1)[0], a.topk(2, dim=1)[0]], dim=1),
            "norm": lambda a, at: torch.nn.functional.layer_norm(a, (8,)),
            "choose": lambda a, at: torch.where(a > 0, a.index_select(0, at).sum(0), a.cumsum(1)),
            "write": written,
            "make": lambda a, at: torch.arange(8, device=a.device).float() * a.new_full((6, 1), 3.0),
            "convert": lambda a, at: a.bfloat16().float() + at.sum(),
        }
        for name, function in cases.items():
            result = function(d, i)
            assert result.device == runtime.device, name
            assert torch.allclose(result.cpu(), function(x, index), atol=1e-6), name


def rule_attention_and_op_providers_equal_the_references():
    torch.manual_seed(1)
    query, key, value, weight = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16), torch.randn(16)
    with open_device() as (platform, runtime):
        results = []
        for backend, device in ((platform.attention_backend(SPEC), runtime.device), (ReferenceAttention(SPEC), "cpu")):
            batch = layout(runtime)
            if device == "cpu":
                arrays = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
                batch = replace(batch, **{f"{a}_device": torch.from_numpy(getattr(batch, a)) for a in arrays})
            cache, metadata = backend.allocate(2, 16, torch.device(device)), backend.build_metadata(batch)
            backend.write_kv(cache, key.to(device), value.to(device), metadata)
            results.append(backend.forward(query.to(device), cache, metadata).cpu())
        assert torch.equal(*results)
        providers = {provider.op: provider for provider in platform.ops()}
        found = providers["rms_norm"].function(query.to(runtime.device), weight.to(runtime.device), 1e-5)
        assert torch.equal(found.cpu(), rms_norm(query, weight, 1e-5))
        linear, matrix = providers["linear"], torch.randn(5, 16).to(runtime.device)
        found = linear.function(query.to(runtime.device), linear.prepare(matrix), None)
        assert torch.allclose(found.cpu(), query @ matrix.cpu().t(), atol=1e-5)


# --------------------------------------------------------------------------------------------------------------- copies


def rule_a_copy_to_the_host_is_unchanged_by_later_writes():
    with open_device() as (_, runtime):
        tensor = runtime.to_device(torch.arange(1000.0))
        copy = runtime.to_host(tensor)
        tensor.zero_()
        assert torch.equal(copy.wait(), torch.arange(1000.0)) and torch.equal(copy.wait(), torch.arange(1000.0))
        check_raises(lambda: runtime.to_host(torch.ones(1)), ContractError, "not of cpu")


def rule_a_copied_host_tensor_may_be_changed_only_after_the_step():
    with open_device() as (_, runtime):
        source = runtime.host_buffer((3,), torch.int32).zero_()
        for end in (runtime.step_mark, runtime.synchronize, runtime.to_host(runtime.empty((1,), torch.int32)).wait):
            runtime.to_device(source)
            end()
            source += 1
        runtime.to_device(source)
        source += 1
        check_raises(runtime.step_mark, ContractError, "changed before the copy of it to the device was done")


# ---------------------------------------------------------------------------------------------------------------- modes


def rule_mode_static_raises_for_new_shapes_after_the_warm_up():
    with open_device(mode="static") as (platform, runtime):
        assert platform.capabilities.static_shapes and platform.shapes().tokens
        backend = platform.attention_backend(SPEC)
        for tokens in (4, 8):
            backend.build_metadata(layout(runtime, tokens))
        runtime.end_warm_up()
        backend.build_metadata(layout(runtime, 8))
        check_raises(lambda: backend.build_metadata(layout(runtime, 5)), PlatformError, "needed a compilation")
        check_raises(lambda: backend.build_metadata(layout(runtime, 8, pages=3)), PlatformError, "needed a compilation")
        check_raises(lambda: platform.ops()[0].function(torch.ones(3, 3), None, 1.0), PlatformError, "rms_norm")


def rule_mode_lazy_raises_if_the_previous_step_was_not_ended():
    with open_device(mode="lazy") as (platform, runtime):
        assert platform.capabilities.lazy
        first, second = platform.attention_backend(SPEC), platform.attention_backend(replace(SPEC, scale=1.0))
        batch = layout(runtime)
        first.build_metadata(batch)
        second.build_metadata(batch)  # the same step, for other layers
        check_raises(lambda: first.build_metadata(layout(runtime)), ContractError, "before step_mark")
        for end in (runtime.step_mark, runtime.synchronize):
            end()
            first.build_metadata(layout(runtime))


def rule_steps_of_faults_are_counted_from_the_end_of_the_warm_up():
    with open_device(faults="raise@execute:step=1") as (platform, runtime):
        backend = platform.attention_backend(SPEC)
        for _ in range(3):
            backend.build_metadata(layout(runtime))
        runtime.end_warm_up()
        backend.build_metadata(layout(runtime))
        check_raises(lambda: backend.build_metadata(layout(runtime)), RuntimeError, "injected into execute of rank 0")


def main():
    found = {}
    for name, rule in [(n, f) for n, f in globals().items() if n.startswith("rule_")]:
        try:
            rule()
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
