"""Names of targets and their properties."""

from __future__ import annotations

import pytest

from mvllm_rocm import targets


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (110001, "gfx1101"),
        (120001, "gfx1201"),
    ],
)
def test_the_drivers_numbers_have_names(version, name):
    assert targets.name_of(version) == name
    assert targets.parts(name) == (version // 10000, version // 100 % 100, version % 100)
    assert targets.parts(f"{name}:sramecc+:xnack-") == targets.parts(name)


@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"])
def test_targets_with_matrix_units_for_bfloat16_are_supported(name):
    assert targets.is_supported(name)


@pytest.mark.parametrize("name", ["gfx803", "gfx906", "gfx908", "gfx90c", "gfx1010", "gfx1030", "gfx000", "sm_90", ""])
def test_other_targets_are_not_supported(name):
    assert not targets.is_supported(name)


@pytest.mark.parametrize(
    ("name", "format_"),
    [("gfx942", "float8_e4m3fnuz"), ("gfx940", "float8_e4m3fnuz")]
    + [(name, "float8_e4m3fn") for name in ("gfx90a", "gfx950", "gfx1100", "gfx1201")],
)
def test_each_target_has_a_float8_format(name, format_):
    assert targets.float8(name) == format_


@pytest.mark.parametrize(
    ("name", "multiplied"),
    [("gfx942", True), ("gfx950", True), ("gfx1201", True), ("gfx90a", False), ("gfx1100", False), ("gfx1151", False)],
)
def test_not_every_target_multiplies_float8(name, multiplied):
    assert targets.multiplies_float8(name) is multiplied


def test_an_invalid_target_name_raises():
    with pytest.raises(ValueError, match="'sm_90' is not a target name such as gfx942"):
        targets.parts("sm_90")


def test_integrated_devices_use_the_hosts_memory():
    assert targets.is_integrated("gfx1151", 0x1586) and targets.is_integrated("gfx942", 0x74A0)
    assert not targets.is_integrated("gfx942", 0x74A1) and not targets.is_integrated("gfx1100", 0x744C)
