"""ced from a folder, from the toy and in parts: what is read, kept and called the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ced_harness import Machine, Row, ced_tensors, ced_values
from model_files import write_folder
from reference_ced import logits_of

from headwater.core.errors import ModelError
from headwater.model import catalogue
from headwater.model.catalogue import FolderLocation, ToyLocation, resolve
from headwater.model.ced import CedModel
from headwater.model.family import ModelPart
from headwater.model.hf_config import config_from_hf
from headwater.model.load import LoadedModel, load_model
from headwater.numerics.ops import WeightFormat
from headwater.numerics.reference import ReferenceOps

TEXT = [(5 * i * i + 2) % 48 for i in range(30)]
TOY = "toy:family=ced"


def loaded(
    location: str | Path,
    part: ModelPart = ModelPart.ALL,
    weight_format: WeightFormat = WeightFormat.FP32,
) -> LoadedModel:
    place = (
        resolve(location)
        if isinstance(location, str)
        else FolderLocation(path=location, model_id="folder")
    )
    return load_model(place, ReferenceOps(), weight_format, part=part)


def machine(model: LoadedModel, num_tokens: int) -> Machine:
    assert isinstance(model.model, CedModel)
    return Machine(model.model, ReferenceOps(), 1, num_tokens)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_in_bfloat16_is_served(tmp_path: Path, num_shards: int) -> None:
    config = config_from_hf(ced_values(), "c")
    tensors = {name: tensor.bfloat16() for name, tensor in ced_tensors(config).items()}
    write_folder(tmp_path, ced_values(), tensors, num_shards)
    model = loaded(tmp_path)
    assert model.config == config
    assert model.tokenizer_source.end_token_ids == {1, 2}
    [logits] = machine(model, 48).logits([Row(sequence=0, start=0, tokens=TEXT)])
    wanted = logits_of(config, {n: t.float() for n, t in tensors.items()}, TEXT).logits
    torch.testing.assert_close(logits.double(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.attn.compressor.wgate.weight", "layers.1.attn.compressor.wgate.weight"),
        ("layers.4.attn.attn_sink", "missing: layers.4.attn.attn_sink"),
        ("layers.0.ffn.experts.3.w2.weight", "missing: layers.0.ffn.experts.3.w2.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named_also_for_the_early_part(
    tmp_path: Path, name: str, message: str
) -> None:
    tensors = ced_tensors(config_from_hf(ced_values(), "c"))
    del tensors[name]
    write_folder(tmp_path, ced_values(), tensors)
    for part in ModelPart:
        with pytest.raises(ModelError, match=message):
            loaded(tmp_path, part)


def test_tensors_of_what_has_only_a_place_yet_are_refused(tmp_path: Path) -> None:
    tensors = ced_tensors(config_from_hf(ced_values(), "c"))
    tensors["layers.0.hc_attn_fn"] = torch.zeros(3)
    write_folder(tmp_path, ced_values(), tensors)
    with pytest.raises(ModelError, match=r"no place in this architecture: layers.0.hc_attn_fn"):
        loaded(tmp_path)


@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("tied", [True, False])
def test_the_early_part_has_the_fingerprint_of_the_whole_model(
    tmp_path: Path, weight_format: WeightFormat, tied: bool
) -> None:
    write_folder(
        tmp_path,
        ced_values(tie_word_embeddings=tied),
        ced_tensors(config_from_hf(ced_values(tie_word_embeddings=tied), "c")),
    )
    whole = loaded(tmp_path, weight_format=weight_format)
    part = loaded(tmp_path, ModelPart.EARLY, weight_format)
    assert part.fingerprint == whole.fingerprint
    assert (part.part, whole.part) == (ModelPart.EARLY, ModelPart.ALL)
    assert part.full_weights_bytes == whole.full_weights_bytes == whole.weights_bytes
    assert part.weights_bytes < whole.weights_bytes


@pytest.mark.parametrize(
    "name", ["layers.4.attn.wkv.weight", "norm.weight", "layers.3.ffn_norm.weight"]
)
def test_c08_a_late_tensor_changes_the_fingerprint_of_the_early_part(
    tmp_path: Path, name: str
) -> None:
    tensors = ced_tensors(config_from_hf(ced_values(), "c"))
    write_folder(tmp_path, ced_values(), tensors)
    before = loaded(tmp_path, ModelPart.EARLY).fingerprint
    tensors[name].view(-1)[0] += 1e-6
    write_folder(tmp_path, ced_values(), tensors)
    assert loaded(tmp_path, ModelPart.EARLY).fingerprint != before


def test_of_a_model_without_late_layers_the_early_part_is_all() -> None:
    for name in ("toy", "toy:family=gemma3"):
        part, whole = loaded(name, ModelPart.EARLY), loaded(name)
        assert part.part is ModelPart.ALL
        assert part.fingerprint == whole.fingerprint
        assert part.weights_bytes == part.full_weights_bytes == whole.weights_bytes


def test_the_toy_is_six_layers_with_two_sources() -> None:
    config = loaded(TOY).config
    shape = config.encoder_decoder
    assert shape is not None
    assert (config.family, config.architecture, config.num_layers) == ("ced", "toy", 6)
    assert shape.compress_ratios == (0, 2, 2, 1, 1, 1)
    assert (shape.kv_source_layers, shape.num_encoder_layers) == ((1, 3), 3)
    assert shape.window_tokens == 16
    model = loaded(TOY)
    assert model.tokenizer_source.kind == "byte"
    assert model.fingerprint == loaded(TOY).fingerprint != loaded(f"{TOY},seed=1").fingerprint


@pytest.mark.parametrize(
    ("options", "ratios", "sources"),
    [
        ("layers=2", (0, 1), (1,)),
        ("layers=5,encoder_layers=1", (0, 1, 1, 1, 1), (1,)),
        ("layers=5,encoder_layers=4,ratio=1", (0, 1, 1, 1, 1), (1, 4)),
        ("experts=1,top=1,shared=0", (0, 2, 2, 1, 1, 1), (1, 3)),
        ("heads=1,hidden=32", (0, 2, 2, 1, 1, 1), (1, 3)),
    ],
)
def test_the_toy_has_the_shape_of_its_options(
    options: str, ratios: tuple[int, ...], sources: tuple[int, ...]
) -> None:
    model = loaded(f"{TOY},{options}")
    shape = model.config.encoder_decoder
    assert shape is not None
    assert (shape.compress_ratios, shape.kv_source_layers) == (ratios, sources)
    [logits] = machine(model, 48).logits([Row(sequence=0, start=0, tokens=TEXT)])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ratio=3", "toy model: compress_ratios"),
        ("layers=3,encoder_layers=3", "toy model: num_encoder_layers = 3"),
        ("top=5", "toy model: num_experts_per_tok = 5 .* n_routed_experts = 4"),
        ("heads=16", "toy model: qk_rope_head_dim = 2"),
        ("experts=0", "toy model: experts must be at least 1"),
        ("kv_heads=2", "kv_heads is only for family=llama or family=gemma3"),
    ],
)
def test_a_toy_that_cannot_be_is_refused_by_what_is_wrong(options: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(f"{TOY},{options}")


def test_options_of_ced_are_for_it_alone() -> None:
    for option in ("ratio=1", "experts=2", "top=1", "shared=0", "encoder_layers=1"):
        with pytest.raises(ModelError, match="is only for family=ced"):
            resolve(f"toy:{option}")
    assert isinstance(resolve(f"{TOY},shared=0"), ToyLocation)


def test_the_toy_does_not_repeat_itself_at_once() -> None:
    side, chosen = machine(loaded(TOY), 80), list(b"a river rises")
    start = 0
    while len(chosen) < 60:
        row = Row(sequence=0, start=start, tokens=chosen[start:])
        start = len(chosen)
        chosen.append(int(side.logits([row])[0][-1].argmax()))
    assert len(set(chosen[13:])) > 20


def test_the_toy_s_sinks_biases_and_experts_are_not_empty() -> None:
    location = resolve(TOY)
    assert isinstance(location, ToyLocation)
    model = loaded(TOY).model
    assert isinstance(model, CedModel)
    for layer in model.layers:
        assert layer.sinks.abs().min() > 0
        assert layer.gate_bias.abs().min() > 0
        assert layer.gate_bias.abs().max() < 1  # else one expert takes every token


# -- the model that is part of the package ---------------------------------------------


def test_the_built_in_model_is_a_folder_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "BUILT_IN_FOLDER", tmp_path)
    write_folder(tmp_path, ced_values(), ced_tensors(config_from_hf(ced_values(), "c")))
    location = resolve("headwater-mini")
    assert location == FolderLocation(path=tmp_path, model_id="headwater-mini")
    assert loaded("headwater-mini").model_id == "headwater-mini"


def test_a_built_in_model_whose_files_are_missing_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "BUILT_IN_FOLDER", tmp_path / "nothing")
    with pytest.raises(
        ModelError, match=r"headwater-mini .* missing from .*; install headwater again"
    ):
        resolve("headwater-mini")


def test_the_built_in_model_lies_beside_the_code_that_reads_it() -> None:
    folder = catalogue.BUILT_IN_FOLDER
    assert folder.parts[-3:] == ("model", "builtin", "headwater-mini")
    assert folder.parents[1] == Path(catalogue.__file__).parent
