"""Real weights: SmolLM2 from the installed package, against transformers.

Skipped where the package is not installed; it holds the weights only and is
never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from model_harness import greedy, reference_ops

from headwater.model.catalogue import GgufLocation, resolve
from headwater.model.load import LoadedModel, load_model, open_model
from headwater.numerics.ops import Ops, WeightFormat

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a river that",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
NUM_TOKENS = 64


class NoHub:
    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        pytest.skip("the package with the SmolLM2 weights is not installed")


@pytest.fixture(scope="module")
def location() -> GgufLocation:
    found = resolve("smollm2", NoHub())
    assert isinstance(found, GgufLocation)
    return found


@pytest.fixture(scope="module")
def ops() -> Ops:
    return reference_ops()


@pytest.fixture(scope="module")
def smollm2(location: GgufLocation, ops: Ops) -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load_model(location, ops, WeightFormat.FP32)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def vocabulary(smollm2: LoadedModel) -> list[str]:
    tokens = smollm2.tokenizer_source.gguf_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return tokens


def encoded(text: str, vocabulary: list[str]) -> list[int]:
    """Longest token first: not the real merges, but real tokens of the text."""
    ids = {token: index for index, token in enumerate(vocabulary)}
    rest, found = text.replace(" ", "Ġ").replace("\n", "Ċ"), []
    while rest:
        length = next(n for n in range(min(len(rest), 20), 0, -1) if rest[:n] in ids)
        found.append(ids[rest[:length]])
        rest = rest[length:]
    return found


def test_smollm2_knows_a_capital(smollm2: LoadedModel, ops: Ops, vocabulary: list[str]) -> None:
    assert smollm2.tokenizer_source.end_token_ids == {0, 2}
    assert smollm2.config.tied_head
    [first, *_] = greedy(smollm2.model, ops, [encoded(PROMPTS[0], vocabulary)], 1)[0]
    assert vocabulary[first] == "ĠParis"


@pytest.mark.oracle
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_smollm2_chooses_the_oracles_tokens(
    smollm2: LoadedModel, ops: Ops, vocabulary: list[str], location: GgufLocation
) -> None:
    transformers = pytest.importorskip("transformers")
    config = smollm2.config
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_eps,
            max_position_embeddings=config.context_tokens,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    source = open_model(location).source
    state = {name: source.read(name) for name in source.tensors()}
    source.close()
    oracle.load_state_dict(state, strict=False)  # the tied head is not in the file
    oracle.tie_weights()

    prompts = [encoded(prompt, vocabulary) for prompt in PROMPTS]
    for prompt, chosen in zip(
        prompts, greedy(smollm2.model, ops, prompts, NUM_TOKENS), strict=True
    ):
        # If every choice is the oracle's own after the same tokens, its greedy run is this one.
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + chosen])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == chosen
