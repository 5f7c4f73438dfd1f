"""Loading a checkpoint into a model: every weight is in its place, and every mismatch is an error before any write."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mvllm.errors import ConfigError, ModelError
from mvllm.layers.weight_target import WeightTarget
from mvllm.models import weight_loader
from mvllm.models.dummy_weights import DummyTensors
from mvllm.models.weight_loader import load_weights
from tests.unit.weights.files import ToyModel, assert_holds, box, toy_tensors, write_index, write_raw


def load(folder, model: ToyModel | None = None, **kwargs) -> ToyModel:
    model = model or ToyModel()
    load_weights(model, folder, **{"use_tqdm": False, **kwargs})
    return model


def write(folder, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


# --- loading


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_converted_to_the_models_dtype(tmp_path, stored, wanted):
    tensors = {name: tensor.to(stored) for name, tensor in toy_tensors().items()}
    write(tmp_path, tensors)
    assert_holds(load(tmp_path, ToyModel(wanted)), tensors)


@pytest.mark.parametrize("buffer_bytes", [1, 16, 40, 100])
def test_tensors_larger_than_the_buffer_are_loaded_completely(tmp_path, monkeypatch, buffer_bytes):
    monkeypatch.setattr(weight_loader, "BUFFER_BYTES", buffer_bytes)
    write(tmp_path, toy_tensors())
    assert_holds(load(tmp_path), toy_tensors())


def test_checkpoint_shards_are_merged(tmp_path):
    tensors = toy_tensors()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name]}, tmp_path / f"shard{number}.safetensors")
    write_index(tmp_path, {name: f"shard{number}.safetensors" for number, name in enumerate(tensors)})
    assert_holds(load(tmp_path), tensors)


def test_tensors_that_the_model_ignores_may_be_there_in_any_dtype(tmp_path):
    write(tmp_path, {**toy_tensors(), "model.rotary.inv_freq": torch.arange(3)})
    assert_holds(load(tmp_path), toy_tensors())


def test_names_without_the_base_model_prefix_get_it(tmp_path):
    below = {name.removeprefix("model."): tensor for name, tensor in toy_tensors().items()}
    write(tmp_path, {**below, "rotary.inv_freq": torch.zeros(2)})
    assert_holds(load(tmp_path), toy_tensors())


def test_a_name_with_and_without_the_prefix_is_an_error(tmp_path):
    write(tmp_path, {**toy_tensors(), "norm.weight": torch.zeros(4)})
    with pytest.raises(ModelError, match=r"'model.norm.weight' and 'norm.weight' are both for|both for 'model.norm"):
        load(tmp_path)


def test_one_tensor_may_go_to_several_places_and_a_scalar_to_one(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))

        def weight_targets(self):
            one = WeightTarget(self.a, (1,), box((0, 1)), box((0, 1)))
            two = WeightTarget(self.a, (1,), box((0, 1)), box((2, 3)))
            return {"x": [one, two], "y": [WeightTarget(self.b, (), (), ())]}

        def ignores(self, name):
            return False

        def given_name(self, name):
            return name

    write(tmp_path, {"x": torch.tensor([5.0]), "y": torch.tensor(7.0)})
    model = Model()
    load_weights(model, tmp_path, use_tqdm=False)
    assert model.a.tolist() == [5, 0, 5] and model.b.item() == 7
    load_weights(model, tmp_path, load_format="dummy", use_tqdm=False)
    assert abs(model.b.item()) < 0.05


def test_an_empty_rectangle_reads_nothing(tmp_path):
    """The last rank of a vocabulary that is sharded unevenly."""
    model = ToyModel()
    targets = model.weight_targets()
    targets["model.norm.weight"].append(WeightTarget(model.norm, (4,), box((4, 4)), box((0, 0))))
    model.weight_targets = lambda: targets
    write(tmp_path, toy_tensors())
    assert_holds(load(tmp_path, model), toy_tensors())


def test_progress_is_shown_unless_switched_off(tmp_path, capsys, caplog):
    write(tmp_path, toy_tensors())
    load(tmp_path, use_tqdm=False)
    assert capsys.readouterr().err == "" and not caplog.records
    with caplog.at_level("INFO", logger="mvllm"):
        load(tmp_path, use_tqdm=True)  # without a terminal, a line in the log
    assert capsys.readouterr().err == ""
    [line] = caplog.messages
    assert line.startswith("Loading weights: ") and "(100%)" in line


# --- refusals


def refused(folder, tensors: dict[str, torch.Tensor]) -> str:
    """The error message; asserts that nothing was written before the error."""
    write(folder, tensors)
    model = ToyModel()
    with pytest.raises(ModelError) as caught:
        load(folder, model)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    return str(caught.value)


def test_an_unknown_tensor_is_named_with_its_file_and_the_nearest_known_one(tmp_path):
    tensors = toy_tensors()
    tensors["model.layers.0.fcc.weight"] = tensors.pop("model.layers.0.fc.weight")
    said = refused(tmp_path, tensors)
    assert "unknown tensor 'model.layers.0.fcc.weight' in model.safetensors" in said
    assert "nearest that it has is 'model.layers.0.fc.weight'" in said
    assert "missing tensor 'model.layers.0.fc.weight'" in said
    assert "those of ToyModel" in said


def test_an_unexpected_tensor_is_refused(tmp_path):
    assert "unknown tensor 'model.extra'" in refused(tmp_path, {**toy_tensors(), "model.extra": torch.zeros(1)})


def test_missing_tensors_are_named_the_first_few_by_name_the_rest_by_number(tmp_path, monkeypatch):
    tensors = toy_tensors()
    del tensors["model.norm.weight"]
    said = refused(tmp_path, tensors)
    assert "missing tensor 'model.norm.weight'" in said and "unknown" not in said
    said = refused(tmp_path, {f"x{i}": torch.zeros(1) for i in range(8)})
    assert "and 3 more unknown tensors" in said


def test_a_wrong_shape_is_named_with_file_expected_and_found(tmp_path):
    said = refused(tmp_path, {**toy_tensors(), "model.layers.0.k.weight": torch.zeros(4, 5)})
    assert (
        f"{tmp_path / 'model.safetensors'}: tensor 'model.layers.0.k.weight' has shape [4, 5], expected [4, 4]" in said
    )


def test_a_tensor_of_equal_size_and_another_shape_is_refused(tmp_path):
    assert "shape [3, 5], expected [5, 3]" in refused(
        tmp_path, {**toy_tensors(), "model.layers.0.fc.weight": torch.zeros(3, 5)}
    )


@pytest.mark.parametrize("rows", [9, 11])
def test_an_embedding_for_another_vocabulary_is_named_as_such(tmp_path, rows):
    said = refused(tmp_path, {**toy_tensors(), "model.embed.weight": torch.zeros(rows, 4)})
    assert f"has rows for {rows} tokens, but vocab_size in config.json is 10" in said


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_a_plain_float_is_refused(tmp_path, dtype):
    said = refused(tmp_path, {**toy_tensors(), "model.norm.weight": torch.zeros(4).to(dtype)})
    assert "tensor 'model.norm.weight' has dtype" in said and "expected one of F64, F32, F16, BF16" in said


def test_a_truncated_file_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path, toy_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    model = ToyModel()
    with pytest.raises(ModelError, match="cut short"):
        load(tmp_path, model)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_an_unknown_load_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be one of 'auto', 'safetensors', 'gguf', 'dummy', found 'pt'"):
        load(tmp_path, load_format="pt")


def test_a_model_without_a_target_for_a_parameter_is_a_programming_error(tmp_path):
    model = ToyModel()
    model.forgotten = nn.Parameter(torch.zeros(1))
    write(tmp_path, toy_tensors())
    with pytest.raises(TypeError, match="leaves out the parameters forgotten"):
        load(tmp_path, model)


def test_wrong_offsets_in_a_header_never_read_beyond_the_tensor(tmp_path):
    """Values are written to the header's location, and no neighbouring data is read."""
    header = {
        "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    write_raw(tmp_path / "model.safetensors", header, struct.pack("<2f", 1.0, 2.0))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

        def weight_targets(self):
            return {
                name: [WeightTarget(parameter, (1,), box((0, 1)), box((0, 1)))]
                for name, parameter in (("x", self.a), ("y", self.b))
            }

        def ignores(self, name):
            return False

        def given_name(self, name):
            return name

    model = Model()
    load_weights(model, tmp_path, use_tqdm=False)
    assert (model.a.item(), model.b.item()) == (2.0, 1.0)


# --- dummy


def test_dummy_needs_no_file_and_fills_everything_with_small_numbers(tmp_path):
    model = load(tmp_path / "nowhere", load_format="dummy")
    for name, parameter in model.named_parameters():
        centre = 1.0 if name == "norm" else 0.0
        assert ((parameter - centre).abs() < 0.05).all() and parameter.unique().numel() > 1


def test_dummy_depends_on_seed_and_name_only(tmp_path):
    first, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
    assert not torch.equal(first.embed[:4], first.qk[2:])


def test_dummy_ranks_get_shards_of_one_model(tmp_path):
    """The rectangles of ToyModel are parts of whole tensors that do not depend on the sharding."""
    tensors = {}
    for name, targets in ToyModel().weight_targets().items():
        shape = targets[0].source_shape
        [(start, values)] = DummyTensors(5).rows(name, shape, 0, shape[0])
        assert start == 0
        tensors[name] = torch.from_numpy(values)
    assert_holds(load(tmp_path, load_format="dummy", seed=5), tensors)


@pytest.mark.parametrize(("start", "stop"), [(0, 3000), (1, 2), (900, 2100), (2999, 3000), (7, 7)])
def test_dummy_rows_do_not_depend_on_the_sharding(start, stop):
    shape = (3000, 1024)  # several blocks
    whole = np.concatenate([values for _, values in DummyTensors(0).rows("w", shape, 0, shape[0])])
    row = start
    for first, values in DummyTensors(0).rows("w", shape, start, stop):
        assert first == row
        assert np.array_equal(values, whole[first : first + len(values)])
        row += len(values)
    assert row == stop
