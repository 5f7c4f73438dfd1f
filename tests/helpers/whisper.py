"""Tiny random Whisper checkpoints, and what transformers makes of requests: greedy, float32."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor

from mvllm import LLM, RequestOutput, SamplingParams
from tests.helpers.audio_suite import SAMPLING_RATE, draw_sound
from tests.helpers.multimodal_suite import CLEAR, NUM_TOKENS, draw_text
from tests.helpers.multimodal_zoo import EOS_TOKEN_ID, VOCAB_SIZE, draw_weights, make_tokenizer

POSITIONS = 50
"""Rows of the encoder's result for a window, which has one second."""
START = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
TOKENS = (
    *("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>"),
    "<|notimestamps|>",
)
_CONFIGS: dict[str, dict[str, Any]] = {
    "whisper": {},
    "whisper-turbo": {
        "decoder_layers": 1,
        "encoder_layers": 3,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 80,
        "scale_embedding": True,
        "tie_word_embeddings": False,
        "activation_function": "gelu_new",
    },
}
WHISPERS = tuple(_CONFIGS)


def make_whisper(name: str, folder: Path, seed: int = 0) -> Path:
    """Writes model, tokenizer and processor."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "num_mel_bins": 8,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_source_positions": POSITIONS,
        "max_target_positions": 256,
        "pad_token_id": EOS_TOKEN_ID,
        "bos_token_id": EOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "decoder_start_token_id": 320,
    }
    config = WhisperConfig(**{**sizes, **_CONFIGS[name]})
    config._attn_implementation = "eager"
    model = WhisperForConditionalGeneration(config).eval()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    path = folder / "generation_config.json"
    ids = {token: 320 + i for i, token in enumerate(TOKENS)}
    settings = {
        "lang_to_id": {token: ids[token] for token in ("<|en|>", "<|de|>")},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "is_multilingual": True,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    tokenizer = make_tokenizer({f"token_{i}": token for i, token in enumerate(TOKENS)})
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class WhisperRequest:
    """A prompt of the decoder, and the sound that it hears, if any: float32 [samples]."""

    prompt: str
    sound: Any = None

    def as_prompt(self) -> dict[str, Any]:
        """As LLM.generate takes it."""
        if self.sound is None:
            return {"prompt": self.prompt}
        return {"prompt": self.prompt, "multi_modal_data": {"audio": (self.sound, SAMPLING_RATE)}}


def draw_whisper_requests() -> list[WhisperRequest]:
    """Five sounds of different lengths, with text after the start tokens in some, and two requests without sound."""
    sounds = [draw_sound(seconds, i) for i, seconds in enumerate((0.3, 1.0, 0.6))]
    long = START + draw_text(40, "long")
    return [
        WhisperRequest(START, sounds[0]),
        WhisperRequest(long, sounds[1]),
        WhisperRequest(draw_text(25, "text")),
        WhisperRequest(long, sounds[2]),
        WhisperRequest(START + draw_text(12, "short"), sounds[0]),
        WhisperRequest(draw_text(50, "text")),
        WhisperRequest(long + "more", sounds[1]),
    ]


@dataclass
class WhisperOracle:
    """A checkpoint and the greedy tokens of transformers."""

    folder: Path
    requests: list[WhisperRequest]
    _checked: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    @functools.cached_property
    def model(self) -> Any:
        """transformers' model."""
        settings = {"attn_implementation": "eager", "dtype": torch.float32}
        return WhisperForConditionalGeneration.from_pretrained(self.folder, **settings).eval()

    @functools.cached_property
    def processor(self) -> Any:
        """transformers' processor."""
        return WhisperProcessor.from_pretrained(self.folder)

    def prompt_ids(self, request: WhisperRequest) -> list[int]:
        """The token ids of a prompt."""
        ids: list[int] = self.processor.tokenizer(request.prompt)["input_ids"]
        return ids

    def logits(self, request: WhisperRequest, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]."""
        inputs = torch.tensor([list(ids)])
        if request.sound is None:
            return self.model.proj_out(self.model.model.decoder(inputs, use_cache=False).last_hidden_state)[0]
        settings = {"sampling_rate": SAMPLING_RATE, "return_tensors": "pt"}
        features = self.processor.feature_extractor(request.sound, **settings)["input_features"]
        return self.model(input_features=features, decoder_input_ids=inputs, use_cache=False).logits[0]

    @torch.inference_mode()
    def check(self, outputs: Sequence[RequestOutput], which: Sequence[int] | None = None) -> None:
        """Asserts that the outputs have the greedy tokens of transformers, none of which is near a tie."""
        for index, output in zip(which or range(len(outputs)), outputs, strict=True):
            request, tokens = self.requests[index], tuple(output.outputs[0].token_ids)
            if (index, tokens) in self._checked:
                continue
            prompt = self.prompt_ids(request)
            assert output.prompt_token_ids == prompt
            best = self.logits(request, [*prompt, *tokens[:-1]])[-len(tokens) :].topk(2, dim=-1)
            assert tuple(best.indices[:, 0].tolist()) == tokens, f"request {index}"
            gap = float((best.values[:, 0] - best.values[:, 1]).min())
            assert gap > CLEAR, f"request {index} has a tie ({gap:.1e}): choose another seed"
            self._checked.add((index, tokens))


@functools.cache
def whisper_oracle(name: str) -> WhisperOracle:
    """The oracle of a checkpoint; cached for the life of the process."""
    folder = Path(tempfile.mkdtemp(prefix="mvllm-whisper-")) / name
    seed = 1 if name == "whisper-turbo" else 0  # no greedy token is near a tie
    return WhisperOracle(make_whisper(name, folder, seed), draw_whisper_requests())


def generate(llm: LLM, requests: Sequence[WhisperRequest], num_tokens: int = NUM_TOKENS) -> list[RequestOutput]:
    """Greedy continuations."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return llm.generate([request.as_prompt() for request in requests], params, use_tqdm=False)
