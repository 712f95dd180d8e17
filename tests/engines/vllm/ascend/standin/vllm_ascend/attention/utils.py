from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class AscendCommonAttentionMetadata(CommonAttentionMetadata):
    seq_lens_cpu: torch.Tensor = None
    num_computed_tokens_cpu: torch.Tensor = None
    decode_token_per_req: int = 1
    actual_seq_lengths_q: list[int] = field(default_factory=list)
    positions: torch.Tensor = None
    positions_cpu: torch.Tensor = None
    attn_state: Any = None
    graph_pad_size: int = -1
    num_input_tokens: int = 0
