"""What we use of vLLM that is no official contract, one file per subject. Checked with 0.26 to 0.32.

An import contract keeps both sides, the forward and the paged blocks from importing vLLM themselves. What the others
import (connector, worker, messages, metrics, ``LLM``, arguments) is vLLM's public interface.
"""
