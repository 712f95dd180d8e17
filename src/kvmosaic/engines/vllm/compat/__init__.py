"""The parts of vLLM that we use although they are no official contract, one file per subject. Checked with 0.23
and 0.26 – 0.32.

An import contract keeps both sides, the forward and the paged blocks from importing vLLM directly. The other modules
(connector, worker, messages, metrics, ``LLM``, arguments) import only vLLM's public interface.
"""
