"""An engine whose one worker drives two of XLA's CPU devices: a program, because a process cannot change its devices.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python platforms/tpu/tests/two_devices.py FAMILY FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from mvllm import LLM, SamplingParams
from mvllm.testing.zoo import Zoo


def check(family: str, folder: Path) -> None:
    from mvllm_tpu.lazy_runtime import num_compilations
    from mvllm_tpu.spmd import SpmdRuntime

    bound: list[SpmdRuntime] = []
    place = SpmdRuntime.place

    def checked_place(self, tensor, dim):
        bound.append(self)
        placed = place(self, tensor, dim)
        sizes = [tuple(part.shape) for part in self.parts(placed)]
        cut = [size // 2 if i == dim else size for i, size in enumerate(tensor.shape)]
        assert sizes == [tuple(cut)] * 2, (sizes, dim)
        return placed

    SpmdRuntime.place = checked_place
    expected = Zoo(folder).oracle(family, (3, 21, 40), 12)
    with LLM(
        str(expected.folder),
        platform="tpu",
        tensor_parallel_size=2,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=2**22,
        use_tqdm_on_load=False,
    ) as llm:
        warm = num_compilations()
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        for _ in range(2):  # the second time with prefix cache hits
            asked = [{"prompt_token_ids": prompt} for prompt in expected.prompts]
            outputs = llm.generate(asked, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected.tokens
        assert num_compilations() == warm, f"{num_compilations() - warm} programs were compiled after the warm-up"
    assert bound, "nothing was placed"


if __name__ == "__main__":
    check(sys.argv[1], Path(sys.argv[2]))
    print("two devices: well")
