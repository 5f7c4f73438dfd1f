"""Choice of one GGUF file of a folder or repository, with file names as publishers use them."""

from __future__ import annotations

import pytest

from mvllm.entrypoints.cli.main import main
from mvllm.errors import ModelError
from mvllm_gguf.file_choice import choose, list_models

QUANTIZED = [f"Llama-3.2-1B-Instruct-{q}.gguf" for q in ("Q2_K", "Q4_0", "Q4_K_M", "Q4_K_S", "Q8_0", "IQ4_XS", "f16")]
DYNAMIC = ["Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-UD-Q4_K_M.gguf", "mmproj-F16.gguf"]
IMPORTANCE = ["model.i1-Q4_K_M.gguf", "model.i1-IQ3_XXS.gguf", "model.imatrix.gguf", "imatrix.gguf", "README.md"]
UNDERSCORES = ["Phi_3_mini_Q4_K_M.gguf", "Phi_3_mini_Q6_K.gguf"]
SMALL = ["qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct-fp16.gguf"]
SPLIT = ["BF16/big-BF16-00002-of-00002.gguf", "BF16/big-BF16-00001-of-00002.gguf", "big-Q2_K.gguf", "config.json"]
MXFP4 = ["gpt-oss-20b-mxfp4.gguf"]


def chosen(names, quantization=None):
    return choose(list_models(names), quantization, "HERE", "here:{}").files


@pytest.mark.parametrize(
    ("names", "quantization", "file"),
    [
        (QUANTIZED, "q8_0", "Llama-3.2-1B-Instruct-Q8_0.gguf"),
        (QUANTIZED, "F16", "Llama-3.2-1B-Instruct-f16.gguf"),
        (QUANTIZED, "Q4_K_S", "Llama-3.2-1B-Instruct-Q4_K_S.gguf"),
        (QUANTIZED, None, "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (DYNAMIC, "Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        (DYNAMIC, "UD-Q4_K_M", "Qwen3-8B-UD-Q4_K_M.gguf"),
        (DYNAMIC, "Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        (DYNAMIC, None, "Qwen3-8B-Q4_K_M.gguf"),
        (IMPORTANCE, None, "model.i1-Q4_K_M.gguf"),
        (IMPORTANCE, "iq3_xxs", "model.i1-IQ3_XXS.gguf"),
        (IMPORTANCE, "i1-IQ3_XXS", "model.i1-IQ3_XXS.gguf"),
        (UNDERSCORES, "Q6_K", "Phi_3_mini_Q6_K.gguf"),
        (SMALL, None, "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (SMALL, "fp16", "qwen2.5-0.5b-instruct-fp16.gguf"),
        (SPLIT, "Q2_K", "big-Q2_K.gguf"),
        (MXFP4, None, "gpt-oss-20b-mxfp4.gguf"),
        (["ggml-model.GGUF", "mmproj-model-f16.gguf"], None, "ggml-model.GGUF"),
    ],
)
def test_the_file_is_chosen_by_its_quantization(names, quantization, file):
    assert chosen(names, quantization) == (file,)


def test_all_parts_of_a_split_model_are_chosen_in_order():
    assert chosen(SPLIT, "bf16") == ("BF16/big-BF16-00001-of-00002.gguf", "BF16/big-BF16-00002-of-00002.gguf")


def test_a_missing_part_is_named():
    with pytest.raises(ModelError, match=r"1 of the 2 files .*BF16/big-BF16-00001-of-00002\.gguf is missing"):
        chosen(SPLIT[:1])


@pytest.mark.parametrize(
    ("names", "quantization", "said"),
    [
        (QUANTIZED, "Q4_K", r"^HERE holds no GGUF file for 'Q4_K', but .*Q4_K_M\.gguf.*as in 'here:IQ4_XS'\.$"),
        (QUANTIZED[:2], None, r"2 models as GGUF files, none of them Q4_K_M: .*Q2_K\.gguf, .*as in 'here:Q2_K'\.$"),
        (["a/m-Q8_0.gguf", "b/m-Q8_0.gguf"], "q8_0", r"for 'q8_0': a/m-Q8_0\.gguf, b/m-Q8_0\.gguf\. Pass the path"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], None, r"2 models as GGUF files for 'Q4_K_M': a-Q4_K_M\.gguf"),
        (["m-Q8_0.gguf"], "Q4_0", r"no GGUF file for 'Q4_0', but m-Q8_0\.gguf"),
    ],
)
def test_an_ambiguous_or_missing_quantization_is_refused_with_the_file_names(names, quantization, said):
    with pytest.raises(ModelError, match=said):
        chosen(names, quantization)


def test_files_other_than_models_are_ignored():
    assert list_models(["mmproj-F16.gguf", "imatrix.gguf", "README.md", "model.safetensors"]) == []


@pytest.mark.parametrize("what", ["file", "folder", "one of a folder"])
def test_a_damaged_gguf_file_is_reported_in_a_sentence(what, tmp_path, capsys):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    names = {
        "file": str(tmp_path / "model-Q4_K_M.gguf"),
        "folder": str(tmp_path),
        "one of a folder": f"{tmp_path}:q4_k_m",
    }
    assert main(["generate", names[what], "--prompt", "x"]) == 1
    said = capsys.readouterr().err
    assert "model-Q4_K_M.gguf is not a GGUF file" in said and "Traceback" not in said
