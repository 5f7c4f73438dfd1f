"""A small model with items: a Llama whose images are rows of 8 numbers, turned into embeddings by one matrix.

transformers computes the oracle with the same rows as `inputs_embeds`.

    install(folder, monkeypatch)    makes the architecture known, in this process and those that it starts
    write(folder)                   a checkpoint
    prompt(...), request(...)       token ids with items, and the engine's request of it
    expected(...)                   transformers' tokens
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mvllm import LLM
from mvllm.config.model import ModelConfig
from mvllm.extension_api.model_families import Architecture, HFConfig, ModelFamily, MultiModalModel
from mvllm.extension_api.multimodal_models import Features, ItemEncoder
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ReplicatedLinear
from mvllm.messages.multimodal import ArrayData, ItemSpan, MultiModalItem
from mvllm.messages.requests import EngineCoreRequest
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams
from mvllm.models.llama import LlamaForCausalLM
from tests.helpers.model_zoo import load_reference, make_checkpoint
from tests.helpers.parity import engine
from tests.helpers.plugins import ROOT, write_metadata

ARCHITECTURE = "ToyItemsForCausalLM"
PLACEHOLDER = 5
NUM_FEATURES = 8
WEIGHT = "toy.projector.weight"


class ToyEncoder(ItemEncoder):
    """One matrix. Features without a finite first number fail."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.projector = ReplicatedLinear(ctx, "toy.projector", NUM_FEATURES, config.hidden_size, bias=False)
        self.num_encoded = 0

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        assert modality == "image"
        self.num_encoded += len(items)
        for item in items:
            if item["patches"][0, 0].isinf():
                raise ValueError("an image of infinite brightness")
            if item["patches"][0, 0].isnan():
                raise MemoryError("no memory for this image")
        rows = self.projector(torch.cat([item["patches"] for item in items]))
        return list(rows.split([len(item["patches"]) for item in items]))


class ToyItemsForCausalLM(LlamaForCausalLM):
    """Llama with the encoder. Of three rotary positions it uses the first."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        if self.stage.is_first:
            self.item_encoder = ToyEncoder(config, ctx)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if step.rope_positions is not None:
            assert step.rope_positions.shape == (3, len(positions))
            positions, step = step.rope_positions[0], dataclasses.replace(step, rope_positions=None)
        return super().forward(input_ids, positions, step, intermediate)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or (name == WEIGHT and not self.stage.is_first)


@dataclasses.dataclass(frozen=True)
class Picture:
    """An item of a prompt.

    Attributes:
        patches: float32 [rows, NUM_FEATURES].
        rope: Temporal rotary positions within its span and how far positions advance over it; None for the usual.
    """

    patches: np.ndarray
    rope: tuple[tuple[int, ...], int] | None = None

    @property
    def content_hash(self) -> bytes:
        return hashlib.sha256(self.patches.tobytes() + repr(self.rope).encode()).digest()


def picture(seed: int, rows: int = 20, rope: tuple[tuple[int, ...], int] | None = None) -> Picture:
    """A picture of random patches."""
    return Picture(np.random.default_rng(seed).normal(size=(rows, NUM_FEATURES)).astype(np.float32), rope)


Part = int | Picture
Prompt = Sequence[Part]
"""Token ids and pictures. A picture of n rows takes n + 1 tokens: the second one is none of its rows."""

SEPARATOR = 6


def token_ids(prompt: Prompt) -> list[int]:
    """The ids, with placeholders."""
    ids: list[int] = []
    for part in prompt:
        ids += [part] if isinstance(part, int) else _ids_of(part)
    return ids


def _ids_of(part: Picture) -> list[int]:
    return [PLACEHOLDER, SEPARATOR, *[PLACEHOLDER] * (len(part.patches) - 1)]


def items_of(prompt: Prompt) -> list[MultiModalItem]:
    """The items."""
    items, place = [], 0
    for part in prompt:
        if isinstance(part, int):
            place += 1
            continue
        rows = len(part.patches)
        rope, advance = None, None
        if part.rope is not None:
            temporal, advance = part.rope
            positions = np.array([temporal, [7] * (rows + 1), [9] * (rows + 1)], dtype=np.int32)
            rope = ArrayData("int32", [3, rows + 1], positions.tobytes())
        span = ItemSpan(part.content_hash, place, rows + 1, [(0, 1), (2, rows + 1)], rope, advance)
        features = {"patches": ArrayData("float32", list(part.patches.shape), part.patches.tobytes())}
        items.append(MultiModalItem("image", span, rows, features))
        place += rows + 1
    return items


def request(request_id: str, prompt: Prompt, num_tokens: int = 48, **fields: Any) -> EngineCoreRequest:
    """A greedy request."""
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids(prompt),
        sampling_params=fields.pop("sampling_params", params),
        items=items_of(prompt),
        **fields,
    )


def write(folder: Path, **config: Any) -> Path:
    """Writes a checkpoint of the model."""
    make_checkpoint("llama-gqa", folder, tokenizer=False)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"architectures": [ARCHITECTURE]} | config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    width = tensors["model.embed_tokens.weight"].shape[1]
    tensors[WEIGHT] = torch.randn(width, NUM_FEATURES, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **model: Any) -> None:
    """Makes the architecture known. `model`: fields of MultiModalModel."""
    metadata = write_metadata(folder, "mvllm-toy-items", f"[mvllm.models]\n{ARCHITECTURE} = tests.helpers.toy_items\n")
    monkeypatch.syspath_prepend(str(metadata))
    monkeypatch.syspath_prepend(str(ROOT))

    monkeypatch.setitem(_fields, "of_model", model)


_fields: dict[str, dict[str, Any]] = {"of_model": {}}


def _read_items(hf_config: HFConfig) -> MultiModalModel:
    fields = {"placeholders": {"image": PLACEHOLDER}, "embedding_width": hf_config.positive_int("hidden_size")}
    return MultiModalModel(**(fields | _fields["of_model"]))


FAMILY = ModelFamily({ARCHITECTURE: Architecture(f"{__name__}:ToyItemsForCausalLM", read_items=_read_items)})


_expected: dict[tuple[Path, bytes], list[int]] = {}


def expected(folder: Path, prompt: Prompt) -> list[int]:
    """transformers' 48 greedy tokens for the same embeddings and positions."""
    key = folder, b"".join(b"%d," % part if isinstance(part, int) else part.content_hash for part in prompt)
    if key not in _expected:
        _expected[key] = _expect(folder, prompt, 48)
    return _expected[key]


def _expect(folder: Path, prompt: Prompt, num_tokens: int) -> list[int]:
    llama = folder.with_name(folder.name + "-llama")
    if not llama.exists():
        make_checkpoint("llama-gqa", llama, tokenizer=False)
    model = load_reference(llama)
    weight = load_file(folder / "model.safetensors")[WEIGHT]
    with torch.inference_mode():
        embeds, positions, place = [], [], 0
        for part in prompt:
            ids = [part] if isinstance(part, int) else _ids_of(part)
            rows = model.get_input_embeddings()(torch.tensor(ids))
            own, advance = list(range(len(ids))), len(ids)
            if isinstance(part, Picture):
                rows[[0, *range(2, len(ids))]] = torch.from_numpy(part.patches) @ weight.T
                if part.rope is not None:
                    own, advance = list(part.rope[0]), part.rope[1]
            embeds.append(rows)
            positions += [place + each for each in own]
            place += advance
        tokens: list[int] = []
        states, cache, where = torch.cat(embeds)[None], None, torch.tensor([positions])
        for i in range(num_tokens):
            output = model(inputs_embeds=states, position_ids=where, past_key_values=cache, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
            cache = output.past_key_values
            states = model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
            where = torch.tensor([[place + i]])
    return tokens


@contextmanager
def toy_engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine of the model."""
    with engine(folder, **({"skip_tokenizer_init": True} | settings)) as llm:
        yield llm


def run(llm: LLM, requests: Sequence[EngineCoreRequest]) -> dict[str, list[int]]:
    """Runs requests in the engine core to their ends; returns their tokens, and fails on an error."""
    outcomes = outcomes_of(llm, requests)
    errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    assert not errors, errors
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, list)}


def outcomes_of(llm: LLM, requests: Sequence[EngineCoreRequest]) -> dict[str, list[int] | str]:
    """Runs requests in the engine core to their ends; returns the tokens or the error of each."""
    client = llm.llm_engine._client
    for each in requests:
        client.add_request(each)
    found: dict[str, list[int] | str] = {}
    while client.has_requests():
        for output in client.step().outputs:
            if output.finish_reason is not None:
                found[output.request_id] = output.error if output.error is not None else list(output.new_token_ids)
    return found
