"""EngineArgs: types, ranges and names of settings, and dependencies between them."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_settings import SERVER_MAX_QUEUED_REQUESTS
from mvllm.config.multimodal import MultiModalConfig
from mvllm.entrypoints.cli import serve
from mvllm.errors import ConfigError, ModelError
from tests.unit.config.folders import write_folder


def make_config(folder: Path, **kwargs):
    return EngineArgs.from_kwargs(model=str(write_folder(folder)), **kwargs).create_engine_config()


def test_a_plain_folder_gives_a_complete_config(tmp_path):
    config = make_config(tmp_path)
    assert config.model.path == tmp_path
    assert config.model.tokenizer == str(tmp_path)
    assert (config.cache.memory_utilization, config.cache.enable_prefix_caching) == (None, True)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 2048)
    assert config.parallel.world_size == 1
    assert (config.load.load_format, config.platform, config.enforce_eager) == ("auto", None, False)


def test_engines_without_a_seed_draw_different_seeds_and_the_same_dummy_weights(tmp_path):
    drawn = [make_config(tmp_path, **given).model for given in ({}, {}, {"seed": None})]
    assert len({model.seed for model in drawn}) == 3
    assert {model.weights_seed for model in drawn} == {make_config(tmp_path, seed=0).model.weights_seed}
    given = make_config(tmp_path, seed=drawn[0].seed).model
    assert (given.seed, given.weights_seed, given.seed_is_random) == (drawn[0].seed, drawn[0].seed, False)


def test_every_setting_is_copied_to_its_config_field(tmp_path):
    config = make_config(
        tmp_path,
        dtype="float16",
        seed=7,
        max_model_len=100,
        max_logprobs=5,
        trust_remote_code=True,
        enforce_eager=True,
        memory_utilization=0.5,
        kv_cache_memory_bytes=1000,
        kv_cache_dtype="float32",
        block_size=32,
        enable_prefix_caching=False,
        prefix_caching_seed=3,
        state_snapshot_interval=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        enable_chunked_prefill=True,
        scheduling_policy="priority",
        async_scheduling=True,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=3,
        distributed_executor_backend="mp",
        load_format="dummy",
        use_tqdm_on_load=False,
        platform="acme",
        skip_tokenizer_init=True,
    )
    model, cache, scheduler, parallel = config.model, config.cache, config.scheduler, config.parallel
    assert (model.dtype, model.seed, model.max_model_len, model.max_logprobs) == ("float16", 7, 100, 5)
    assert (model.trust_remote_code, model.tokenizer) == (True, None)
    assert (cache.memory_utilization, cache.kv_cache_memory_bytes, cache.dtype, cache.block_size) == (
        0.5,
        1000,
        "float32",
        32,
    )
    assert (cache.enable_prefix_caching, cache.prefix_caching_seed) == (False, 3)
    assert cache.state_snapshot_interval == 64
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (4, 16)
    assert (scheduler.policy, scheduler.async_scheduling) == ("priority", True)
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size) == (2, 2, 3)
    assert parallel.distributed_executor_backend == "mp"
    assert (config.load.load_format, config.load.use_tqdm) == ("dummy", False)
    assert (config.platform, config.enforce_eager) == ("acme", True)


def test_building_a_config_imports_neither_torch_nor_transformers(tmp_path):
    write_folder(tmp_path)
    code = (
        "import sys; from mvllm.config.engine_args import EngineArgs\n"
        f"EngineArgs.from_kwargs(model={str(tmp_path)!r}).create_engine_config()\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------------------- names


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"no engine setting 'max_modle_len'\. Did you mean 'max_model_len'\?( A keyw.*)?$"
    ):
        EngineArgs.from_kwargs(model="x", max_modle_len=5)


def test_gpu_memory_utilization_is_an_alias_of_memory_utilization(tmp_path):
    assert make_config(tmp_path, gpu_memory_utilization=0.25).cache.memory_utilization == 0.25


def test_an_alias_with_another_value_is_refused():
    with pytest.raises(ConfigError, match="are the same setting"):
        EngineArgs.from_kwargs(model="x", gpu_memory_utilization=0.25, memory_utilization=0.5)
    assert EngineArgs.from_kwargs(model="x", gpu_memory_utilization=0.5, memory_utilization=0.5).memory_utilization


def test_the_model_must_be_given():
    with pytest.raises(ConfigError, match="model must be given"):
        EngineArgs.from_kwargs(seed=1)


def test_paths_are_accepted_like_strings(tmp_path):
    args = EngineArgs.from_kwargs(model=write_folder(tmp_path), tokenizer=tmp_path)
    assert args.create_engine_config().model.model == str(tmp_path)


# ------------------------------------------------------------------------------------------------------- types, ranges


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "memory_utilization",
            [1e-9, 0.5, 1, 1.0],
            [0, -0.1, 1.0000001, 10**400, float("nan"), float("inf"), True, "0.5"],
        ),
        ("max_model_len", [1, None, "auto", -1], [0, -2, 1.5, "10", "longest", True]),
        ("seed", [0, 2**63 - 1, None], [-1, 2**63, 0.5]),
        ("max_logprobs", [-1, 0, 20], [-2, None, "5"]),
        ("kv_cache_memory_bytes", [1, None], [0, -1, 1e9]),
        ("block_size", [1, 16, 1024, None], [0, 1025, 16.0]),
        ("prefix_caching_seed", [0, 2**63 - 1, None], [-1, 2**63]),
        ("state_snapshot_interval", [0, 1, 512], [-1, None, 0.5]),
        ("max_num_seqs", [1, 2048], [0, 65537, None]),
        ("max_num_batched_tokens", [256, 2**24, None], [0, -1, 2**24 + 1]),
        ("tensor_parallel_size", [1, 1024], [0, 1025, None]),
        ("pipeline_parallel_size", [1, 1024], [0, 1025]),
        ("data_parallel_size", [1, 1024], [0, 1025]),
        ("dtype", ["auto", "half", "bfloat16"], ["int8", "", None, 16]),
        ("scheduling_policy", ["fcfs", "priority"], ["lifo", None, 1]),
        ("load_format", ["auto", "safetensors", "gguf", "dummy"], ["pt", None]),
        ("distributed_executor_backend", [None, "uni", "an_installed_one", "a.b.C"], [3]),
        ("enable_prefix_caching", [True, False], [None, 1, "yes"]),
        ("enforce_eager", [True, False], [None, 0]),
        ("hf_overrides", [None, {}, {"a": 1}], ["{}", [1]]),
        ("revision", [None, "main"], [7]),
        ("model", ["x"], [None, 7]),
    ],
)
def test_both_sides_of_every_bound(name, good, bad):
    for value in good:
        EngineArgs.from_kwargs(**{"model": "x", name: value})
    for value in bad:
        with pytest.raises(ConfigError, match=name) as caught:
            EngineArgs.from_kwargs(**{"model": "x", name: value})
        assert repr(value) in str(caught.value) or str(value) in str(caught.value)


def test_an_error_names_the_permitted_range():
    with pytest.raises(ConfigError, match=r"memory_utilization must be a number > 0 and <= 1, found 1\.5"):
        EngineArgs.from_kwargs(model="x", memory_utilization=1.5)
    with pytest.raises(ConfigError, match=r"one of 'fcfs', 'priority', found 'lifo'"):
        EngineArgs.from_kwargs(model="x", scheduling_policy="lifo")


def test_a_dtype_object_of_torch_is_accepted():
    torch = pytest.importorskip("torch")
    assert EngineArgs.from_kwargs(model="x", dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(("alias", "name"), [("half", "float16"), ("float", "float32")])
def test_short_names_of_dtypes_are_expanded(tmp_path, alias, name):
    assert make_config(tmp_path, dtype=alias).model.dtype == name


# --------------------------------------------------------------------------------------- dependencies between settings


def test_the_token_budget_is_at_least_max_num_seqs():
    EngineArgs.from_kwargs(model="x", max_num_seqs=64, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 63.*max_num_seqs \(64\)"):
        EngineArgs.from_kwargs(model="x", max_num_seqs=64, max_num_batched_tokens=63)


def test_the_default_budget_grows_with_the_number_of_sequences(tmp_path):
    assert make_config(tmp_path, max_num_seqs=5000).scheduler.max_num_batched_tokens == 5000


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt(tmp_path):
    folder = write_folder(tmp_path, max_position_embeddings=9000)
    args = {"model": str(folder), "enable_chunked_prefill": False}
    assert EngineArgs.from_kwargs(**args).create_engine_config().scheduler.max_num_batched_tokens == 9000
    exact = EngineArgs.from_kwargs(**args, max_num_batched_tokens=9000).create_engine_config()
    assert exact.scheduler.max_num_batched_tokens == 9000
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 8999.*max_model_len \(9000\)"):
        EngineArgs.from_kwargs(**args, max_num_batched_tokens=8999).create_engine_config()


def test_parallel_sizes_must_divide_heads_and_not_exceed_layers(tmp_path):  # 4 heads, 2 key-value heads, 2 layers
    assert make_config(tmp_path, tensor_parallel_size=4).parallel.tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="does not divide the model's 4 attention heads"):
        make_config(tmp_path, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"at most the number of layers \(2\)"):
        make_config(tmp_path, pipeline_parallel_size=3)


def test_key_value_heads_are_a_multiple_or_a_divisor_of_the_ranks(tmp_path):
    folder = write_folder(tmp_path, num_attention_heads=12, num_key_value_heads=6, hidden_size=48)
    with pytest.raises(ConfigError, match="6 key-value heads"):
        EngineArgs.from_kwargs(model=str(folder), tensor_parallel_size=4).create_engine_config()
    folder = write_folder(
        tmp_path / "m", num_attention_heads=12, num_key_value_heads=6, hidden_size=48, intermediate_size=96
    )
    EngineArgs.from_kwargs(model=str(folder), tensor_parallel_size=12).create_engine_config()


@pytest.mark.parametrize(
    ("keys", "size", "said"),
    [
        ({}, 3, "intermediate_size of 128, the width of its MLPs. Choose 1 or 2."),
        ({"num_experts": 4, "moe_intermediate_size": 66}, 6, None),
        ({"num_experts": 4, "moe_intermediate_size": 64}, 6, "moe_intermediate_size of 64"),
        ({"num_local_experts": 4}, 3, "intermediate_size of 128, the width of its experts. Choose 1 or 2."),
        ({"linear_num_key_heads": 4}, 3, "the model's 4 key heads of its gated delta layers. Choose 1 or 2."),
        ({"linear_num_key_heads": 4, "layer_types": ["full_attention"] * 2, "intermediate_size": 96}, 3, None),
        (
            {"mamba_n_heads": 6, "mamba_n_groups": 2, "intermediate_size": 96},
            3,
            "neither divides the model's 2 groups of Mamba heads nor is",
        ),
        ({"num_experts": 4}, 6, None),  # with another key for the size of experts, for instance
        ({"block_ff_dim": 7}, 6, None),
    ],
)
def test_ranks_share_the_width_of_mlps_where_the_config_tells_it(tmp_path, keys, size, said):
    folder = write_folder(tmp_path, num_attention_heads=6, num_key_value_heads=6, hidden_size=48, **keys)
    args = EngineArgs.from_kwargs(model=str(folder), tensor_parallel_size=size)
    if said is None:
        args.create_engine_config()
    else:
        with pytest.raises(ConfigError, match=re.escape(said)):
            args.create_engine_config()


def test_max_logprobs_is_at_most_the_vocabulary(tmp_path):
    assert make_config(tmp_path, max_logprobs=300).model.max_logprobs == 300
    assert make_config(tmp_path, max_logprobs=-1).model.max_logprobs == 300
    with pytest.raises(ConfigError, match="only 300 tokens"):
        make_config(tmp_path, max_logprobs=301)


# ---------------------------------------------------------------------------------------------- tokenizer and defaults


def test_a_separate_tokenizer(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    assert make_config(tmp_path / "m", tokenizer=str(other)).model.tokenizer == str(other)
    with pytest.raises(
        ModelError, match=r"tokenizer '\./nowhere' was not found\.\n  Folder: .*nowhere' does not exist"
    ):
        make_config(tmp_path / "m", tokenizer="./nowhere")


def test_generation_defaults_come_from_the_model_or_another_folder_or_are_off(tmp_path):
    folder = write_folder(tmp_path / "m", generation={"temperature": 0.6, "eos_token_id": [7, 8]})
    other = write_folder(tmp_path / "o", generation={"temperature": 0.1})

    def make(**kwargs):
        return EngineArgs.from_kwargs(model=str(folder), **kwargs).create_engine_config().model

    assert make().generation_defaults == {"temperature": 0.6}
    assert make(generation_config=str(other)).generation_defaults == {"temperature": 0.1}
    assert make(generation_config="none").generation_defaults == {}
    # The end of a sequence is a property of the model, independent of the sampling defaults.
    assert make(generation_config="none").eos_token_ids == (7, 8, 2)
    with pytest.raises(ConfigError, match="generation_config must be"):
        make(generation_config=str(tmp_path))


# -------------------------------------------------------------------------------------------------------- declarations


def test_only_a_server_has_a_default_queue_limit(tmp_path):
    """A program that uses AsyncLLM controls its own requests; `mvllm serve` must limit those of its clients."""
    assert make_config(tmp_path).scheduler.max_queued_requests > 10**9
    assert make_config(tmp_path, max_queued_requests=3).scheduler.max_queued_requests == 3
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    folder = str(tmp_path)
    assert serve._engine(parser.parse_args([folder])).max_queued_requests == SERVER_MAX_QUEUED_REQUESTS
    assert serve._engine(parser.parse_args([folder, "--max-queued-requests", "0"])).max_queued_requests == 0


def test_every_setting_has_the_metadata_of_a_command_line_option():
    groups = {"model", "cache", "scheduler", "parallel", "load", "multimodal", "lora", "platform"}
    options = EngineArgs.options()
    assert {o.group for o in options} == groups
    assert all(o.help.endswith(".") and o.kind in (str, int, float, bool, dict) for o in options)
    assert len({o.name for o in options}) == len(options) > 25
    defaults = {o.name: o.default for o in options if o.name != "model"}
    EngineArgs.from_kwargs(model="x", **defaults)  # every default is in the permitted range


def test_tokens_are_hidden_when_the_settings_are_printed():
    assert "hunter2" not in repr(EngineArgs.from_kwargs(model="x", hf_token="hunter2"))


def test_settings_of_multimodal_inputs(tmp_path):
    args = EngineArgs.from_kwargs(
        model="demo",
        limit_mm_per_prompt={"image": 2, "video": {"count": 0}},
        allowed_local_media_path=str(tmp_path),
        allowed_media_domains=["a.test", "b.test"],
        mm_processor_kwargs={"num_frames": 4},
        mm_processor_cache_gb=0.5,
        enable_mm_embeds=True,
        media_fetch_timeout=2,
        max_media_bytes=1000,
        max_media_pixels=2000,
        max_audio_seconds=30,
        mm_inflight_gb=0.5,
        max_num_encoder_input_tokens=300,
        encoder_cache_size=400,
    )
    found = args.create_engine_config().multimodal
    assert found.limit_per_prompt == {"image": 2, "video": 0}
    assert found.allowed_local_media_path == str(tmp_path.resolve())
    assert found.allowed_media_domains == ("a.test", "b.test")
    assert found.processor_kwargs == {"num_frames": 4}
    assert (found.processor_cache_bytes, found.enable_embeds) == (1 << 29, True)
    assert (found.fetch_timeout, found.max_media_bytes, found.max_pixels, found.max_audio_seconds) == (
        2,
        1000,
        2000,
        30,
    )
    assert (found.max_encoder_tokens, found.encoder_cache_tokens, found.inflight_bytes) == (300, 400, 1 << 29)
    assert EngineArgs.from_kwargs(model="demo").create_engine_config().multimodal == MultiModalConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_mm_per_prompt": {"picture": 1}},
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"image": "2"}},
        {"allowed_local_media_path": "/no/such/folder"},
        {"mm_processor_kwargs": {"size": {1, 2}}},
        {"mm_processor_cache_gb": -1},
        {"media_fetch_timeout": 0},
        {"max_media_bytes": 0},
        {"max_media_pixels": 0},
        {"max_audio_seconds": float("inf")},
        {"mm_inflight_gb": 0},
        {"max_num_encoder_input_tokens": 0},
        {"encoder_cache_size": 0},
    ],
)
def test_settings_of_multimodal_inputs_that_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineArgs.from_kwargs(model="demo", **settings).create_engine_config()


def test_limits_on_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    for text in ("image=2,audio=1", '{"image": 2, "audio": 1}'):
        assert parser.parse_args(["--limit-mm-per-prompt", text]).limit_mm_per_prompt == {"image": 2, "audio": 1}
