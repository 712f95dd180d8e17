"""What we use of vLLM that is no official contract, one file per subject. Checked with 0.26 to 0.32.

Nothing else in this package may rely on it: an import contract lets only these files, and the entry points that vLLM
itself calls, import vLLM.
"""
