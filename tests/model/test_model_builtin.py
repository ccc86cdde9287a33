"""headwater-mini as it lies in the package: whole, light, and what training made of it."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ced_harness import Machine, Row
from model_harness import reference_ops
from safetensors.torch import load_file
from torch import Tensor

import headwater
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.catalogue import BUILT_IN, BUILT_IN_FOLDER, FolderLocation, resolve
from headwater.model.ced import CedModel
from headwater.model.load import LoadedModel, load_model
from headwater.numerics.ops import WeightFormat
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

if TYPE_CHECKING:
    from tools.mini.model import Mini

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MOST_BYTES = 24 * 2**20
TEXT = (
    "The old teacher lives in a small house next to the river. Every morning she opens the "
    "window and listens to the birds. Her number is 4271. One day a boy came to the door and "
    "asked for a glass of water. She gave him water, bread and a red apple. The boy said: "
    "thank you, I will not forget it. Then he went home through the forest. "
)
NUM_TOKENS = 256  # two blocks of training's attention, twice the window


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(resolve(BUILT_IN), reference_ops(), WeightFormat.FP32)
    torch.set_num_threads(num_threads)


class Training:
    """The modules that the model was trained and written with, their functions as written:
    compiling them would take longer than all that is tested here."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in sys.modules if name.startswith("tools.mini.")]:
                patch.delitem(sys.modules, name)
            patch.setattr(torch, "compile", self._as_written)
            self.checkpoint: Callable[[Mini], dict[str, Tensor]] = importlib.import_module(
                "tools.mini.export"
            ).checkpoint
            module = importlib.import_module("tools.mini.model")
            self.new_model: Callable[[], Mini] = lambda: module.Mini(module.Shape())
            self.config = module.Shape().config(bos_token_id=0, eos_token_id=1)

    @staticmethod
    def _as_written(**_: object) -> Callable[[object], object]:
        return lambda function: function


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


@pytest.fixture(scope="module")
def source(loaded: LoadedModel) -> TokenizerSource:
    return loaded.tokenizer_source


@pytest.fixture(scope="module")
def recipe(source: TokenizerSource) -> Recipe:
    return load_recipe(source)


def test_the_name_finds_the_files_of_the_package() -> None:
    found = resolve(BUILT_IN)
    assert isinstance(found, FolderLocation)
    assert found.model_id == BUILT_IN
    assert found.path.is_relative_to(Path(headwater.__file__).parent)
    assert sorted(path.name for path in found.path.iterdir()) == sorted(FILES)


def test_a_wheel_has_all_files_and_they_are_light() -> None:
    root = Path(headwater.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["headwater"]
    for name in FILES:
        path = (BUILT_IN_FOLDER / name).relative_to(root)
        # As setuptools matches: * stays within a folder.
        assert any(
            len(path.parts) == len(Path(pattern).parts)
            and all(map(fnmatch, path.parts, Path(pattern).parts))
            for pattern in patterns
        )
        assert (BUILT_IN_FOLDER / name).stat().st_mode & 0o444 == 0o444, "others can read it"
    assert sum((BUILT_IN_FOLDER / name).stat().st_size for name in FILES) <= MOST_BYTES


def test_it_is_the_shape_that_is_trained(loaded: LoadedModel, training: Training) -> None:
    config = json.loads((BUILT_IN_FOLDER / "config.json").read_text())
    assert config == json.loads(json.dumps(training.config))
    assert loaded.config.family == "ced"
    assert loaded.config.context_tokens == 131_072
    assert loaded.full_weights_bytes == loaded.weights_bytes


def test_its_tokenizer_declares_what_deepseeks_recipe_needs(
    recipe: Recipe, source: TokenizerSource
) -> None:
    assert type(recipe).__name__ == "DeepseekRecipe"
    assert recipe.has_chat_template
    assert source.end_token_ids == {1}
    added = json.loads((BUILT_IN_FOLDER / "tokenizer.json").read_text())["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    for name in (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜System｜>", "<think>", "</think>", "｜DSML｜"),
    ):
        assert name in special
        # Typed by a person, it is text.
        assert special[name] not in recipe.tokenizer.encode_text(name)


def trained_form(training: Training, tensors: Mapping[str, Tensor]) -> Mini:
    """The model of training with the weights of a checkpoint: what ``checkpoint`` does, undone.

    It moves entries and changes none, so each one's number, sent through it, tells its place.
    """
    model = training.new_model()
    places = [*model.parameters(), *(layer.gate_bias for layer in model.all_layers)]
    dtypes = [place.dtype for place in places]
    total = 0
    for place in places:
        place.data = torch.arange(total, total + place.numel()).view(place.shape).double()
        total += place.numel()
    flat = torch.full((total,), torch.nan)
    for name, numbers in training.checkpoint(model).items():
        flat[numbers.flatten().long()] = tensors[name].float().flatten()
    assert not flat.isnan().any()
    for place, dtype, values in zip(
        places, dtypes, flat.split([place.numel() for place in places]), strict=True
    ):
        place.data = values.view(place.shape).to(dtype)
    return model


def test_its_logits_are_those_of_the_model_that_was_trained(
    loaded: LoadedModel, recipe: Recipe, training: Training
) -> None:
    ids = [0, *recipe.tokenizer.encode_text(4 * TEXT)][:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    tensors = load_file(BUILT_IN_FOLDER / "model.safetensors")
    want = logits_of(trained_form(training, tensors), ids)
    assert isinstance(loaded.model, CedModel)
    machine = Machine(loaded.model, reference_ops(), 1, NUM_TOKENS)
    [found] = machine.logits([Row(sequence=0, start=0, tokens=ids)])
    # Training computes in bfloat16, so in steps of 1/256, through six layers.
    off = distance(found, want)
    assert off < 0.03
    assert (found.argmax(dim=1) == want.argmax(dim=1)).float().mean() > 0.95
    # A wrong order of a head's entries is no matter of rounding.
    for name in tensors:
        if name.endswith("attn.wkv.weight"):
            tensors[name][64:] = tensors[name][64:].flip(0)
    assert distance(logits_of(trained_form(training, tensors), ids), want) > 3 * off


def logits_of(model: Mini, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        hidden: Tensor = model(torch.tensor([ids]))
        return hidden.float() @ model.embed.float().T


def distance(one: Tensor, other: Tensor) -> float:
    """As a share of how much logits differ among themselves."""
    return float((one - other).square().mean().sqrt() / other.std())
