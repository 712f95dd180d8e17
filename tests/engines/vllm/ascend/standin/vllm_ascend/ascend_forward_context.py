from contextlib import contextmanager

from vllm.forward_context import get_forward_context, set_forward_context

entered: list[int] = []
"""Tokens of each forward that was surrounded by this context."""


@contextmanager
def set_ascend_forward_context(
    attn_metadata,
    vllm_config,
    num_tokens=0,
    num_tokens_across_dp=None,
    in_profile_run=False,
    num_actual_tokens=None,
    model_instance=None,
    is_draft_model=False,
    skip_compiled=False,
):
    assert num_actual_tokens == num_tokens
    assert hasattr(model_instance, "model")
    entered.append(num_tokens)
    with set_forward_context(
        attn_metadata=attn_metadata,
        vllm_config=vllm_config,
        num_tokens=num_tokens,
        num_tokens_across_dp=num_tokens_across_dp,
        skip_compiled=skip_compiled,
    ):
        get_forward_context().capturing = False
        yield
