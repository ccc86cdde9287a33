"""gemma3 against transformers: tiny random models of every shape, and the real 270M weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_harness import SideBySide, all_logits, greedy, reference_ops
from torch import Tensor

from headwater.model.catalogue import FolderLocation, ModelLocation, resolve
from headwater.model.hf_config import config_from_hf
from headwater.model.joined_file import PartsLocation
from headwater.model.load import LoadedModel, load_model, open_model
from headwater.numerics.ops import Ops, WeightFormat

SHAPE: Mapping[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "all kv heads": {"num_key_value_heads": 4},
    "scale of its own": {"query_pre_attn_scalar": 10},
    "window of one": {"sliding_window": 1},
    "window beyond the text": {"sliding_window": 64},
    "own kinds": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "rotary bases and scaling": {"rope_parameters": LINEAR},
}

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a river that",
    "def fibonacci(n):\n",
)
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    module: ModuleType = pytest.importorskip("transformers")
    return module


def saved_oracle(transformers: ModuleType, folder: Path, variant: str) -> tuple[list[int], Tensor]:
    """Saves the variant to ``folder``; (tokens, the oracle's logits after each)."""
    torch.manual_seed(len(variant))
    config = transformers.Gemma3TextConfig(**{**SHAPE, **VARIANTS[variant]})
    model = transformers.Gemma3ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms are born 0, which would hide mistakes
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    tokens = [(11 * i * i + 5 * i + 2) % 96 for i in range(60)]
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return tokens, logits


def loaded_folder(folder: Path) -> LoadedModel:
    return load_model(FolderLocation(path=folder, model_id="m"), reference_ops(), WeightFormat.FP32)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_oracles(transformers: ModuleType, tmp_path: Path, variant: str) -> None:
    tokens, expected = saved_oracle(transformers, tmp_path, variant)
    found = all_logits(loaded_folder(tmp_path).model, reference_ops(), tokens)
    assert expected.std() > 0.3  # logits that are all alike would prove nothing
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_the_spelling_of_published_configs_is_the_same_model(
    transformers: ModuleType, tmp_path: Path
) -> None:
    tokens, expected = saved_oracle(transformers, tmp_path, "rotary bases and scaling")
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"], values["layer_types"]
    values |= {
        "rope_theta": 1e5,
        "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 6,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = all_logits(loaded_folder(tmp_path).model, reference_ops(), tokens)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


# -- the real weights ------------------------------------------------------------------


class NoHub:
    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        pytest.skip("the packages with the Gemma 3 weights are not installed")


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelLocation]:
    found = resolve("gemma3", NoHub(), tmp_path_factory.mktemp("models"))
    assert isinstance(found, PartsLocation)
    yield found
    (found.folder / found.file_name).unlink(missing_ok=True)  # a quarter of a gigabyte


# google/gemma-3-270m's config.json, as transformers 4 wrote it.
PUBLISHED: Mapping[str, object] = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return reference_ops()


@pytest.fixture(scope="module")
def gemma3(location: ModelLocation, ops: Ops) -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(location, ops, WeightFormat.FP32)
    torch.set_num_threads(num_threads)


def vocabulary_of(model: LoadedModel) -> list[str]:
    tokens = model.tokenizer_source.gguf_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return tokens


def encoded(text: str, vocabulary: list[str]) -> list[int]:
    """The begin token, then longest token first: not the real merges, but real tokens."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    rest, found = text.replace(" ", "\u2581"), [ids["<bos>"]]
    while rest:
        length = next(n for n in range(min(len(rest), 20), 0, -1) if rest[:n] in ids)
        found.append(ids[rest[:length]])
        rest = rest[length:]
    return found


def long_prompt(vocabulary: list[str]) -> list[int]:
    """Real text beyond the window, with its first fact to be looked up at the end."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    return encoded(licence, vocabulary)[:700]


def test_gemma3_says_what_it_is_and_knows_a_capital(gemma3: LoadedModel, ops: Ops) -> None:
    assert gemma3.config.tied_head
    assert gemma3.config.context_tokens == 32_768
    of_global, of_window = gemma3.model.cache_plan
    assert of_global.layers == (5, 11, 17)
    assert of_window.window_tokens == 512
    assert gemma3.tokenizer_source.end_token_ids == {1, 106}  # <eos>, <end_of_turn>
    assert gemma3.tokenizer_source.chat_template is None
    vocabulary = vocabulary_of(gemma3)
    prompt = "Berlin is the capital of Germany. Paris is the capital of"
    [chosen] = greedy(gemma3.model, ops, [encoded(prompt, vocabulary)], 1)[0]
    assert vocabulary[chosen] == "\u2581France"


def test_the_file_is_the_model_that_the_published_config_describes(gemma3: LoadedModel) -> None:
    published = config_from_hf(PUBLISHED, "config.json")
    assert gemma3.config.rms_eps == pytest.approx(published.rms_eps)
    assert gemma3.config == replace(published, architecture="gemma3", rms_eps=gemma3.config.rms_eps)


@pytest.mark.oracle
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_gemma3_chooses_the_oracles_tokens(
    gemma3: LoadedModel, ops: Ops, location: ModelLocation, transformers: ModuleType
) -> None:
    config = gemma3.config
    assert config.window is not None
    source = open_model(location).source
    state = {name: source.read(name) for name in source.tensors()}
    source.close()
    oracle = transformers.Gemma3ForCausalLM.from_pretrained(
        None,  # no files: the weights are given
        config=transformers.Gemma3TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_eps,
            max_position_embeddings=config.context_tokens,
            sliding_window=config.window.window_tokens,
        ),
        state_dict=state,
        dtype=torch.float32,
    ).eval()

    vocabulary = vocabulary_of(gemma3)
    prompts = [*(encoded(prompt, vocabulary) for prompt in PROMPTS), long_prompt(vocabulary)]
    for prompt, chosen in zip(prompts, greedy(gemma3.model, ops, prompts, NUM_TOKENS), strict=True):
        whole = prompt + chosen
        # If every choice is the oracle's own after the same tokens, its greedy run is this one.
        with torch.no_grad():
            expected = oracle(torch.tensor([whole]), logits_to_keep=NUM_TOKENS + 1).logits[0]
        assert expected[:-1].argmax(-1).tolist() == chosen
        side = SideBySide(gemma3.model, ops, 1, len(whole))
        found = gemma3.model.logits(side.run([whole])[-NUM_TOKENS - 1 :])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
