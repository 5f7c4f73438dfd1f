"""docs/tutorials/null-device.md: a whole platform plugin without torch, as a listing.

python -m tests.unit.docs.null_device_page    writes the page from the plugin's sources
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorials" / "null-device.md"
PROJECT = ROOT / "plugins" / "null-device"
SOURCES = {"pyproject.toml": "toml", "src/mvllm_null_device/plugin.py": "python"}
HEAD = """\
# A platform without torch, in one file

The null device computes nothing and is a complete platform plugin, the smallest one with a worker
of its own. Start here if your runtime has no torch tensors. `Capabilities.torch_device` is false,
so core asks for no device, no attention backend and no operations. `worker_class` names a class
with the methods of `WorkerProtocol`; core calls only these. The worker handles model, weights,
batches and sampling.

Save the two files below in a folder `mvllm-null-device`, with an empty `__init__.py` beside
`plugin.py`, and install it in the environment of your mvllm ([install](../how-to/install.md)):

```console
uv pip install -e ./mvllm-null-device
```

Then

```console
mvllm generate --platform null --model demo --prompt "Once upon a time"
```

runs the scheduler, the KV cache manager and the detokenizer on it, without importing torch.
`mvllm conformance --platform null` tests it. The [contract](../reference/contract.md) has the
rules, `mvllm contract` prints every name with its signature, and
[Writing a platform](writing-a-platform.md) is about devices that torch supports.

What a worker that computes does in each method:

| method | here | in a worker that computes |
|---|---|---|
| `init_device` | nothing | bind the device with the index `WorkerContext.local_rank` |
| `load_model` | nothing | read the weights in the folder `EngineConfig.model.path` |
| `kv_cache_needs`, `available_kv_bytes` | constants | bytes per token, all layers; memory left by a profiling step |
| `allocate_kv_cache` | nothing | claim the blocks; `MemoryError` if they do not fit |
| `warm_up` | nothing | compile what steps will need |
| `execute_model` | one token for every row | apply the plan, run the model, sample; see `SchedulerOutput` |

The optional methods `sleep`, `wake_up`, `add_lora`, `remove_lora` and `group_layers` are absent, so
core does not offer these features. So are `host_block_needs` and `map_host_blocks`, by which blocks
of keys and values leave the device
([contract](../reference/contract.md#copies-of-blocks-to-host-memory)): there are none here.

The listings are the sources of `plugins/null-device`
(`python -m tests.unit.docs.null_device_page`).
"""


def page() -> str:
    """The complete page."""
    parts = [HEAD]
    for source, language in SOURCES.items():
        text = (PROJECT / source).read_text(encoding="utf-8").replace('readme = "README.md"\n', "")
        parts.append(f"`{source}`:\n\n```{language}\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def listings(text: str) -> dict[str, str]:
    """The files that a reader of the page saves, by path."""
    found = {}
    for source, language in SOURCES.items():
        _, _, rest = text.partition(f"`{source}`:\n\n```{language}\n")
        found[source] = rest.partition("\n```\n")[0] + "\n"
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
