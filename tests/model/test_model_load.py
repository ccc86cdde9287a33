"""Loading: fingerprints, the toy model, chunked prefill, the served context."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from model_files import LLAMA, llama_values, random_tensors, write_folder
from model_harness import all_logits, greedy, reference_ops

from headwater.core.errors import ModelError
from headwater.model.catalogue import FolderLocation, ModelLocation, resolve
from headwater.model.config import ModelConfig, NoScaling
from headwater.model.family import CacheKind
from headwater.model.hf_config import config_from_hf
from headwater.model.load import LoadedModel, load_model
from headwater.model.toy_source import VOCAB_SIZE
from headwater.numerics.ops import WeightFormat

PROMPT = list(b"a river rises in the hills")


def loaded(name: str, context_tokens: int | None = None) -> LoadedModel:
    return load_model(
        resolve(name), reference_ops(), WeightFormat.FP32, context_tokens=context_tokens
    )


def loaded_folder(folder: Path, weight_format: WeightFormat = WeightFormat.FP32) -> LoadedModel:
    location: ModelLocation = FolderLocation(path=folder, model_id="same-name")
    return load_model(location, reference_ops(), weight_format)


def test_the_toy_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    ops = reference_ops()
    first, again, other = loaded("toy:seed=3"), loaded("toy:seed=3"), loaded("toy:seed=4")
    assert first.fingerprint == again.fingerprint != other.fingerprint
    logits = all_logits(first.model, ops, PROMPT)
    assert torch.equal(logits, all_logits(again.model, ops, PROMPT))
    assert not torch.allclose(logits, all_logits(other.model, ops, PROMPT))


def test_the_toy_does_not_repeat_itself_at_once() -> None:
    toy = loaded("toy")
    assert len(set(greedy(toy.model, reference_ops(), [PROMPT], 40)[0])) > 10


def test_the_toy_says_how_it_is_shaped_and_spoken_to() -> None:
    toy = loaded("toy:layers=3,heads=8,kv_heads=2,hidden=64")
    assert toy.model_id == "toy:layers=3,heads=8,kv_heads=2,hidden=64"
    [group] = toy.model.cache_plan
    assert group.kind == CacheKind.GLOBAL
    assert (group.layers, group.num_kv_heads, group.head_dim) == ((0, 1, 2), 2, 8)
    assert group.persisted
    assert toy.tokenizer_source.kind == "byte"
    assert toy.tokenizer_source.vocab_size == VOCAB_SIZE
    assert toy.tokenizer_source.bos_token_id == 256
    assert toy.tokenizer_source.end_token_ids == {258}


def test_counts_of_bytes_and_operations_follow_from_the_shapes() -> None:
    toy = loaded("toy")  # 2 layers, hidden 64, 4 heads of 16, 2 kv heads, mlp 128, vocab 264
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert toy.model.flops_per_token == 2 * 2 * per_layer
    norms = 2 * 2 * 64 + 64
    table = VOCAB_SIZE * 64
    assert toy.model.step_weights_bytes == 4 * (2 * per_layer + table + norms)
    assert toy.model.weights_bytes == toy.weights_bytes == 4 * (2 * per_layer + 2 * table + norms)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 25])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ],
)
def test_a_prompt_in_chunks_gives_the_logits_of_one_pass(
    tmp_path: Path, chunk: int, changes: dict[str, object]
) -> None:
    write_folder(tmp_path, llama_values(**changes))
    model = loaded_folder(tmp_path).model
    ops = reference_ops()
    tokens = [(7 * i * i + 3) % 64 for i in range(40)]
    torch.testing.assert_close(
        all_logits(model, ops, tokens, chunk), all_logits(model, ops, tokens), atol=1e-5, rtol=1e-5
    )


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", LLAMA)
    write_folder(tmp_path / "three", LLAMA, num_shards=3)
    assert (
        loaded_folder(tmp_path / "one").fingerprint == loaded_folder(tmp_path / "three").fingerprint
    )


def test_c08_other_weights_under_the_same_name_have_another_fingerprint(tmp_path: Path) -> None:
    tensors = random_tensors(config_from_hf(LLAMA, "c"))
    write_folder(tmp_path, LLAMA, tensors)
    before = loaded_folder(tmp_path).fingerprint
    assert loaded_folder(tmp_path).fingerprint == before
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] += 1e-6  # one number, its last bits
    write_folder(tmp_path, LLAMA, tensors)
    assert loaded_folder(tmp_path).fingerprint != before


def test_c08_the_fingerprint_covers_arithmetic_and_format_but_not_end_ids(tmp_path: Path) -> None:
    def changed(**changes: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(llama_values(**changes)))
        return loaded_folder(tmp_path).fingerprint

    write_folder(tmp_path, LLAMA)
    before = loaded_folder(tmp_path).fingerprint
    assert changed(rope_theta=20000.0) != before
    assert changed(rms_norm_eps=1e-6) != before
    assert changed(rope_scaling={"type": "linear", "factor": 2.0}) != before
    assert changed(eos_token_id=9) == before
    assert changed(max_position_embeddings=32) == before
    assert changed() == before
    assert loaded_folder(tmp_path, WeightFormat.BF16).fingerprint != before


def test_every_config_field_is_part_of_the_arithmetic_or_named_as_not() -> None:
    config = replace(
        loaded("toy:family=gemma3").config,
        attention_scale=0.1,
        encoder_decoder=loaded("toy:family=ced").config.encoder_decoder,
    )
    names = set(json.loads(config.arithmetic_json()))
    left_out = {field.name for field in fields(ModelConfig)} - names
    assert left_out == {"bos_token_id", "eos_token_ids", "context_tokens"}


def test_a_field_that_a_model_does_not_set_is_not_in_its_fingerprint() -> None:
    """Else every model's stored KV would be lost when a family brings a field of its own."""
    names = set(json.loads(loaded("toy").config.arithmetic_json()))
    assert not names & {"window", "attention_scale", "encoder_decoder"}


def test_a_dynamic_table_for_another_context_is_another_model(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_values(rope_scaling={"type": "dynamic", "factor": 2.0}))
    location = FolderLocation(path=tmp_path, model_id="m")
    prints = {
        context: load_model(
            location, reference_ops(), WeightFormat.FP32, context_tokens=context
        ).fingerprint
        for context in (32, 64, 100, 128)
    }
    assert prints[32] == prints[64]  # within the original context nothing is scaled
    assert len(set(prints.values())) == 3


def test_the_served_context_can_be_lowered_and_not_raised() -> None:
    assert loaded("toy").config.context_tokens == 4096
    assert loaded("toy", context_tokens=100).config.context_tokens == 100
    assert loaded("toy", context_tokens=100).fingerprint == loaded("toy").fingerprint
    for asked in (0, 4097):
        with pytest.raises(ModelError, match=f"a context of {asked} tokens .* 1 to 4096"):
            loaded("toy", context_tokens=asked)


def test_shapes_that_contradict_each_other_are_refused() -> None:
    config = loaded("toy").config
    assert config.rope_scaling == NoScaling()
    with pytest.raises(ModelError, match="cannot share"):
        replace(config, num_kv_heads=3)


def test_end_ids_are_gathered_from_every_file(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_values(eos_token_id=2, bos_token_id=None))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    settings = {
        "eos_token": {"content": "<|im_end|>"},
        "bos_token": "<s>",
        "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "1": {"content": "<s>"}},
        "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    source = loaded_folder(tmp_path).tokenizer_source
    assert source.kind == "hf"
    assert source.end_token_ids == {2, 5, 7}
    assert source.bos_token_id == 1
    assert source.tokenizer_json == b"{}"
    assert source.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert loaded_folder(tmp_path).tokenizer_source.chat_template == "from a file"


def test_a_sequence_chooses_the_same_tokens_alone_and_among_others() -> None:
    toy, ops = loaded("toy"), reference_ops()
    prompts = [PROMPT, PROMPT[:3], list(b"another prompt, longer than the first"), PROMPT[5:]]
    together = greedy(toy.model, ops, prompts, 12)
    assert together == [greedy(toy.model, ops, [prompt], 12)[0] for prompt in prompts]
