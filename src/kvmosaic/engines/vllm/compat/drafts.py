"""vLLM's draft models: which layers are theirs, and how they compute KV in our own forwards."""

from abc import ABC, abstractmethod
from typing import Any

import torch


class Drafter(ABC):
    """A draft model that vLLM has loaded. It computes KV of its own for the tokens that the served model computes."""

    def __init__(self, proposer: Any) -> None:
        """``proposer``: vLLM's owner of the draft model."""
        self.method: str = proposer.method
        """The name of the method in vLLM's configuration."""
        self.model: torch.nn.Module = proposer.model

    @abstractmethod
    def follow(self, output: Any, ids: torch.Tensor, following: torch.Tensor, positions: torch.Tensor) -> None:
        """Run the draft model over the tokens of a pass. It writes its KV to the slots in vLLM's forward context.

        ``output`` is the served model's output for these tokens, and perhaps for padding behind them; ``ids`` those
        of the tokens, ``following`` those of the tokens behind each of them, ``[tokens]`` int32; ``positions``
        ``[tokens]`` int64."""


class Standalone(Drafter):
    """A language model of its own (method ``draft_model``), which reads the tokens themselves."""

    def follow(self, output: Any, ids: torch.Tensor, following: torch.Tensor, positions: torch.Tensor) -> None:
        self.model(input_ids=ids, positions=positions)


class FromHidden(Drafter):
    """Layers behind the served model (EAGLE, EAGLE-3, MTP). They read the hidden states of a token, and the id of the
    token behind it."""

    def follow(self, output: Any, ids: torch.Tensor, following: torch.Tensor, positions: torch.Tensor) -> None:
        # With EAGLE-3, the served model also returns the hidden states of some of its layers.
        hidden, inner = output if isinstance(output, tuple) else (output, None)
        if inner:
            hidden = torch.cat(inner, dim=-1)
        hidden = hidden[: len(ids)]
        if self.method == "eagle3":
            combine: Any = self.model.combine_hidden_states
            hidden = combine(hidden)
        self.model(input_ids=following, positions=positions, hidden_states=hidden)


KINDS: dict[str, type[Drafter]] = {
    "DraftModelProposer": Standalone,
    "EagleProposer": FromHidden,
    # in the V2 runner
    "StandaloneARSpeculator": Standalone,
    "EagleSpeculator": FromHidden,
    "MTPSpeculator": FromHidden,
}
"""vLLM's owners of draft models whose input is known, by the name of the class. Others read something else."""


def draft_layers(runner: Any) -> frozenset[str]:
    """Names of the attention layers of a draft model, which vLLM keeps in the same cache."""
    found: frozenset[str] = frozenset()
    for owner, name in (("drafter", "_draft_attn_layer_names"), ("speculator", "draft_attn_layer_names")):
        found |= frozenset(getattr(getattr(runner, owner, None), name, ()))
    return found


def drafter_of(runner: Any) -> Drafter | str:
    """The draft model of a model runner that has one, or the reason why it cannot compute KV in our forwards."""
    proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    kind = KINDS.get(type(proposer).__name__)
    if kind is None:
        return f"{type(proposer).__name__} was never tried"
    model, draft = runner.vllm_config.model_config, runner.speculative_config
    # Not every release has these.
    if getattr(draft, "parallel_drafting", False):
        return "parallel_drafting was never tried"
    if getattr(draft, "use_heterogeneous_vocab", False):
        return "it has other tokens than the served model"
    if model.is_multimodal_model:
        return "the served model reads other inputs than text"
    if hasattr(runner.get_model(), "get_mtp_target_hidden_states"):
        return "it reads other hidden states than the model's last ones"
    longest = draft.draft_model_config.max_model_len
    if longest < model.max_model_len:
        return f"it is made for {longest} tokens, and max_model_len is {model.max_model_len}"
    return kind(proposer)


def draft_heads(vllm_config: Any) -> int:
    """Number of KV heads of the draft model, over all ranks."""
    heads: int = vllm_config.speculative_config.draft_model_config.get_total_num_kv_heads()
    return heads


def draft_files(vllm_config: Any) -> tuple[Any, Any]:
    """vLLM's ``ModelConfig`` of the draft model, and the ``LoadConfig`` that it is loaded with."""
    draft = vllm_config.speculative_config
    return draft.draft_model_config, getattr(draft, "draft_load_config", None) or vllm_config.load_config
