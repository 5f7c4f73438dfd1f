"""Your own platform: a complete platform plugin in one file, found and used like an installed one.

The device here is host memory through torch; attention and all operations run in plain torch. Replace the methods of
`ToyRuntime` and `attention_backend` by those of a device. `mvllm plugin new NAME` writes the same as a package with a
conformance suite; docs/tutorials/writing-a-platform.md walks through it.

    python docs/examples/own_platform.py [--model PATH_OR_NAME]
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from mvllm import LLM, SamplingParams
from mvllm import plugin_api as api

SPEC = api.PlatformSpec("toy", "Toys Inc.", (1, 0), probe="own_platform:probe", factory="own_platform:ToyPlatform")


@api.hookimpl
def mvllm_platform() -> api.PlatformSpec:
    return SPEC


def probe() -> api.ProbeResult:
    return api.ProbeResult(True, "the host's memory is always there", devices=(api.DeviceInfo(0, "toy"),))


class ToyPlatform(api.Platform):
    """What the platform can do, and where its parts are."""

    spec = SPEC
    capabilities = api.Capabilities(
        dtypes=("float32",), kv_dtypes=("float32",), unified_memory=True, scaled_memory_profile=True
    )

    def plan(self, config: api.EngineConfig) -> api.Plan:
        return api.Plan((api.ConfigChange("cache.memory_utilization", 0.2, "the host's memory is shared"),))

    def topology(self, parallel: api.ParallelConfig) -> api.LaunchTopology:
        return api.LaunchTopology(num_workers=1, devices_per_worker=1, executors=("uni",))

    def init_device(self, ctx: api.WorkerContext) -> api.DeviceRuntime:
        return ToyRuntime()

    def communicator(self, group: api.GroupSpec, device: torch.device) -> api.Communicator:
        return api.TorchCommunicator(group, backend="gloo")

    def attention_backend(self, spec: api.AttentionSpec) -> api.AttentionBackend:
        return api.ReferenceAttention(spec)


class ToyRuntime(api.DeviceRuntime):
    """One device: memory and copies. Work on the host is done when a call returns."""

    device = torch.device("cpu")

    def synchronize(self) -> None: ...

    def memory(self) -> api.MemoryInfo:
        return api.MemoryInfo(total=8 << 30, free=8 << 30, used_by_me=0, peak_by_me=0)

    def reset_peak_memory(self) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def to_host(self, tensor: torch.Tensor) -> api.HostCopy:
        return api.FinishedHostCopy(tensor.clone())

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def install(folder: Path) -> None:
    """Writes the metadata that `pip install` would write: the entry point that names this file's module."""
    info = folder / "mvllm_toy-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mvllm-toy\nVersion: 0.9.0\n")
    (info / "entry_points.txt").write_text("[mvllm.platforms]\ntoy = own_platform\n")
    sys.path.append(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate on a platform of this file.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        with LLM(args.model, platform="toy") as llm:
            print(f"Platform: {llm.llm_engine.platform_summary}")
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
    print(f"Generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
