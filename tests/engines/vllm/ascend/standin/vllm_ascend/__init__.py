"""Stands in for vllm-ascend where there is no NPU: the names that the chunk cache uses of it, in torch operations on
a CPU, inside vLLM's CPU worker. Written from the source of vllm-ascend 0.23.0.post1.

It keeps what differs from vLLM's own backends: K and V in two tensors, blocks of 128 tokens, K and V that are written
inside attention at the metadata's slots, metadata of the plugin's own type, and a forward context of its own.
"""
