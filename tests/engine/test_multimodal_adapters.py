"""A LoRA adapter of the language model, with images in the prompts: the output of transformers' merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm import LoRARequest, RequestError, SamplingParams
from tests.engine.test_items_in_tiers import num_encoded
from tests.helpers.lora_adapters import merged, write_adapter
from tests.helpers.multimodal_suite import NUM_TOKENS, MultiModalOracle, check_hit, engine, generate, oracle
from tests.helpers.multimodal_zoo import load_reference

TARGETS = ("language_model.layers.0.self_attn.q_proj", "language_model.layers.1.mlp.down_proj")
WITH_IMAGES = (1, 2, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3-images"])
def test_an_adapter_with_images_gives_the_tokens_of_merged_weights(name: str, tmp_path: Path) -> None:
    plain = oracle(name)
    adapter = write_adapter(tmp_path / "adapter", plain.folder, targets=TARGETS, model=load_reference(plain.folder))
    adapted = MultiModalOracle(name, plain.entry, plain.folder, plain.requests)
    adapted.model = merged(plain.folder, adapter, load_reference(plain.folder))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [plain.requests[index].as_prompt() for index in WITH_IMAGES]
    lora = LoRARequest("a", 1, str(adapter))
    with engine(plain.folder, enable_lora=True, max_lora_rank=8) as llm:
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        for index, output in zip(WITH_IMAGES, outputs, strict=True):
            adapted.check(index, output.outputs[0].token_ids)
        # The blocks of an adapter are found with it only, and with the same image only. Encoders have no adapters.
        assert num_encoded(llm) == 3
        (base,) = generate(llm, [plain.requests[1]])
        plain.check(1, base.outputs[0].token_ids)
        assert base.num_cached_tokens == 0 and base.outputs[0].token_ids != outputs[0].outputs[0].token_ids
        for index in (1, 5):
            prompt = plain.requests[index].as_prompt()
            [again] = llm.generate([prompt], params, lora_request=lora, use_tqdm=False)
            adapted.check(index, again.outputs[0].token_ids)
            check_hit(plain, again, len(again.prompt_token_ids or ()) - 1)
        assert num_encoded(llm) == 3


@pytest.mark.exhaustive
def test_an_adapter_of_an_encoder_is_refused(tmp_path: Path) -> None:
    plain = oracle("llava")
    targets = ("vision_tower.encoder.layers.0.self_attn.q_proj",)
    adapter = write_adapter(tmp_path / "adapter", plain.folder, targets=targets, model=load_reference(plain.folder))
    with engine(plain.folder, enable_lora=True, max_lora_rank=8) as llm:
        with pytest.raises(RequestError, match=r"vision_tower.*encoders"):
            llm.llm_engine.add_lora(LoRARequest("a", 1, str(adapter)))
